"""The host as an accelerator.

Owns what "device" means when there is none: memory is the process's resident set, streams are the
always-idle objects of `host_streams`, pinning is the identity. It starts no threads and initializes
nothing.
"""

import contextlib
import importlib.util
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch

from deepspeed.accelerator import streams
from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from deepspeed.accelerator.host_streams import HostEvent, HostStream

# One object for every query: code that collects the streams it has used in a set must find one
# element here.
_HOST_STREAM = HostStream()

ONECCL_MODULE = "oneccl_bindings_for_pytorch"


def _resident_bytes() -> int:
    # startup: psutil costs milliseconds and is needed for memory reports only.
    import psutil

    return int(psutil.Process().memory_info().rss)


class CPU_Accelerator(DeepSpeedAccelerator):
    """Tensors in host memory, one device, no streams."""

    def __init__(self) -> None:
        super().__init__()
        self._name = "cpu"
        has_oneccl = importlib.util.find_spec(ONECCL_MODULE) is not None
        self._communication_backend_name = "ccl" if has_oneccl else "gloo"
        self.max_mem = 0

    def is_synchronized_device(self) -> bool:
        return True

    # -- identity ----------------------------------------------------------------------------------

    def device_name(self, device_index: int | None = None) -> str:
        return "cpu"

    def device(self, device_index: int | None = None) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def set_device(self, device_index: int) -> None:
        """There is one device and it is current."""

    def current_device(self) -> int:
        return 0

    def current_device_name(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        """How many processes share the host, as the launcher says in `LOCAL_SIZE`; 1 without one.

        Raises:
            ValueError: `LOCAL_SIZE` is no positive number.
        """
        text = os.environ.get("LOCAL_SIZE", "1")
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(
                f"environment variable LOCAL_SIZE={text!r} is not a positive integer; set it to "
                "the number of processes on this machine, or unset it"
            )
        return int(text)

    def synchronize(self, device_index: int | None = None) -> None:
        """Nothing is ever pending."""

    def is_available(self) -> bool:
        return True

    # -- random numbers ----------------------------------------------------------------------------

    def random(self) -> ModuleType:
        return torch.random

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        torch.set_rng_state(new_state)

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        return torch.get_rng_state()

    def manual_seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def initial_seed(self) -> int:
        return torch.initial_seed()

    def default_generator(self, device_index: int = 0) -> torch.Generator:
        return torch.default_generator

    # -- streams -----------------------------------------------------------------------------------

    @property
    def Stream(self) -> Any:
        return HostStream

    @property
    def Event(self) -> Any:
        return HostEvent

    def stream(self, stream: streams.Stream) -> AbstractContextManager[Any]:
        return contextlib.nullcontext(stream)

    def current_stream(self, device_index: int | None = None) -> HostStream:
        return _HOST_STREAM

    def default_stream(self, device_index: int | None = None) -> HostStream:
        return _HOST_STREAM

    # -- memory ------------------------------------------------------------------------------------

    def empty_cache(self) -> None:
        """The host allocator keeps no cache of ours."""

    def get_rss(self) -> int:
        """The resident set in bytes, also remembered for the peak."""
        resident = _resident_bytes()
        self.max_mem = max(self.max_mem, resident)
        return resident

    def reset_rss(self) -> int:
        """Start the peak at the present resident set, in bytes."""
        self.max_mem = _resident_bytes()
        return self.max_mem

    def memory_allocated(self, device_index: int | None = None) -> int:
        return self.get_rss()

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """The largest resident set seen by any memory query since the last reset."""
        self.get_rss()
        return self.max_mem

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        current = self.get_rss()
        return {"allocated_bytes.all.current": current, "allocated_bytes.all.peak": self.max_mem}

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        self.reset_rss()

    def memory_reserved(self, device_index: int | None = None) -> int:
        return self.get_rss()

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        return self.max_memory_allocated(device_index)

    def total_memory(self, device_index: int | None = None) -> int:
        # startup: see _resident_bytes.
        import psutil

        return int(psutil.virtual_memory().total)

    def available_memory(self, device_index: int | None = None) -> int:
        # startup: see _resident_bytes.
        import psutil

        return int(psutil.virtual_memory().available)

    # -- numeric formats ---------------------------------------------------------------------------

    def is_bf16_supported(self) -> bool:
        return True

    def is_fp16_supported(self) -> bool:
        """True: torch has matrix products, reductions and optimizer steps in fp16 on the host."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.float16, torch.bfloat16]

    def _tensor_maker(self, dtype: torch.dtype) -> Any:
        return {
            torch.bfloat16: torch.BFloat16Tensor,
            torch.uint8: torch.ByteTensor,
            torch.float64: torch.DoubleTensor,
            torch.float32: torch.FloatTensor,
            torch.float16: torch.HalfTensor,
            torch.int32: torch.IntTensor,
            torch.int64: torch.LongTensor,
        }[dtype]

    # -- profiling, compilation, graphs ------------------------------------------------------------

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        return callback()

    # -- host memory -------------------------------------------------------------------------------

    def pin_memory(
        self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True
    ) -> torch.Tensor:
        """The tensor itself: nothing copies from host memory to a device here."""
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu"

    # -- environment -------------------------------------------------------------------------------

    def export_envs(self) -> list[str]:
        return []

    def visible_devices_envs(self) -> list[str]:
        return ["CUDA_VISIBLE_DEVICES"]

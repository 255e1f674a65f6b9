"""Devices whose torch module follows the interface of `torch.cuda`. A subclass names it and
overrides what its device does differently; what a module lacks is an error that names it, except
for what is meaningless without it (peaks, ranges).
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch

from deepspeed.accelerator import streams
from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator


class TorchDeviceAccelerator(DeepSpeedAccelerator):
    """An accelerator that speaks through a module like `torch.cuda`; `_export_envs` are prefixes of
    the variables that matter to it, `_visible_devices_envs` those that restrict which devices are
    seen.
    """

    _export_envs: tuple[str, ...] = ()
    _visible_devices_envs: tuple[str, ...] = ()

    @property
    def _module(self) -> Any:
        """The torch module of the device; raises RuntimeError when this torch has none."""
        module = getattr(torch, self._name, None)
        if module is None:
            raise RuntimeError(
                f"this torch has no torch.{self._name}; install a torch for {self._name} devices"
            )
        return module

    def _call(self, name: str, *args: object, default: object = None) -> Any:
        """The module's function ``name``, or ``default`` where the device has no such function."""
        function = getattr(self._module, name, None)
        return default if function is None else function(*args)

    def is_synchronized_device(self) -> bool:
        return False

    # -- identity ----------------------------------------------------------------------------------

    def device_name(self, device_index: int | None = None) -> str:
        return self._name if device_index is None else f"{self._name}:{device_index}"

    def device(self, device_index: int | None = None) -> AbstractContextManager[Any]:
        return self._module.device(device_index)

    def set_device(self, device_index: int) -> None:
        self._module.set_device(device_index)

    def current_device(self) -> int:
        return int(self._module.current_device())

    def current_device_name(self) -> str:
        return f"{self._name}:{self.current_device()}"

    def device_count(self) -> int:
        return int(self._module.device_count())

    def synchronize(self, device_index: int | None = None) -> None:
        self._module.synchronize(device_index)

    def is_available(self) -> bool:
        module = getattr(torch, self._name, None)
        return module is not None and bool(module.is_available())

    # -- random numbers ----------------------------------------------------------------------------

    def random(self) -> ModuleType:
        return torch.random

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        self._module.set_rng_state(new_state, *self._index(device_index))

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        return self._module.get_rng_state(*self._index(device_index))

    def manual_seed(self, seed: int) -> None:
        self._module.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        self._module.manual_seed_all(seed)

    def initial_seed(self) -> int:
        return int(self._module.initial_seed())

    def default_generator(self, device_index: int) -> torch.Generator:
        return self._module.default_generators[device_index]

    @staticmethod
    def _index(device_index: int | None) -> tuple[int, ...]:
        # The modules spell "the current device" as their own default, not as None.
        return () if device_index is None else (device_index,)

    # -- streams -----------------------------------------------------------------------------------

    @property
    def Stream(self) -> Any:
        return self._module.Stream

    @property
    def Event(self) -> Any:
        return self._module.Event

    def stream(self, stream: streams.Stream) -> AbstractContextManager[Any]:
        return self._module.stream(stream)

    def current_stream(self, device_index: int | None = None) -> streams.Stream:
        return self._module.current_stream(device_index)

    def default_stream(self, device_index: int | None = None) -> streams.Stream:
        return self._module.default_stream(device_index)

    # -- memory ------------------------------------------------------------------------------------

    def empty_cache(self) -> None:
        self._module.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        return int(self._call("memory_allocated", device_index, default=0))

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return int(self._call("max_memory_allocated", device_index, default=0))

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        return dict(self._call("memory_stats", device_index, default={}))

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        self._call("reset_peak_memory_stats", device_index)

    def memory_reserved(self, device_index: int | None = None) -> int:
        return int(self._call("memory_reserved", device_index, default=0))

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        return int(self._call("max_memory_reserved", device_index, default=0))

    def total_memory(self, device_index: int | None = None) -> int:
        index = self.current_device() if device_index is None else device_index
        return int(self._module.get_device_properties(index).total_memory)

    def available_memory(self, device_index: int | None = None) -> int:
        """What the device has free plus what the allocator holds without using it."""
        index = self.current_device() if device_index is None else device_index
        idle = self.memory_reserved(index) - self.memory_allocated(index)
        if hasattr(self._module, "mem_get_info"):
            return int(self._module.mem_get_info(index)[0]) + idle
        return self.total_memory(index) - self.memory_allocated(index)

    # -- numeric formats ---------------------------------------------------------------------------

    def is_bf16_supported(self) -> bool:
        return bool(self._call("is_bf16_supported", default=True))

    def is_fp16_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        supported = [torch.float32]
        if self.is_fp16_supported():
            supported.append(torch.float16)
        if self.is_bf16_supported():
            supported.append(torch.bfloat16)
        return supported

    # -- profiling, compilation, graphs ------------------------------------------------------------

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        lazy = getattr(self._module, "_lazy_call", None)
        return callback() if lazy is None else lazy(callback)

    # -- host memory -------------------------------------------------------------------------------

    def pin_memory(
        self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True
    ) -> torch.Tensor:
        if make_copy:
            return tensor.pin_memory()
        shape = tensor.shape if match_shape else (tensor.numel(),)
        return torch.empty(shape, dtype=tensor.dtype, device="cpu", pin_memory=True)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._name

    # -- environment -------------------------------------------------------------------------------

    def export_envs(self) -> list[str]:
        return list(self._export_envs)

    def visible_devices_envs(self) -> list[str]:
        return list(self._visible_devices_envs)


@functools.cache
def vendor_module(name: str) -> ModuleType | None:
    """Import a vendor's torch extension, which registers its device; None if not installed."""
    # optional: vendor package.
    import importlib
    import importlib.util

    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # a parent package is missing
        found = None
    return None if found is None else importlib.import_module(name)

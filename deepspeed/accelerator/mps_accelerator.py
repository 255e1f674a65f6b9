"""Apple GPUs through `torch.mps`. There is one queue: streams are the always-idle objects of
`host_streams`, because operations run in order and a host read waits for them.
"""

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch

from deepspeed.accelerator import streams
from deepspeed.accelerator.host_streams import HostEvent, HostStream
from deepspeed.accelerator.torch_device_accelerator import TorchDeviceAccelerator


class _Queue(HostStream):
    """The one queue."""

    def synchronize(self) -> None:
        torch.mps.synchronize()


class _QueueEvent(HostEvent):
    """An event of the one queue; with a time it waits for the queue, which nobody else holds up."""

    def record(self, stream: HostStream | None = None) -> None:
        if self.enable_timing:
            torch.mps.synchronize()
        super().record(stream)

    def synchronize(self) -> None:
        torch.mps.synchronize()


_QUEUE = _Queue()


class MPS_Accelerator(TorchDeviceAccelerator):
    """`torch.mps`."""

    def __init__(self) -> None:
        super().__init__()
        self._name = "mps"
        self._communication_backend_name = "gloo"

    def is_synchronized_device(self) -> bool:
        """True: there is one queue, so operations are ordered as they are issued."""
        return True

    def use_host_timers(self) -> bool:
        """False: operations run after their calls have returned."""
        return False

    def is_available(self) -> bool:
        return torch.backends.mps.is_available()

    def device(self, device_index: int | None = None) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def set_device(self, device_index: int) -> None:
        """There is one device and it is current."""

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1 if self.is_available() else 0

    def synchronize(self, device_index: int | None = None) -> None:
        torch.mps.synchronize()

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        torch.mps.set_rng_state(new_state)

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        return torch.mps.get_rng_state()

    def manual_seed_all(self, seed: int) -> None:
        torch.mps.manual_seed(seed)

    def initial_seed(self) -> int:
        return torch.initial_seed()

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.mps._get_default_mps_generator()

    @property
    def Stream(self) -> Any:
        return HostStream

    @property
    def Event(self) -> Any:
        return _QueueEvent

    def stream(self, stream: streams.Stream) -> AbstractContextManager[Any]:
        return contextlib.nullcontext(stream)

    def current_stream(self, device_index: int | None = None) -> HostStream:
        return _QUEUE

    def default_stream(self, device_index: int | None = None) -> HostStream:
        return _QUEUE

    def memory_allocated(self, device_index: int | None = None) -> int:
        return int(torch.mps.current_allocated_memory())

    def memory_reserved(self, device_index: int | None = None) -> int:
        return int(torch.mps.driver_allocated_memory())

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """What is allocated now: torch.mps keeps no peaks."""
        return self.memory_allocated()

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """What is held now: torch.mps keeps no peaks."""
        return self.memory_reserved()

    def total_memory(self, device_index: int | None = None) -> int:
        return int(torch.mps.recommended_max_memory())

    def available_memory(self, device_index: int | None = None) -> int:
        return self.total_memory() - self.memory_reserved()

    def is_bf16_supported(self) -> bool:
        """From macOS 14 on."""
        return self.is_available() and torch.backends.mps.is_macos_or_newer(14, 0)

    def is_fp64_supported(self) -> bool:
        return False

    def pin_memory(
        self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True
    ) -> torch.Tensor:
        """The tensor itself: host and device share their memory."""
        return tensor

"""What a device has to offer to the rest of the package.

`DeepSpeedAccelerator` is the contract; one subclass per kind of device lives beside this file.
Nothing outside of `deepspeed.accelerator` may name a kind of device: it asks the object that
`get_accelerator()` returns.
"""

import abc
import contextlib
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch

from deepspeed.accelerator import streams
from deepspeed.accelerator.host_waits import HostWaits
from deepspeed.accelerator.stream_trace import CollectiveTracing, StreamTracer


def _legacy_type(dtype: torch.dtype) -> property:
    """Make a property that stands for one of torch's legacy tensor classes on the device."""
    doc = f"Makes a tensor of {dtype} on the device from a sequence or a size."
    return property(lambda self: self._tensor_maker(dtype), doc=doc)


class DeepSpeedAccelerator(abc.ABC):
    """One kind of device: its identity, memory, streams, random state, numeric formats and build
    tools.

    ``device_index`` always means the local ordinal; None is the current device. Sizes are bytes.

    Attributes:
        _name: the device type as torch spells it, e.g. ``cuda``.
        _communication_backend_name: the torch.distributed backend that moves this device's tensors.
        _compile_backend: the backend `torch.compile` gets when the user names none.
    """

    def __init__(self) -> None:
        self._name: str = ""
        self._communication_backend_name: str = ""
        self._compile_backend: str = "inductor"

    # -- how the device behaves --------------------------------------------------------------------

    @abc.abstractmethod
    def is_synchronized_device(self) -> bool:
        """Whether an operation is finished when its call returns."""

    def use_host_timers(self) -> bool:
        """Whether the host's clock measures the device's work without synchronization."""
        return self.is_synchronized_device()

    def resolves_data_dependency(self) -> bool:
        """Whether the device orders a read after the write it depends on, on whatever streams."""
        return self.is_synchronized_device()

    def handles_memory_backpressure(self) -> bool:
        """Whether issuing work without limit cannot exhaust memory."""
        return self.is_synchronized_device()

    @property
    def defers_collectives(self) -> bool:
        """Whether collectives are issued when called and run by the device's schedule."""
        return False

    # -- identity ----------------------------------------------------------------------------------

    @abc.abstractmethod
    def device_name(self, device_index: int | None = None) -> str:
        """The torch device string: ``cuda:1`` for an index, ``cuda`` for None."""

    @abc.abstractmethod
    def device(self, device_index: int | None = None) -> AbstractContextManager[Any]:
        """A context manager that makes the device current."""

    @abc.abstractmethod
    def set_device(self, device_index: int) -> None:
        """Make the device current."""

    @abc.abstractmethod
    def current_device(self) -> int:
        """The index of the current device."""

    @abc.abstractmethod
    def current_device_name(self) -> str:
        """The torch device string of the current device, usable in ``Tensor.to``."""

    @abc.abstractmethod
    def device_count(self) -> int:
        """How many devices this process sees. Does not initialize the device."""

    @abc.abstractmethod
    def synchronize(self, device_index: int | None = None) -> None:
        """Wait for all work of the device."""

    @abc.abstractmethod
    def is_available(self) -> bool:
        """Whether the device can be used here. Does not initialize it."""

    # -- random numbers ----------------------------------------------------------------------------

    @abc.abstractmethod
    def random(self) -> ModuleType:
        """The module with the device's random functions."""

    @abc.abstractmethod
    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """Set the generator's state (a uint8 tensor from `get_rng_state`)."""

    @abc.abstractmethod
    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """The generator's state as a uint8 tensor."""

    @abc.abstractmethod
    def manual_seed(self, seed: int) -> None:
        """Seed the current device's generator."""

    @abc.abstractmethod
    def manual_seed_all(self, seed: int) -> None:
        """Seed the generators of all devices."""

    @abc.abstractmethod
    def initial_seed(self) -> int:
        """The seed of the current device's generator."""

    @abc.abstractmethod
    def default_generator(self, device_index: int) -> torch.Generator:
        """The device's default generator."""

    # -- streams -----------------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def Stream(self) -> Any:
        """The stream class."""

    @property
    @abc.abstractmethod
    def Event(self) -> Any:
        """The event class."""

    @abc.abstractmethod
    def stream(self, stream: streams.Stream) -> AbstractContextManager[Any]:
        """A context manager under which work is issued on ``stream``."""

    @abc.abstractmethod
    def current_stream(self, device_index: int | None = None) -> streams.Stream:
        """The stream on which work is issued now. Hashable."""

    @abc.abstractmethod
    def default_stream(self, device_index: int | None = None) -> streams.Stream:
        """The stream that is current when none was chosen."""

    def has_passed(self, event: streams.Event) -> bool:
        """Ask an event, of which a tracer does not hear: nothing may rest on the answer."""
        return event.query()

    def name_stream(self, stream: streams.Stream, name: str) -> None:  # noqa: B027  streams of most devices have no names
        """Say what a stream is for: reports call it so where the device lets streams have names."""

    def trace_streams(
        self, tracer: StreamTracer
    ) -> AbstractContextManager[CollectiveTracing | None]:
        """A context manager within which `tracer` hears of every launch, wait and allocation of
        this thread.

        It gives None, or whom to tell of collectives where their backend orders them by itself.

        Raises:
            RuntimeError: this device has no streams.
        """
        raise RuntimeError(
            f"{self._name} has no streams to trace; set DS_ACCELERATOR=sim to trace a simulated "
            "device's"
        )

    def count_host_waits(self) -> AbstractContextManager[HostWaits]:
        """A context manager that gives the `HostWaits` in which this thread's waits for the device
        and blocking or pageable copies are counted by place.

        Raises:
            RuntimeError: this device cannot tell.
        """
        raise RuntimeError(
            f"{self._name} does not tell when the host waits for it; set DS_ACCELERATOR=sim to "
            "count on a simulated device"
        )

    # -- memory ------------------------------------------------------------------------------------

    @abc.abstractmethod
    def empty_cache(self) -> None:
        """Give cached blocks back to the device."""

    @abc.abstractmethod
    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes in tensors now."""

    @abc.abstractmethod
    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """The peak of `memory_allocated`."""

    def reset_max_memory_allocated(self, device_index: int | None = None) -> None:
        """Start the peak of `memory_allocated` anew."""
        self.reset_peak_memory_stats(device_index)

    def memory_cached(self, device_index: int | None = None) -> int:
        """Bytes held by the allocator; the older name of `memory_reserved`."""
        return self.memory_reserved(device_index)

    def max_memory_cached(self, device_index: int | None = None) -> int:
        """The peak of `memory_cached`."""
        return self.max_memory_reserved(device_index)

    def reset_max_memory_cached(self, device_index: int | None = None) -> None:
        """Start the peak of `memory_cached` anew."""
        self.reset_peak_memory_stats(device_index)

    @abc.abstractmethod
    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        """The allocator's counters under torch's keys (``allocated_bytes.all.current``, ...)."""

    @abc.abstractmethod
    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Start all peaks anew."""

    @abc.abstractmethod
    def memory_reserved(self, device_index: int | None = None) -> int:
        """Bytes held by the allocator now."""

    @abc.abstractmethod
    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """The peak of `memory_reserved`."""

    @abc.abstractmethod
    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes the device has."""

    @abc.abstractmethod
    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes that could be allocated now."""

    # -- numeric formats ---------------------------------------------------------------------------

    @abc.abstractmethod
    def is_bf16_supported(self) -> bool:
        """Whether models train in bfloat16."""

    @abc.abstractmethod
    def is_fp16_supported(self) -> bool:
        """Whether models train in float16."""

    @abc.abstractmethod
    def supported_dtypes(self) -> list[torch.dtype]:
        """The dtypes models train in."""

    def is_fp64_supported(self) -> bool:
        """Whether the device computes in float64."""
        return True

    def _tensor_maker(self, dtype: torch.dtype) -> Any:
        """Stands for the legacy tensor classes: called with a sequence or with sizes."""

        def make(*args: Any) -> torch.Tensor:
            if args and all(isinstance(arg, int) for arg in args):
                return torch.empty(args, dtype=dtype, device=self.device_name())
            return torch.tensor(args[0] if args else (), dtype=dtype, device=self.device_name())

        return make

    BFloat16Tensor = _legacy_type(torch.bfloat16)
    ByteTensor = _legacy_type(torch.uint8)
    DoubleTensor = _legacy_type(torch.float64)
    FloatTensor = _legacy_type(torch.float32)
    HalfTensor = _legacy_type(torch.float16)
    IntTensor = _legacy_type(torch.int32)
    LongTensor = _legacy_type(torch.int64)

    # -- profiling, communication, compilation, graphs ---------------------------------------------

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> Any:
        """Open a named range in the device's profiler, if it has one."""
        return None

    def range_pop(self, domain: str | None = None) -> Any:
        """Close the innermost range."""
        return None

    @abc.abstractmethod
    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        """Call ``callback`` when the device is initialized: now, if it is."""

    def communication_backend_name(self) -> str:
        """The torch.distributed backend that moves this device's tensors."""
        return self._communication_backend_name

    def is_triton_supported(self) -> bool:
        """Whether Triton kernels run on the device."""
        return False

    def prefer_triton_grouped_mm(self) -> bool:
        """Whether a Triton grouped matrix product is faster here than torch's own."""
        return False

    def create_graph(self) -> Any:
        """An empty graph for `capture_to_graph`, or None where the device has no graphs."""
        return None

    def capture_to_graph(
        self, graph: object, pool: object = None, stream: streams.Stream | None = None
    ) -> AbstractContextManager[Any]:
        """Capture the work issued under it into ``graph``; without graphs it just runs."""
        return contextlib.nullcontext()

    def is_capturing(self) -> bool:
        """Whether what this thread issues is captured; nobody may ask an event meanwhile."""
        return False

    def replay_graph(self, graph: object) -> None:  # noqa: B027  most devices have no graphs
        """Run a captured graph, if the device has graphs."""

    def get_compile_backend(self) -> str:
        """The backend for `torch.compile`."""
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        """Choose the backend for `torch.compile`.

        Raises:
            ValueError: torch knows no such backend.
        """
        # startup: torch._dynamo takes seconds to import and most runs never compile.
        import torch._dynamo

        known = torch._dynamo.list_backends(exclude_tags=())
        if backend not in known:
            raise ValueError(
                f"compile backend {backend!r} is unknown on {self._name}; torch offers {known}"
            )
        self._compile_backend = backend

    # -- host memory -------------------------------------------------------------------------------

    @abc.abstractmethod
    def pin_memory(
        self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True
    ) -> torch.Tensor:
        """A page-locked host tensor like ``tensor``.

        Args:
            tensor: a host tensor.
            make_copy: copy the contents; False leaves them undefined, for staging buffers.
            match_shape: keep the shape; False allows a flat tensor with the same number of
                elements.
        """

    def host_empty(self, numel: int, dtype: torch.dtype, pin: bool = False) -> torch.Tensor:
        """Uninitialized host memory, 1-D; with `pin` page-locked, where copies are not the host's.
        It is no more than is asked for, and gone when it is let go: after all copies.
        """
        pin = pin and not self.is_synchronized_device()
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=pin)

    @abc.abstractmethod
    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's memory is page-locked."""

    def unpin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """A pageable copy of a pinned tensor; the tensor itself when it is not pinned."""
        return tensor.clone() if self.is_pinned(tensor) else tensor

    @abc.abstractmethod
    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies on this kind of device."""

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in ordinary host memory."""
        return tensor.detach().to("cpu", copy=True)

    def as_host_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself, whose memory is a mapping of a file: the host's."""
        return tensor

    # -- native operators --------------------------------------------------------------------------

    def op_builder_dir(self) -> str:
        """The module in which this device's operator builders are defined."""
        return "deepspeed.ops.op_builder"

    def get_op_builder(self, class_name: str) -> Any:
        """The operator builder class of that name, or None when this device has none."""
        # startup: builders pull in the compiler machinery, which training without native operators
        # never needs.
        return getattr(importlib.import_module(self.op_builder_dir()), class_name, None)

    def create_op_builder(self, class_name: str) -> Any:
        """An operator builder of that name, or None when this device has none."""
        builder = self.get_op_builder(class_name)
        return None if builder is None else builder()

    def build_extension(self) -> Any:
        """setuptools' build command for native extensions."""
        # startup: cpp_extension imports setuptools.
        from torch.utils.cpp_extension import BuildExtension

        return BuildExtension

    # -- environment -------------------------------------------------------------------------------

    @abc.abstractmethod
    def export_envs(self) -> list[str]:
        """Prefixes of environment variables that a launcher hands to remote processes."""

    @abc.abstractmethod
    def visible_devices_envs(self) -> list[str]:
        """The environment variables that restrict which devices a process sees."""

    def set_visible_devices_envs(
        self, current_env: dict[str, str], local_accelerator_ids: list[int]
    ) -> None:
        """Write the devices' ordinals into each of `visible_devices_envs` of ``current_env``."""
        for name in self.visible_devices_envs():
            current_env[name] = ",".join(str(index) for index in local_accelerator_ids)

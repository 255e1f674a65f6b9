"""A device and a process group that only pretend, and count: what a training step asks of them.

Works under this project's interpreter and under upstream's; imports torch alone. Computations are
the host's and done when they return. The group's other ranks have the same values as this one, so
that numbers stay finite. What is counted:

- collectives, each call of the process group, by name;
- host waits: reads of values and shapes that depend on them (`item`, `nonzero`), blocking copies
  between the host and the device, `synchronize` of the device, a stream or an event;
- streams that work is issued on, besides the one that is current when a step begins.

All tensors are the host's here. On a device these would be: what `torch.tensor` and its like make
of numbers without being told a device, what is pinned, what `cpu()` returns. ``to(device)`` is not
seen.
"""

from __future__ import annotations

import functools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.utils._python_dispatch import TorchDispatchMode

BACKEND = "pretended"
counts: Counter[str] = Counter()
COLLECTIVE, WAIT = "collective ", "wait "
# Where the host waited, by kind and place in the program.
places: Counter[str] = Counter()
_TORCH = os.path.dirname(torch.__file__)


def waited(kind: str) -> None:
    """The host waits."""
    counts[WAIT + kind] += 1
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, __file__, "<")):
        frame = frame.f_back
    if frame is not None:
        code = frame.f_code
        places[f"{kind}: {code.co_filename}:{frame.f_lineno} in {code.co_name}"] += 1


def _complete(result: Any) -> Any:
    future: Any = Future()
    future.set_result(result)
    return _create_work_from_future(future)


class PretendedGroup(dist.ProcessGroup):
    """Counts what it is asked for. What would come from other ranks is what this rank has."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._own, self._size = rank, size

    def getBackendName(self) -> str:  # torch's name
        """Of the group."""
        return BACKEND

    def size(self) -> int:
        """How many ranks."""
        return self._size

    def rank(self) -> int:
        """Of this process."""
        return self._own

    @property
    def group_name(self) -> str:
        """As torch registered it."""
        return str(dist.distributed_c10d._world.pg_names[self])

    pg_name = group_name

    def barrier(self, opts: Any = None) -> Any:
        """Counted as what the host waits for."""
        counts[COLLECTIVE + "barrier"] += 1
        waited("barrier")
        return _complete([])

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        """Nothing changes."""
        counts[COLLECTIVE + "broadcast"] += 1
        return _complete(tensors)

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        """A sum over equal ranks would grow; it stays as it is."""
        counts[COLLECTIVE + "all-reduce"] += 1
        return _complete(tensors)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        """As `allreduce`: one message."""
        return self.allreduce(tensors)

    def reduce(self, tensors: Any, opts: Any = None) -> Any:
        """As `allreduce`."""
        counts[COLLECTIVE + "reduce"] += 1
        return _complete(tensors)

    def all_gather_single(self, output: Any, own: Any, opts: Any = None) -> Any:
        """Every rank has what this one has."""
        counts[COLLECTIVE + "all-gather"] += 1
        output.view(self._size, -1).copy_(own.reshape(1, -1).expand(self._size, -1))
        return _complete([output])

    def reduce_scatter_single(self, output: Any, whole: Any, opts: Any = None) -> Any:
        """This rank's part stays as it is."""
        counts[COLLECTIVE + "reduce-scatter"] += 1
        output.view(-1).copy_(whole.reshape(self._size, -1)[self._own])
        return _complete([output])

    def all_to_all_single(self, output: Any, own: Any, *sizes: Any, opts: Any = None) -> Any:
        """Every rank has sent what this one sends to itself, in parts of one size."""
        counts[COLLECTIVE + "all-to-all"] += 1
        part = own.reshape(self._size, -1)[self._own]
        output.view(self._size, -1).copy_(part.expand(self._size, -1))
        return _complete([output])

    # The same under the names of torch before 2.13.
    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single
    alltoall_base = all_to_all_single

    def allgather(self, outputs: Any, tensors: Any, opts: Any = None) -> Any:
        """As `all_gather_single`, into a list."""
        counts[COLLECTIVE + "all-gather"] += 1
        for pieces, own in zip(outputs, tensors, strict=True):
            for piece in pieces:
                piece.copy_(own)
        return _complete(outputs)

    def scatter(self, outputs: Any, tensors: Any, opts: Any = None) -> Any:
        """Every rank gets this one's part; rank 0 has them all."""
        counts[COLLECTIVE + "scatter"] += 1
        for output, parts in zip(outputs, tensors, strict=False):
            output.copy_(parts[self._own])
        return _complete(outputs)

    def allgather_into_tensor_coalesced(self, outputs: Any, tensors: Any, opts: Any = None) -> Any:
        """One message of several tensors."""
        for output, own in zip(outputs, tensors, strict=True):
            output.view(self._size, -1).copy_(own.reshape(1, -1).expand(self._size, -1))
        counts[COLLECTIVE + "all-gather"] += 1
        return _complete(outputs)

    def reduce_scatter_tensor_coalesced(self, outputs: Any, tensors: Any, opts: Any = None) -> Any:
        """One message of several tensors."""
        for output, whole in zip(outputs, tensors, strict=True):
            output.view(-1).copy_(whole.reshape(self._size, -1)[self._own])
        counts[COLLECTIVE + "reduce-scatter"] += 1
        return _complete(outputs)


def start_group(world: int) -> None:
    """Be rank 0 of `world` pretended ranks."""
    # optional: torch's own tests need it, and torch below 2.6 has it elsewhere
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def make(store: Any, rank: int, size: int, timeout: Any) -> PretendedGroup:
        return PretendedGroup(rank, size)

    dist.Backend.register_backend(BACKEND, make, devices=["cpu"])
    dist.init_process_group(BACKEND, rank=0, world_size=world, store=FakeStore())


class Event:
    """Never over before somebody waits for it: the host runs ahead."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes what a device's event takes."""

    def record(self, stream: Any = None) -> None:
        """Nothing is pending."""

    def wait(self, stream: Any = None) -> None:
        """A stream's wait is none of the host's."""

    def query(self) -> bool:
        """False: see class."""
        return False

    def synchronize(self) -> None:
        """The host waits."""
        waited("event")

    def elapsed_time(self, end_event: Event) -> float:
        """No time passes, but none must be divided by."""
        return 1.0


class Stream:
    """Counts as used when it is current while operators are issued."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._outer: list[Stream] = []

    def wait_stream(self, stream: Any) -> None:
        """See `Event.wait`."""

    def wait_event(self, event: Any) -> None:
        """See `Event.wait`."""

    def record_event(self, event: Any = None) -> Any:
        """A new one if there is none."""
        return event or Event()

    def query(self) -> bool:
        """See `Event.query`."""
        return False

    def synchronize(self) -> None:
        """The host waits."""
        waited("stream")

    def __enter__(self) -> Stream:
        self._outer.append(Device.current)
        Device.current = self
        return self

    def __exit__(self, *exc: object) -> None:
        Device.current = self._outer.pop()


class Device:
    """What is current.

    Attributes:
        default: The stream that is current when none was chosen.
        current: The stream that work is issued on.
        used: Streams that operators were issued on.
    """

    default = current = Stream()
    used: set[Stream] = set()  # noqa: RUF012  one device, no instances


@contextmanager
def on_stream(stream: Stream | None) -> Iterator[Stream | None]:
    """Within it work is issued on `stream`; None changes nothing."""
    if stream is None:
        yield None
        return
    with stream:
        yield stream


_READS = {
    "aten::_local_scalar_dense": "item",
    **{
        f"aten::{name}": name
        for name in (
            "equal",
            "masked_select",
            "nonzero",
            "unique_consecutive",
            "_unique",
            "_unique2",
        )
    },
}
_MASKED = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
_COPIES = ("aten::copy_", "aten::_foreach_copy_")


def _tensors(*arguments: Any) -> list[torch.Tensor]:
    found = []
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            found.append(argument)
        elif isinstance(argument, (list, tuple)):
            found += _tensors(*argument)
    return found


class Watch(TorchDispatchMode):
    """Counts host waits and streams of the operators within it."""

    def __init__(self) -> None:
        super().__init__()
        # By storage. Keeps the memory, so that no other gets its address.
        self._hosts: dict[int, Any] = {}

    def make_hosts(self, tensor: torch.Tensor) -> torch.Tensor:
        """Let `tensor` be in host memory."""
        storage = tensor.untyped_storage()
        self._hosts[storage._cdata] = storage
        return tensor

    def is_hosts(self, tensor: torch.Tensor) -> bool:
        """Whether it would be in host memory."""
        return tensor.untyped_storage()._cdata in self._hosts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # consists of tensors, which come here one by one
        kwargs = kwargs or {}
        if any(issubclass(t, FakeTensor) for t in types):
            return func(*args, **kwargs)  # shapes without values
        name = func._schema.name
        if Device.current is not Device.default:
            Device.used.add(Device.current)
        if name in _READS and not all(map(self.is_hosts, _tensors(*args))):
            waited(_READS[name])
        elif name in _MASKED and any(index.dtype == torch.bool for index in _tensors(args[1])):
            if name == "aten::index" or args[2].numel() > 1:
                waited("index by a mask")  # how many elements there are
        elif name in _COPIES:
            sides = [{self.is_hosts(tensor) for tensor in _tensors(side)} for side in args[:2]]
            position = [argument.name for argument in func._schema.arguments].index("non_blocking")
            given = args[position] if len(args) > position else kwargs.get("non_blocking", False)
            if sides[0] != sides[1] and not given:
                waited("blocking copy")
        result = func(*args, **kwargs)
        inputs = _tensors(*args)
        if inputs and all(map(self.is_hosts, inputs)):
            for tensor in _tensors(result):
                self.make_hosts(tensor)  # computed by the host
        return result


watch = Watch()


def _making(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = original(*args, **kwargs)
        if args and isinstance(args[0], torch.Tensor):
            return made
        if kwargs.get("device") is None:
            return watch.make_hosts(made)
        waited("blocking copy")
        return made

    return make


def _reading(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if watch.is_hosts(tensor):
            return original(tensor, *args, **kwargs)
        waited(name)
        result = original(tensor, *args, **kwargs)
        return watch.make_hosts(result.clone()) if name == "cpu" else result

    return read


def install() -> None:
    """Let this process's tensors be a pretended device's from now on, and torch's own device of the
    host have its streams.
    """
    torch.tensor, torch.as_tensor = _making(torch.tensor), _making(torch.as_tensor)
    torch.from_numpy = _making(torch.from_numpy)
    for name in ("cpu", "tolist", "numpy"):
        setattr(torch.Tensor, name, _reading(name, getattr(torch.Tensor, name)))
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign]
    host: Any = torch.cpu
    host.Stream, host.stream = Stream, on_stream
    host.current_stream = lambda device=None: Device.current


def install_accelerator() -> None:
    """Let whichever `deepspeed` there is train on the pretended device."""
    # optional: torch's own systems are counted without it
    from deepspeed.accelerator import set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    class Accelerator(CPU_Accelerator):  # type: ignore[misc,unused-ignore]
        """The host with streams, and memory of its own."""

        Stream, Event = Stream, Event  # type: ignore[assignment,unused-ignore]

        def is_synchronized_device(self) -> bool:
            return False

        use_host_timers = resolves_data_dependency = is_synchronized_device
        handles_memory_backpressure = is_synchronized_device

        def synchronize(self, device_index: Any = None) -> None:
            waited("device")

        def stream(self, stream: Any) -> Any:
            return on_stream(stream)

        def current_stream(self, device_index: Any = None) -> Any:
            return Device.current

        def default_stream(self, device_index: Any = None) -> Any:
            return Device.default

        def pin_memory(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
            return watch.make_hosts(tensor.clone())

        to_host = pin_memory

        def is_pinned(self, tensor: Any) -> bool:
            return watch.is_hosts(tensor)

        def on_accelerator(self, tensor: Any) -> bool:
            return not watch.is_hosts(tensor)

    set_accelerator(Accelerator())


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Within it everything is counted, from zero."""
    counts.clear()
    places.clear()
    Device.used.clear()
    yield counts

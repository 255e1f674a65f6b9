"""What happens on real streams, told to a `StreamTracer`: CUDA's side of `trace_streams`.

Operators are seen by a dispatch mode (backward's too: autograd's threads inherit it); events,
waits, synchronizations and allocations through torch's own trace of GPU calls, so that those of C++
code are seen as well. Not seen: kernels that no operator stands for (Triton kernels of compiled
code, graph replays), and the host's reads of page-locked memory through `numpy` or `tolist`.
Handles are those of one device.

torch cannot switch its trace off again: after the first use, GPU calls of this process go through
empty lists of callbacks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.cuda import _gpu_trace
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed.accelerator import operators
from deepspeed.accelerator.stream_trace import Access, StreamTracer

UNKNOWN_SIZE = 2**62
"""torch tells the address of an allocation only; as a write it covers all accesses there later."""

COLLECTIVES = "c10d"
"""Namespace of torch's collectives, on their own streams; `CudaTrace.collective` tells of them."""

Address = int
Handle = int
Tensors = Sequence[torch.Tensor]


class StreamHandle:
    """A stream, for reports."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"<{self._name}>"


class EventHandle:
    """One life of an event: CUDA gives a deleted event's handle to the next one."""


class IssuedCollective:
    """A collective that runs on its group's stream."""

    def __init__(
        self, tracer: StreamTracer, stream: Hashable, current_stream: Callable[[], Hashable]
    ) -> None:
        self._tracer = tracer
        self._current_stream = current_stream
        self._done = EventHandle()
        tracer.event_recorded(self._done, stream)

    def stream_waits(self) -> None:
        self._tracer.event_waited(self._done, self._current_stream())

    def host_waited(self) -> None:
        self._tracer.event_synchronized(self._done)


def _current_handle() -> Handle:
    return int(torch.cuda.current_stream().cuda_stream)


class CudaTrace:
    """Resolves tensors, streams and events and tells the tracer."""

    def __init__(
        self,
        tracer: StreamTracer,
        current_handle: Callable[[], Handle] = _current_handle,
        device_type: str = "cuda",
    ) -> None:
        self._tracer = tracer
        self._current_handle = current_handle
        self._device_type = device_type
        self._serials = itertools.count(1)
        self._storages: dict[Address, int] = {}
        # Page-locked host memory that a stream has been given to read or write.
        self._host_storages: dict[Address, tuple[StorageWeakRef, int]] = {}
        self._events: dict[Handle, EventHandle] = {}
        self._streams: dict[Hashable, StreamHandle] = {0: StreamHandle("default stream")}

    # Names of things

    def _stream(self, handle: Handle) -> StreamHandle:
        # A group's stream has a label as its key, so real streams are numbered among themselves.
        number = sum(isinstance(key, int) for key in self._streams)
        return self._streams.setdefault(handle, StreamHandle(f"stream {number}"))

    def current_stream(self) -> StreamHandle:
        return self._stream(self._current_handle())

    def _event(self, handle: Handle) -> EventHandle:
        return self._events.setdefault(handle, EventHandle())

    def _on_device(self, tensor: torch.Tensor) -> bool:
        # Fake and wrapper tensors have no memory of their own; what they stand for is dispatched
        # again.
        is_plain = type(tensor).__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
        is_here = tensor.device.type == self._device_type
        return is_plain and is_here and tensor.layout == torch.strided

    def _storage(self, tensor: torch.Tensor) -> int:
        address = tensor.untyped_storage().data_ptr()
        # Memory that is older than the trace gets its number when it is first seen.
        return self._storages.get(address) or self._storages.setdefault(
            address, next(self._serials)
        )

    def _accesses(self, reads: Tensors, writes: Tensors) -> list[Access]:
        found: list[Access] = []
        for tensor, is_written in _marked(reads, writes):
            if self._on_device(tensor):
                found += _split(tensor, self._storage(tensor), is_written)
        return found

    # Operators

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Tell of an operator and call it: arguments before the call, because the operator may
        synchronize before it returns; fresh results after it, because only then they exist.
        """
        if func is torch.ops.aten.record_stream.default:
            self._tracer.stream_recorded(self._storage(args[0]), self._stream(_handle_of(args[1])))
            return func(*args, **kwargs)
        if func.namespace == COLLECTIVES or operators.is_view(func):
            return func(*args, **kwargs)
        name = func.name()
        reads, writes = operators.reads(func, args, kwargs), operators.writes(func, args, kwargs)
        is_asynchronous = bool(operators.arguments(func, args, kwargs).get("non_blocking", False))
        given = self._accesses(reads, writes)
        if given:
            if is_asynchronous:
                given += self._host_accesses(reads, writes, register=True)
            self._tracer.launched(name, self.current_stream(), given)
        elif self._host_storages:
            on_host = self._host_accesses(reads, writes, register=False)
            if on_host:
                self._tracer.host_accessed(name, on_host)
        result = func(*args, **kwargs)
        self._results(name, [*reads, *writes], result, is_asynchronous and bool(given))
        return result

    def _results(self, name: str, given: Tensors, result: object, is_asynchronous: bool) -> None:
        results = list(operators.tensors_in(result))
        known = {tensor.untyped_storage()._cdata for tensor in given} if results else set()
        fresh = [tensor for tensor in results if tensor.untyped_storage()._cdata not in known]
        accesses = self._accesses((), fresh)
        if is_asynchronous:
            accesses += self._host_accesses((), fresh, register=True)
        if accesses:
            self._tracer.launched(name, self.current_stream(), accesses)

    def _host_accesses(self, reads: Tensors, writes: Tensors, register: bool) -> list[Access]:
        """Accesses to page-locked memory; CUDA copies pageable memory before the call returns."""
        found: list[Access] = []
        for tensor, is_written in _marked(reads, writes):
            if tensor.device.type != "cpu" or self._device_type == "cpu":
                continue
            address = tensor.untyped_storage().data_ptr()
            known = self._host_storages.get(address)
            if known is not None and known[0].expired():
                del self._host_storages[address]
                known = None
            if known is None and register and tensor.is_pinned():
                known = self._host_storages[address] = (
                    StorageWeakRef(tensor.untyped_storage()),
                    next(self._serials),
                )
            if known is not None:
                found += _split(tensor, known[1], is_written)
        return found

    # Collectives

    def collective(
        self, name: str, group: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
    ) -> IssuedCollective:
        """Tell of a collective about to be issued: on the group's stream, after the current one."""
        stream = self._streams.setdefault(group, StreamHandle(f"nccl stream of {group}"))
        issued = EventHandle()
        self._tracer.event_recorded(issued, self.current_stream())
        self._tracer.event_waited(issued, stream)
        self._tracer.launched(name, stream, self._accesses(reads, writes))
        for tensor in filter(self._on_device, (*reads, *writes)):
            # torch keeps a collective's tensors itself until it is done.
            self._tracer.stream_recorded(self._storage(tensor), stream)
        return IssuedCollective(self._tracer, stream, self.current_stream)

    # What torch's trace of GPU calls tells

    def _allocated(self, address: Address) -> None:
        serial = self._storages[address] = next(self._serials)
        # The allocator hands memory out for the stream that is current at the call.
        self._tracer.allocated(serial, UNKNOWN_SIZE, self.current_stream())

    def _freed(self, address: Address) -> None:
        serial = self._storages.pop(address, None)
        if serial is not None:
            self._tracer.freed(serial)

    def _event_synchronized(self, event: Handle) -> None:
        self._tracer.event_synchronized(self._event(event))

    def _stream_synchronized(self, stream: Handle) -> None:
        self._tracer.stream_synchronized(self._stream(stream))

    def _event_recorded(self, event: Handle, stream: Handle) -> None:
        self._tracer.event_recorded(self._event(event), self._stream(stream))

    def _event_waited(self, event: Handle, stream: Handle) -> None:
        self._tracer.event_waited(self._event(event), self._stream(stream))

    def _event_deleted(self, event: Handle) -> None:
        self._events.pop(event, None)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear what torch's trace of GPU calls tells, and successful queries, which it doesn't."""
        callbacks: list[tuple[Any, Callable[..., None]]] = [
            (_gpu_trace.EventDeletionCallbacks, self._event_deleted),
            (_gpu_trace.EventRecordCallbacks, self._event_recorded),
            (_gpu_trace.EventWaitCallbacks, self._event_waited),
            (_gpu_trace.EventSynchronizationCallbacks, self._event_synchronized),
            (_gpu_trace.StreamSynchronizationCallbacks, self._stream_synchronized),
            (_gpu_trace.DeviceSynchronizationCallbacks, self._tracer.device_synchronized),
            (_gpu_trace.MemoryAllocationCallbacks, self._allocated),
            (_gpu_trace.MemoryDeallocationCallbacks, self._freed),
        ]
        for registry, callback in callbacks:
            registry.add_callback(callback)
        torch._C._activate_gpu_trace()
        try:
            with (
                _query_tells(torch.cuda.Event, "cuda_event", self._event_synchronized),
                _query_tells(torch.cuda.Stream, "cuda_stream", self._stream_synchronized),
            ):
                yield
        finally:
            for registry, callback in callbacks:
                registry.callback_list.remove(callback)


@contextmanager
def _query_tells(kind: Any, handle: str, done: Callable[[Handle], None]) -> Iterator[None]:
    """Within it, `query()` that answers yes tells `done`: the host knows as if it had waited."""
    query = kind.query

    def telling(self: Any) -> bool:
        is_done = bool(query(self))
        if is_done:
            done(int(getattr(self, handle)))
        return is_done

    kind.query = telling
    try:
        yield
    finally:
        kind.query = query


def _marked(reads: Tensors, writes: Tensors) -> list[tuple[torch.Tensor, bool]]:
    return [*((tensor, False) for tensor in reads), *((tensor, True) for tensor in writes)]


def _split(tensor: torch.Tensor, storage: int, writes: bool) -> list[Access]:
    base, pieces = tensor.untyped_storage().data_ptr(), operators.byte_intervals(tensor)
    return [Access(storage, start, end, writes, base + start) for start, end in pieces]


def _handle_of(stream: Any) -> Handle:
    """The CUDA handle of a `torch.Stream`, as operators get it, or of a `torch.cuda.Stream`."""
    if not hasattr(stream, "cuda_stream"):
        stream = torch.cuda.Stream(
            stream_id=stream.stream_id,
            device_index=stream.device_index,
            device_type=stream.device_type,
        )
    return int(stream.cuda_stream)


class _Operators(TorchDispatchMode):
    def __init__(self, trace: CudaTrace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Below a dispatcher no tensor's class hears of a function any more.
        with torch._C.DisableTorchFunctionSubclass():
            return self._trace.run(func, args, kwargs or {})


_active: list[CudaTrace] = []


@contextmanager
def traced(trace: CudaTrace) -> Iterator[CudaTrace]:
    """Within it, everything is told."""
    if _active:
        raise RuntimeError("trace_streams: another tracer is active; leave its context first")
    _active.append(trace)
    try:
        with trace.listening(), _Operators(trace):
            yield trace
    finally:
        _active.remove(trace)

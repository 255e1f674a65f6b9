"""Side streams, events and buffers kept alive across them: the only place that creates a stream.

[Note: lifetimes across streams]
A buffer written on one stream and read on another needs two things: the reader's stream waits for
the writer's, and the memory isn't written again before the reader is done, by its owner or by
whoever gets it after its last reference is gone. The first is `SideStream.wait_for`. For the
second the streams that the memory came from wait for an event recorded behind the reader's last
use: at once (`SideStream.release`), or two uses later, and until then a Python reference is held
(`SideStream.keep_alive`).

Why dropping the last reference is safe once those streams wait, without the host knowing that the
reader is done: the allocator hands freed memory out again on the stream that it was allocated for,
and the new owner's work there is issued behind the wait. A gradient may have been allocated for
another stream than the one its hook ran on; autograd has then called `record_stream` for the
hook's, and the allocator itself waits for what that stream has been given by the time of the drop:
the wait is in that. So each of several producers waits, and none for more than this.

Nothing asks an event whether it has passed: a host that runs ahead would hear no every time and
hold everything, and a host that is recording a graph must not ask. `record_stream` is not called
here either: when memory comes back would then hang on when the allocator asks.

On devices without streams (CPU) the same code runs: entering the stream is a no-op and overlap
comes from asynchronous handles.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

from deepspeed.accelerator import Event, Stream, get_accelerator

# Uses of other streams' memory that are under way at once: one may run while the next is issued.
MAX_KEPT = 2


def event_here() -> Event | None:
    """An event behind what the current stream was given, for a host that is to wait for it; None
    where it need not: a device that computes as it is told.
    """
    accelerator = get_accelerator()
    if accelerator.is_synchronized_device():
        return None
    event: Event = accelerator.current_stream().record_event()
    return event


class _Kept(NamedTuple):
    """Tensors that a side stream uses until `event`, of memory allocated for `producers`."""

    tensors: list[torch.Tensor]
    producers: tuple[Stream, ...]
    event: Event


class SideStream:
    """A stream beside the one that computes, and what must outlive the work on it.

    One stream that owns the buffers keeps reductions right with and without overlap, though
    gradients come from several streams and buffers are used again: without it the current stream
    waits after every reduction. `stream` is None on devices without; reports call it `name`.
    """

    def __init__(self, overlap: bool, name: str = "reduction stream") -> None:
        accelerator = get_accelerator()
        self.has_streams = not accelerator.resolves_data_dependency()
        self.overlap = overlap
        # Its short kernels go first: what other ranks wait for comes behind them.
        self.stream: Stream | None = accelerator.Stream(priority=-1) if self.has_streams else None
        if self.stream is not None:
            accelerator.name_stream(self.stream, name)
        self._kept: deque[_Kept] = deque()

    def current_stream(self) -> Stream:
        """The stream current here and now; in a hook, that of its gradient."""
        return get_accelerator().current_stream()

    def wait_for(self, producers: Iterable[Stream]) -> None:
        """Let this stream wait for all work issued so far on each of `producers`."""
        if self.stream is not None:
            for stream in producers:
                self.stream.wait_stream(stream)

    def issue(self) -> AbstractContextManager[None]:
        if self.stream is None:
            return nullcontext()
        return get_accelerator().stream(self.stream)

    def release(self, producers: Iterable[Stream]) -> None:
        """Let each of `producers` wait for what this stream was given so far: their memory that
        this uses may then be dropped, or written again.
        """
        if self.stream is not None:
            done = self.stream.record_event()
            for stream in producers:
                stream.wait_event(done)

    def keep_alive(self, tensors: list[torch.Tensor], producers: Collection[Stream]) -> None:
        """Hold `tensors`, memory of `producers`, for the work issued so far on this stream. At most
        `MAX_KEPT` are held, then producers wait for the oldest use: so memory is bounded however
        far the host runs ahead, and their work still goes on beside the use.
        """
        if self.stream is None:
            return
        while len(self._kept) >= MAX_KEPT:
            self._let_go()
        self._kept.append(_Kept(tensors, tuple(producers), self.stream.record_event()))

    def _let_go(self) -> None:
        oldest = self._kept.popleft()
        # Before the references go: see [Note: lifetimes across streams].
        for stream in oldest.producers:
            stream.wait_event(oldest.event)

    def join_unless_overlapped(self) -> None:
        if self.stream is not None and not self.overlap:
            get_accelerator().current_stream().wait_stream(self.stream)

    def join(self) -> None:
        """Let the current stream wait for this one, and producers for what is kept, dropped now."""
        if self.stream is not None:
            get_accelerator().current_stream().wait_stream(self.stream)
            while self._kept:
                self._let_go()

    def destroy(self) -> None:
        if self.stream is not None:
            self.stream.synchronize()
        self._kept.clear()


class LateNumber:
    """One number, or a list, on its way from a device to page-locked host memory that is used
    again. Reading waits for its copy alone: what was issued after `post` keeps the device busy.
    """

    def __init__(self) -> None:
        self._host: torch.Tensor | None = None
        self._copied: Event | None = None

    def post(self, number: torch.Tensor) -> None:
        """Copy a tensor, always of one shape and dtype, behind the current stream's work so far.
        What was posted before is lost unless it has been read.
        """
        accelerator = get_accelerator()
        if self._host is None:
            memory = torch.zeros(number.shape, dtype=number.dtype, device="cpu")
            self._host = accelerator.pin_memory(memory)
        self._host.copy_(number, non_blocking=True)
        self._copied = accelerator.Event()
        self._copied.record(accelerator.current_stream())

    def is_there(self) -> bool:
        return self._copied is None or bool(self._copied.query())

    def read(self) -> float:
        """Wait for what was posted last, and return it; RuntimeError if nothing was."""
        return float(self._arrived().item())

    def read_list(self) -> list[float]:
        """Read a 1-d tensor, without asking to wait where it is there."""
        numbers: list[float] = self._arrived(look_first=True).tolist()
        return numbers

    def _arrived(self, look_first: bool = False) -> torch.Tensor:
        if self._host is None or self._copied is None:
            raise RuntimeError("LateNumber.read: nothing was posted; call post() first")
        if look_first and self.is_there():
            return self._host
        self._copied.synchronize()
        return self._host


class StagingBuffers:
    """Page-locked (if `pin`) host memory on its way to or from a device, used again: locking pages
    takes longer than copying them. With `count` buffers under way, `take` waits for the oldest.
    """

    def __init__(self, count: int, pin: bool = True) -> None:
        self._count = count
        self._pin = pin
        self._free: deque[tuple[torch.Tensor, Event | None]] = deque()

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor of at least `numel` elements, undefined, that no copy uses."""
        if self._free and (self._free[0][1] is None or len(self._free) >= self._count):
            memory, event = self._free.popleft()
            if event is not None:
                event.synchronize()
            if memory.dtype == dtype and memory.numel() >= numel:
                return memory
        return get_accelerator().host_empty(numel, dtype, self._pin)

    def give_back(self, buffer: torch.Tensor, event: Event | None = None) -> None:
        """Let a tensor from `take` be used again, after `event` if there is one."""
        self._free.append((buffer, event))

"""Side streams, events and buffers kept alive across them: the only place that creates a stream.

[Note: lifetimes across streams]
A buffer written on one stream and read on another needs two things: the reader's stream waits for
the writer's, and the memory isn't handed out again before the reader is done. The first is
`CommContext.wait_for`; the second is a Python reference held in a keep-alive pair `(tensors,
event)` until the event, recorded on the reader's stream after its last use, has passed.
`record_stream` is not used: it defers reuse by an amount that nobody can predict.

On devices without streams (CPU) the same code runs: entering the stream is a no-op and overlap
comes from asynchronous handles.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext

import torch

from deepspeed.accelerator import Event, Stream, get_accelerator


class CommContext:
    """The reduction stream of one optimizer and what must outlive the work on it.

    Without overlap the same stream is used, and the current one waits for it after every reduction:
    gradients come from several streams and bucket buffers are reused either way, so one stream that
    owns the buffers is what keeps both cases right.

    Args:
        overlap: Communicate beside backward.
        name: What reports call the stream.

    Attributes:
        has_streams: Whether the device orders work by streams at all.
        reduction_stream: The side stream; None on devices without streams.
    """

    def __init__(self, overlap: bool, name: str = "reduction stream") -> None:
        accelerator = get_accelerator()
        self.has_streams = not accelerator.resolves_data_dependency()
        self.overlap = overlap
        self.reduction_stream: Stream | None = accelerator.Stream() if self.has_streams else None
        if self.reduction_stream is not None:
            accelerator.name_stream(self.reduction_stream, name)
        self._alive: deque[tuple[list[torch.Tensor], Event]] = deque()

    @property
    def async_handles(self) -> bool:
        """Whether overlap comes from asynchronous work handles instead of a stream."""
        return self.overlap and not self.has_streams

    def current_stream(self) -> Stream:
        """The stream current here and now; inside a hook, the one that its gradient was produced
        on.
        """
        return get_accelerator().current_stream()

    def wait_for(self, producers: Iterable[Stream]) -> None:
        """Let the reduction stream wait for all work issued so far on each of `producers`."""
        if self.reduction_stream is not None:
            for stream in producers:
                self.reduction_stream.wait_stream(stream)

    @contextmanager
    def on_reduction_stream(self) -> Iterator[None]:
        """Issue work on the reduction stream, if the device has streams."""
        context = (
            nullcontext()
            if self.reduction_stream is None
            else get_accelerator().stream(self.reduction_stream)
        )
        with context:
            yield

    def keep_alive(self, tensors: list[torch.Tensor]) -> None:
        """Hold `tensors` until the work issued so far on the reduction stream is done."""
        if self.reduction_stream is None:
            return
        while self._alive and self._alive[0][1].query():
            self._alive.popleft()
        event = get_accelerator().Event()
        event.record(self.reduction_stream)
        self._alive.append((tensors, event))

    def issued(self) -> None:
        """A reduction was issued: without overlap, let the current stream wait for it."""
        if self.reduction_stream is not None and not self.overlap:
            get_accelerator().current_stream().wait_stream(self.reduction_stream)

    def join(self) -> None:
        """Let the current stream wait for the reduction stream; what was kept alive may go.

        Dropping the references is safe here: memory freed now is reused by work on the current
        stream, which waits.
        """
        if self.reduction_stream is not None:
            get_accelerator().current_stream().wait_stream(self.reduction_stream)
            self._alive.clear()

    def destroy(self) -> None:
        """Wait for outstanding work and let go of everything."""
        if self.reduction_stream is not None:
            self.reduction_stream.synchronize()
        self._alive.clear()


class StagingBuffers:
    """Page-locked host memory between the host and a device, used again and again: locking pages
    takes longer than copying them.

    Args:
        count: How many buffers that are still being copied there may be before `take` waits for the
            oldest.
        pin: Whether to lock the pages; otherwise copies are synchronous, and need no events.
    """

    def __init__(self, count: int, pin: bool = True) -> None:
        self._count = count
        self._pin = pin
        self._free: deque[tuple[torch.Tensor, Event | None]] = deque()

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor of at least `numel` elements that no copy uses any more; its content is
        undefined.
        """
        if self._free and (self._free[0][1] is None or len(self._free) >= self._count):
            memory, event = self._free.popleft()
            if event is not None:
                event.synchronize()
            if memory.dtype == dtype and memory.numel() >= numel:
                return memory
        memory = torch.empty(numel, dtype=dtype, device="cpu")
        return get_accelerator().pin_memory(memory) if self._pin else memory

    def give_back(self, buffer: torch.Tensor, event: Event | None = None) -> None:
        """A tensor from `take` may be used again, after `event` if there is one."""
        self._free.append((buffer, event))

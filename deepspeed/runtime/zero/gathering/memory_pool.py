"""Memory of gathered parameters, used again and again instead of allocated anew.

A buffer goes back when the last reader of its content was issued, with an event of every stream
that read it; who takes it next lets its own stream wait for them, and the host for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from deepspeed.accelerator import Event, Stream, get_accelerator
from deepspeed.runtime.streams import SideStream
from deepspeed.runtime.zero.gathering.units import GatherSettings


class PoolBuffer:
    """A piece of memory, 1-D, the event behind what `filled` it, and owners' views, dear."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.filled: Event | None = None
        self.owner: Any = None
        self.views: dict[Any, Any] = {}
        self._last_reads: list[Any] = []

    def read_on(self, streams: Iterable[Stream]) -> None:
        for stream in streams:
            event = get_accelerator().Event()
            event.record(stream)
            self._last_reads.append(event)

    def wait_for_reads(self, stream: Stream) -> None:
        for event in self._last_reads:
            stream.wait_event(event)
        self._last_reads = []


@torch.no_grad()
def poison(tensor: torch.Tensor) -> None:
    """Fill with NaN, or the largest number of an integer dtype."""
    is_float = tensor.is_floating_point() or tensor.is_complex()
    # Under another version counter: who still has it is to see NaN and not an error of autograd.
    tensor.data.fill_(math.nan if is_float else _largest(tensor.dtype))


def _largest(dtype: torch.dtype) -> int:
    return 1 if dtype == torch.bool else torch.iinfo(dtype).max


class MemoryPool:
    """Buffers of one kind, by the address of their storage. Where `is_poisoned`, what is given back
    is overwritten by NaN, so that whoever still reads it, or reads it too early, shows.
    """

    def __init__(self, has_streams: bool) -> None:
        self._has_streams = has_streams
        # What is free: of each dtype and device by size, the last that was given back at the end.
        self._free: dict[Any, dict[int, dict[PoolBuffer, None]]] = {}
        self._last_of: dict[Any, PoolBuffer] = {}  # who had which
        self.by_pointer: dict[int, PoolBuffer] = {}
        self.is_poisoned = False

    def take(
        self, numel: int, dtype: torch.dtype, device: torch.device, owner: object
    ) -> PoolBuffer:
        """Find or make a buffer that what is issued now on the current stream may write to."""
        sizes = self._free.get((dtype, device), {})
        size = min((size for size, same in sizes.items() if same and size >= numel), default=None)
        if size is not None:
            # The smallest, of those the one that this owner had, which has its views, and then the
            # one just given back, which caches still have.
            buffer = self._last_of.get(owner)
            if buffer in sizes[size]:
                del sizes[size][buffer]
            else:
                buffer, _ = sizes[size].popitem()
            if self._has_streams:
                buffer.wait_for_reads(get_accelerator().current_stream())
        else:
            buffer = PoolBuffer(torch.empty(numel, dtype=dtype, device=device))
            self.by_pointer[buffer.tensor.untyped_storage().data_ptr()] = buffer
        self._last_of[owner] = buffer
        buffer.owner = owner
        return buffer

    def give_back(self, buffer: PoolBuffer, streams: Iterable[Stream] = ()) -> None:
        """Take a buffer back that nothing reads after what has been issued on `streams`."""
        if self.is_poisoned:
            current = get_accelerator().current_stream()
            for stream in streams:
                current.wait_stream(stream)
            poison(buffer.tensor)
            streams = (current,)
        if self._has_streams:
            buffer.read_on(streams)
        buffer.owner = None
        kind = (buffer.tensor.dtype, buffer.tensor.device)
        sizes = self._free.setdefault(kind, {})
        sizes.setdefault(buffer.tensor.numel(), {})[buffer] = None

    def drop(self, buffer: PoolBuffer) -> None:
        self.by_pointer = {at: one for at, one in self.by_pointer.items() if one is not buffer}
        self._last_of = {who: other for who, other in self._last_of.items() if other is not buffer}

    @property
    def num_bytes(self) -> int:
        return sum(buffer.tensor.untyped_storage().nbytes() for buffer in self.by_pointer.values())

    def drop_free(self) -> None:
        """Let go of the buffers that nobody has; the caller has waited for what reads them."""
        self._free = {}
        self.by_pointer = {at: one for at, one in self.by_pointer.items() if one.owner is not None}
        self._last_of = {who: one for who, one in self._last_of.items() if one.owner is not None}

    def clear(self) -> None:
        self._free, self._last_of = {}, {}
        self.by_pointer = {}


class GatherResources:
    """Streams, memory and events that all units of a model (that of `owner`) share.

    Attributes:
        load: The stream that shards are loaded on; the gather stream if they need not be.
        rows: Pool of what all-gathers fill.
        whole: Pool of whole parameters.
        shards_updated: Event after which shards may be read; None: they may be.
        num_updates: How often the optimizer has updated the shards.
        last_gather: Event behind the newest gather of the shards, on the gather stream.
        are_away: The shards are kept off the device (`offload_states`).
    """

    def __init__(
        self, settings: GatherSettings, owner: object = None, gather: SideStream | None = None
    ) -> None:
        self.owner = owner
        self.settings = settings
        self.gather = gather or SideStream(settings.overlap, "gather stream")
        self.load = (
            SideStream(settings.overlap, "parameter load stream")
            if settings.loads and self.gather.has_streams
            else self.gather
        )
        self._last_load: Any = None  # event behind it
        self.last_gather: Any = None
        self.rows = MemoryPool(self.gather.has_streams)
        self.whole = MemoryPool(self.gather.has_streams)
        self.shards_updated: Any = None
        self.num_updates = 0
        self.are_away = False

    def mark_updated(self) -> None:
        """Note that what was issued on the current stream wrote to shards."""
        if self.gather.has_streams:
            self.shards_updated = get_accelerator().Event()
            self.shards_updated.record(get_accelerator().current_stream())

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Issue what fills this rank's row; the gather stream waits for it."""
        stream = self.load.stream
        if stream is not None and self.shards_updated is not None:
            stream.wait_event(self.shards_updated)
        with self.load.issue():
            yield
        if stream is not None and self.load is not self.gather:
            self._last_load = stream.record_event()
            self.gather.stream.wait_event(self._last_load)  # type: ignore[union-attr]  # both have one

    @property
    def is_poisoned(self) -> bool:
        return self.whole.is_poisoned

    def poison_what_goes(self) -> None:
        self.whole.is_poisoned = self.rows.is_poisoned = True

    def before_write(self) -> None:
        """Wait until nothing loads shards from the host any more, which is about to write to them.
        Where they are on the device, what writes to them is on the current stream.
        """
        if self.load is self.gather:
            self.before_update()
        elif self._last_load is not None:
            self._last_load.synchronize()
            self._last_load = None

    def before_update(self) -> None:
        """Let what is issued on the current stream from now on write to shards."""
        if self.last_gather is not None:  # which comes behind its load
            get_accelerator().current_stream().wait_event(self.last_gather)

    def let_go(self) -> None:
        """Let go of all memory behind what has been issued on the current stream: what the gather
        stream gets of it afterwards is written after that.
        """
        for side in {self.gather, self.load}:
            side.wait_for([get_accelerator().current_stream()])
        self.rows.clear()
        self.whole.clear()

    def drop_free(self) -> None:
        """Let go of free memory. The host waits for the device: some stream may still read it."""
        if self.gather.has_streams:
            get_accelerator().synchronize()
        self.rows.drop_free()
        self.whole.drop_free()

    def destroy(self) -> None:
        self.load.destroy()
        self.gather.destroy()
        self.rows.clear()
        self.whole.clear()

"""Memory of gathered parameters, used again and again instead of allocated anew.

A buffer goes back when the last reader of its content was issued, with an event of every stream
that read it; who takes it next lets its own stream wait for them, and the host for nothing.

[Note: memory that goes]
A buffer that is larger than what somebody needs would be missing where all of it is needed, so only
one of just the size is used again. Before more memory is made than the pool `keeps`, what is free
goes back to the allocator, the longest free first: so whatever sizes units have, there is no more
than that, or than is in use at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from deepspeed import comm as dist
from deepspeed.accelerator import Event, Stream, get_accelerator
from deepspeed.comm.failures import raise_disk_error
from deepspeed.ops.state_files import mend
from deepspeed.runtime.sharding.value_samples import ValueSample
from deepspeed.runtime.streams import SideStream
from deepspeed.runtime.zero.gathering.shard_files import ShardReads, is_moved
from deepspeed.runtime.zero.gathering.units import GatherSettings
from deepspeed.utils.logging import logger


class PoolBuffer:
    """A piece of memory, 1-D, the event behind what `filled` it, and owners' views, dear.
    `made_for`: the stream that it was allocated for, if there are streams. `sample`: what was last
    seen of what persists.
    """

    def __init__(self, tensor: torch.Tensor, made_for: Stream | None = None) -> None:
        self.tensor = tensor
        self.made_for = made_for
        self.filled: Event | None = None
        self.owner: Any = None
        self.views: dict[Any, Any] = {}
        self.sample: ValueSample | None = None
        self._last_reads: list[Any] = []

    @property
    def kind(self) -> tuple[int, torch.dtype, torch.device]:
        return self.tensor.numel(), self.tensor.dtype, self.tensor.device

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
    """Buffers by the address of their storage; see [Note: memory that goes].

    Attributes:
        keeps: How many bytes there may be before what is free goes.
        is_poisoned: What is given back is overwritten by NaN, so that whoever still reads it, or
            reads it too early, shows.
    """

    def __init__(self, has_streams: bool) -> None:
        self._has_streams = has_streams
        self._free: dict[PoolBuffer, None] = {}  # the last that was given back at the end
        self._last_of: dict[Any, PoolBuffer] = {}  # who had which
        self.by_pointer: dict[int, PoolBuffer] = {}
        self.keeps = 0
        self.is_poisoned = False

    def take(
        self, numel: int, dtype: torch.dtype, device: torch.device, owner: object
    ) -> PoolBuffer:
        """Find or make a buffer that what is issued now on the current stream may write to."""
        current = get_accelerator().current_stream() if self._has_streams else None
        buffer = self._find((numel, dtype, device), owner)
        if buffer is None:
            self._make_room(numel * dtype.itemsize)
            buffer = PoolBuffer(torch.empty(numel, dtype=dtype, device=device), current)
            self.by_pointer[buffer.tensor.untyped_storage().data_ptr()] = buffer
        else:
            del self._free[buffer]
            if current is not None:
                buffer.wait_for_reads(current)
        self._last_of[owner] = buffer
        buffer.owner = owner
        return buffer

    def _find(self, kind: object, owner: object) -> PoolBuffer | None:
        """Find the one that this owner had, which has its views, or else the one just given back,
        which caches still have.
        """
        own = self._last_of.get(owner)
        if own in self._free and own.kind == kind:
            return own
        return next((buffer for buffer in reversed(self._free) if buffer.kind == kind), None)

    def _make_room(self, num_bytes: int) -> None:
        excess = self.num_bytes + num_bytes - self.keeps if self._free else 0
        for buffer in list(self._free):
            if excess > 0:
                excess -= buffer.tensor.nbytes
                self._let_go(buffer)

    def _let_go(self, buffer: PoolBuffer) -> None:
        """Give memory back to the allocator, behind what reads it."""
        if buffer.made_for is not None:
            buffer.wait_for_reads(buffer.made_for)
        del self._free[buffer]
        self.drop(buffer)

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
        self._free[buffer] = None

    def drop(self, buffer: PoolBuffer) -> None:
        self.by_pointer = {at: one for at, one in self.by_pointer.items() if one is not buffer}
        self._last_of = {who: other for who, other in self._last_of.items() if other is not buffer}

    @property
    def num_bytes(self) -> int:
        return sum(buffer.tensor.nbytes for buffer in self.by_pointer.values())

    def drop_free(self) -> None:
        """Let go of the buffers that nobody has."""
        for buffer in list(self._free):
            self._let_go(buffer)

    def clear(self) -> None:
        self._free, self._last_of = {}, {}
        self.by_pointer = {}


class GatherResources:
    """Streams, memory and events that all units of a model (that of `owner`) share.

    Attributes:
        load: The stream that shards are loaded on; the gather stream if they need not be.
        reads: Brings shards from files; None: they are in memory.
        pool: Memory of what all-gathers fill and of whole parameters.
        shards_updated: Event after which shards may be read; None: they may be.
        num_updates: How often the optimizer has updated the shards.
        last_gather: Event behind the newest gather of the shards, on the gather stream.
        shard_readers: Streams that have read shards as whole parameters since the last update.
        are_away: The shards are kept off the device (`offload_states`).
        disk_error: What reading or writing files of shards has failed of, until all ranks raise it.
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
        self.reads = ShardReads(settings.reads) if settings.reads is not None else None
        self.last_gather: Any = None
        self.shard_readers: set[Stream] = set()
        self.pool = MemoryPool(self.gather.has_streams)
        self.shards_updated: Any = None
        self.num_updates = 0
        self.are_away = False
        self.disk_error: OSError | None = None

    def keep_for(self, units: Iterable[Any]) -> None:
        """Keep as much memory as docs/zero3.md says that gathers of `units` take at most."""
        sizes = [0, *(unit.whole_bytes for unit in units)]
        width = max((unit.shard.element_size() for unit in units), default=0)
        beside = self.settings.beside(max((unit.numel for unit in units), default=0)) * width
        self.pool.keeps = max(sizes) + min(max(sizes) + beside, sum(sizes))

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
        return self.pool.is_poisoned

    def poison_what_goes(self) -> None:
        self.pool.is_poisoned = True

    def before_write(self) -> None:
        """Wait until nothing loads shards from the host any more, which is about to write to them.
        Where they are on the device, what writes to them is on the current stream.
        """
        self.end_reads()
        if self.load is self.gather:
            self.before_update()
        elif self._last_load is not None:
            self._last_load.synchronize()
            self._last_load = None

    def before_update(self) -> None:
        """Let what is issued on the current stream from now on write to shards."""
        self.end_reads()
        if self.last_gather is not None:  # which comes behind its load
            get_accelerator().current_stream().wait_event(self.last_gather)
        for stream in self.shard_readers - {get_accelerator().current_stream()}:
            get_accelerator().current_stream().wait_stream(stream)
        self.shard_readers.clear()

    def fill(self, row: torch.Tensor, shard: torch.Tensor, is_locked: bool) -> None:
        """Copy a shard to this rank's row, from wherever it is."""
        if self.reads is None or not is_moved(shard):
            row.copy_(shard, non_blocking=is_locked)
            return
        try:
            for start, end, part in self.reads.parts(shard):
                row[start:end].copy_(part, non_blocking=self.reads.settings.pinned)
        except OSError as error:
            # The others are on their way to this gather, and to those that follow in this pass.
            self.keep_disk_error(error)
            row.fill_(torch.nan if row.is_floating_point() else 0)

    def keep_disk_error(self, error: OSError) -> None:
        """Go on for now: other ranks would wait for this one."""
        if self.disk_error is None:
            logger.error(f"{error}; all ranks raise this when the step or the evaluation ends")
        self.disk_error = self.disk_error or error

    def raise_disk_error(self, group: dist.Group) -> None:
        """Raise on all ranks of `group`, which all call it, what one of them has kept."""
        if self.reads is not None:
            own, self.disk_error = self.disk_error, None
            if own is not None:
                mend()
            raise_disk_error(own, group)

    def end_reads(self) -> None:
        """Let nothing read files of shards any more, nor have what was read."""
        if self.reads is not None:
            self.reads.drop()

    def let_go(self) -> None:
        """Let go of all memory, behind what uses what nobody has any more."""
        self.pool.drop_free()
        self.pool.clear()

    def destroy(self) -> None:
        self.end_reads()
        self.load.destroy()
        self.gather.destroy()
        self.pool.clear()

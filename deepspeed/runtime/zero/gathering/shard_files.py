"""Shards of parameters in files (`offload_param.device` "nvme"): read ahead part by part into host
memory that a device may copy, and written behind the update. Scripts and checkpoints read and write
the same shards as memory; see `ops.state_files`.

[Note: a shard on its way from its file]
1. shard written -> read: who writes lets reads end first and forgets what they have brought
   (`ShardReads.drop`, called where writers wait for loads); what an update has begun to write is on
   the disk before it ends (`ShardWrites.finish`), and the kernel flushes what scripts wrote to the
   mapping before it reads past the page cache;
2. part read -> copied: who asks for it waits for the file (`parts`);
3. part copied -> memory read into anew: the host waits for the event behind the copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import torch

from deepspeed.accelerator import Event, get_accelerator
from deepspeed.ops.aio.handle import AsyncIOHandle, multiple, wait_for_all
from deepspeed.ops.state_files import BLOCK, file_of, keep_in_memory, place_in_file
from deepspeed.runtime.streams import event_here
from deepspeed.utils import memory_names

# One piece is written while the next is updated.
NUM_WRITES = 2


class ReadSettings(NamedTuple):
    """The keys of `offload_param` that say how shards in files are read.

    Attributes:
        make_handle: Makes what moves bytes.
        buffer_count: Parts in memory at a time.
        buffer_numel: Elements of one part, at most.
        pinned: They are in page-locked memory.
        max_in_memory: Elements of shards that are left to the page cache.
    """

    make_handle: Callable[[], AsyncIOHandle]
    buffer_count: int
    buffer_numel: int
    pinned: bool
    max_in_memory: int


def is_moved(shard: torch.Tensor) -> bool:
    """Whether a shard lies in a file and goes past the page cache."""
    place = place_in_file(shard)
    return place is not None and not place.is_kept


class _Slot:
    """Memory of one part, and what reads it. `copied`: event behind what copies it last."""

    def __init__(self, nbytes: int, pinned: bool, handle: AsyncIOHandle) -> None:
        memory = get_accelerator().host_empty(nbytes + BLOCK, torch.uint8, pinned)
        self.memory = memory[-memory.data_ptr() % BLOCK :]
        self._handle = handle
        self._own = self.memory[:0]
        self.copied: Event | None = None

    def begin(self, part: torch.Tensor) -> None:
        """Read a part's whole blocks, into memory that lies alike."""
        if self.copied is not None:
            self.copied.synchronize()
            self.copied = None
        place = place_in_file(part)
        assert place is not None, "asked before"
        lead = place.start % BLOCK
        size = multiple(lead + part.nbytes, BLOCK)
        self._own = self.memory[lead : lead + part.nbytes].view(part.dtype)
        self._handle.async_pread(self.memory[:size], file_of(part), place.start - lead)

    def wait(self) -> torch.Tensor:
        self._handle.wait()
        return self._own


class ShardReads:
    """Reads shards of parameters, those that are wanted next ahead.

    Attributes:
        num_bytes: Host memory that it has.
    """

    def __init__(self, settings: ReadSettings) -> None:
        self.settings = settings
        self._part_bytes = BLOCK
        self._num_slots = 0
        self._free: deque[_Slot] = deque()
        # By the address of what is read, in the order of need.
        self._under_way: dict[int, _Slot] = {}
        memory_names.register(self)

    @property
    def num_bytes(self) -> int:
        return self._num_slots * (self._part_bytes + 2 * BLOCK)

    def keep_for(self, shards: Iterable[torch.Tensor]) -> None:
        """Fit memory to these shards, and leave the first of them to the page cache."""
        left, most = self.settings.max_in_memory, BLOCK
        for shard in shards:
            left = keep_in_memory(shard, left)
            part = min(shard.numel(), self.settings.buffer_numel) * shard.element_size()
            most = max(most, multiple(part, BLOCK))
        if most != self._part_bytes:
            self.drop()
            self._free.clear()
            self._part_bytes, self._num_slots = most, 0

    def begin(self, shard: torch.Tensor) -> bool:
        """Begin to read what is not yet under way of a shard; False if there is no memory left."""
        for part in self._cut(shard) if is_moved(shard) else ():
            if part.data_ptr() not in self._under_way:
                slot = self._unused()
                if slot is None:
                    return False
                self._under_way[part.data_ptr()] = slot
                slot.begin(part)
        return True

    def parts(self, shard: torch.Tensor) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield all parts of a shard, as first, last+1 element and memory, to be copied by the
        current stream before the next is asked for.

        Raises:
            OSError: the file cannot be read.
        """
        start = 0
        for part in self._cut(shard):
            slot = self._under_way.pop(part.data_ptr(), None)
            if slot is None:
                slot = self._unused() or self._wanted_last()
                slot.begin(part)
            self.begin(shard[start + part.numel() :])
            try:
                yield start, start + part.numel(), slot.wait()
                slot.copied = event_here()
            finally:
                self._free.append(slot)
            start += part.numel()

    def forget(self, shard: torch.Tensor) -> None:
        """Wait until nothing of a shard is read, and forget what was: it is about to change."""
        for part in self._cut(shard):
            slot = self._under_way.pop(part.data_ptr(), None)
            if slot is not None:
                self._free.append(_ended(slot))

    def drop(self) -> None:
        """Wait until nothing is read, and forget what was: shards are about to change."""
        while self._under_way:
            self._free.append(self._wanted_last())

    def named_memory(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name what is read into, for reports."""
        for number, slot in enumerate((*self._under_way.values(), *self._free)):
            yield f"part {number} of shards in files", slot.memory

    def _cut(self, shard: torch.Tensor) -> Iterator[torch.Tensor]:
        numel = self._part_bytes // shard.element_size()
        return iter(shard.split(numel) if shard.numel() else ())

    def _unused(self) -> _Slot | None:
        # Before the host would wait for a copy that has just been issued.
        is_used = not self._free or self._free[0].copied is not None
        if is_used and self._num_slots < max(1, self.settings.buffer_count):
            self._num_slots += 1
            handle = self.settings.make_handle()
            self._free.appendleft(_Slot(self._part_bytes + BLOCK, self.settings.pinned, handle))
        return self._free.popleft() if self._free else None

    def _wanted_last(self) -> _Slot:
        return _ended(self._under_way.popitem()[1])


def _ended(slot: _Slot) -> _Slot:
    """Wait until it reads no more, for nobody."""
    with suppress(OSError):  # it is raised when somebody wants what cannot be read
        slot.wait()
    return slot


class _Written:
    """What `StagingBuffers` wait for: a part that is on the disk, or will never be."""

    def __init__(self, synchronize: Callable[[], object]) -> None:
        self.synchronize = synchronize


class ShardWrites:
    """Writes pieces of shards to their files, behind the host. `failed` hears of what cannot be
    written, and the rest is written all the same.
    """

    def __init__(
        self, make_handle: Callable[[], AsyncIOHandle], failed: Callable[[OSError], None]
    ) -> None:
        self._handles = deque(make_handle() for _ in range(NUM_WRITES))
        self._failed = failed

    def begin(self, piece: torch.Tensor, own: torch.Tensor) -> _Written:
        """Begin to write `piece` where `own` lies; its memory is used until that is waited for."""
        place = place_in_file(own)
        assert place is not None, "asked before"
        self._handles.rotate()
        self._handles[0].async_pwrite(piece, file_of(own), place.start)
        return _Written(partial(self._wait, [self._handles[0]]))

    def finish(self) -> None:
        """Wait until all is on the disk."""
        self._wait(self._handles)

    def _wait(self, handles: Iterable[AsyncIOHandle]) -> None:
        try:
            wait_for_all(handles)
        except OSError as error:
            self._failed(error)

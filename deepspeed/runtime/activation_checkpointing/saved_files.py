"""Saved inputs in files (`activation_checkpointing.nvme_path`): what is copied to the host goes on
to a file and is read again ahead of its use. All that the host has of them is a few buffers.

[Note: an input on its way to its file and back]
1. copied to a buffer -> written: the host waits for the copy's event, when the next but one comes,
   as the stream that made the input does;
2. written -> buffer filled anew: `StagingBuffers` wait for the write. Inputs that still have their
   buffer when backward begins are copied back from there;
3. written -> read, or the file's room taken by another input: who asks waits for the write;
4. read -> copied back -> read into anew: see `runtime.zero.gathering.shard_files`. Reads of what is
   no longer wanted are waited for and forgotten when their room is taken.
"""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch

from deepspeed.accelerator import Event, get_accelerator
from deepspeed.ops.aio.handle import AsyncIOHandle, multiple
from deepspeed.ops.state_files import BLOCK, StateFiles, file_of, place_in_file
from deepspeed.runtime.streams import MAX_KEPT, StagingBuffers, event_here
from deepspeed.runtime.zero.gathering.shard_files import NUM_WRITES, ReadSettings, ShardReads

# One is copied back, one is read, and one was copied before.
NUM_READ = 3


class Block:
    """Memory that is taken of a list and given back when this is dropped, with its last use."""

    def __init__(self, memory: torch.Tensor, free: list[tuple[torch.Tensor, Any]]) -> None:
        self.memory = memory
        self._free = free
        self.last_use: Any = None

    def used(self) -> None:
        self.last_use = get_accelerator().Event()
        self.last_use.record()

    def __del__(self) -> None:
        self._free.append((self.memory, self.last_use))


@dataclass
class _Filled:
    """A buffer that has an input, `block`'s as long as there is one; `copied`: its last copy."""

    block: ref[Block]
    memory: torch.Tensor
    copied: Event | None


class _Write:
    """A write that is waited for as an event is. What it failed of is for who wants to read."""

    def __init__(self, handle: AsyncIOHandle, piece: torch.Tensor, own: torch.Tensor) -> None:
        place = place_in_file(own)
        assert place is not None, "taken from a file"
        handle.async_pwrite(piece, file_of(own), place.start)
        self._handle: AsyncIOHandle | None = handle
        self._failure: tuple[Any, ...] | None = None

    def synchronize(self) -> None:
        handle, self._handle = self._handle, None
        if handle is None:
            return  # what the handle has by now is another's
        try:
            handle.wait()
        except OSError as error:
            # Not the error: its traceback has the graph, whose end would then have itself.
            self._failure = error.errno, error.strerror, error.filename

    def check(self) -> None:
        """Wait, and raise what it failed of."""
        self.synchronize()
        if self._failure is not None:
            raise OSError(*self._failure)


class InputFiles:
    """Keeps inputs in files of a folder."""

    def __init__(self, files: StateFiles) -> None:
        self._files = files
        self._free: dict[int, list[tuple[torch.Tensor, Any]]] = defaultdict(list)
        self._buffers = StagingBuffers(NUM_WRITES)
        self._largest = 0
        self._handles = deque(files.make_handle() for _ in range(NUM_WRITES))
        reads = ReadSettings(files.make_handle, NUM_READ, sys.maxsize, True, 0)
        self._reads = ShardReads(reads)
        # By the address of their place in a file, oldest first.
        self._filled: dict[int, _Filled] = {}
        self._under_way: deque[_Write] = deque()

    def save(self, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Block]:
        """Begin to save a flat tensor by the current stream. Returns host memory that is being
        filled, and where it will be in a file: to be given to `begin` and `parts`, the memory that
        the place lies in.

        Raises:
            OSError: the disk has no room for it.
        """
        block = self._place(multiple(source.nbytes, BLOCK))
        while len(self._filled) >= MAX_KEPT:
            self._write(next(iter(self._filled)))
        memory = self._buffers.take(self._largest, torch.uint8)
        content = memory[: source.nbytes].view(source.dtype)
        content.copy_(source, non_blocking=True)
        self._filled[block.memory.data_ptr()] = _Filled(ref(block), memory, event_here())
        return content, block.memory[: source.nbytes].view(source.dtype), block

    def _place(self, size: int) -> Block:
        """Take room in a file that nothing uses any more."""
        free = self._free[size]
        if not free:
            free.append((self._files.zeros(size, torch.uint8, shares=True), None))
        memory, written = free.pop()
        block = Block(memory, free)
        if size > self._largest:
            self._largest = size
            self._reads.keep_for([memory])
        if written is not None:
            written.synchronize()
        self._reads.forget(memory)
        filled = self._filled.pop(memory.data_ptr(), None)
        if filled is not None:
            self._buffers.give_back(filled.memory, filled.copied)
        return block

    def _write(self, address: int) -> None:
        while len(self._under_way) >= NUM_WRITES:  # each has a handle
            self._under_way.popleft().synchronize()
        filled = self._filled[address]
        done: Any = filled.copied
        block = filled.block()
        if block is not None:
            if filled.copied is not None:
                filled.copied.synchronize()
            memory = filled.memory[: block.memory.numel()]
            self._handles.rotate()
            block.last_use = done = _Write(self._handles[0], memory, block.memory)
            self._under_way.append(done)
        del self._filled[address]
        self._buffers.give_back(filled.memory, done)

    def finish(self) -> None:
        """Write all that is not written, and wait for it, and for what is read."""
        for address in list(self._filled):
            self._write(address)
        while self._under_way:
            self._under_way.popleft().synchronize()
        self._reads.drop()

    def begin(self, block: Block, place: torch.Tensor) -> None:
        """Begin to read an input, if there is a buffer."""
        if place.data_ptr() not in self._filled:
            self._wait_until_written(block)
            self._reads.begin(place)

    def parts(self, block: Block, place: torch.Tensor) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield an input as first, last+1 element and host memory, to be copied by the current
        stream before the next is asked for.

        Raises:
            OSError: it could not be written, or cannot be read.
        """
        filled = self._filled.get(place.data_ptr())
        if filled is None:
            self._wait_until_written(block)
            yield from self._reads.parts(place)
            return
        yield 0, place.numel(), filled.memory[: place.nbytes].view(place.dtype)
        filled.copied = event_here()

    def _wait_until_written(self, block: Block) -> None:
        if block.last_use is not None:
            block.last_use.check()

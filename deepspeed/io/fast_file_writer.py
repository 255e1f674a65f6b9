"""A file written past the page cache, while the next bytes come: upstream's `FastFileWriter`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch

from deepspeed.io.base_file_writer import CLOSE_COUNT_KEY, BaseFileWriter
from deepspeed.ops.aio.handle import AsyncIOHandle

_BLOCK = 4096  # what is written from a buffer, all but the file's last piece, ends with one


@dataclass
class FastFileWriterConfig:
    """What the writer works with.

    Attributes:
        dnvme_handle: Writes; its block size, queue depth and threads are the file's.
        pinned_tensor: The buffer, contiguous, of any dtype; best from `new_cpu_locked_tensor`.
        double_buffer: Fill one half while the other is written.
        num_parallel_writers, writer_rank: How many writers, each with a file of its own, share what
            `save_torch_storage_object_list` writes, and which of them this is.
        global_rank: Whom messages are from; nothing depends on it.
    """

    dnvme_handle: AsyncIOHandle
    pinned_tensor: torch.Tensor
    double_buffer: bool = True
    num_parallel_writers: int = 1
    writer_rank: int = 0
    global_rank: int = 0


class FastFileWriter(BaseFileWriter):
    """Gathers bytes in buffers and writes each by the handle, an existing file anew.

    Raises:
        ValueError: the buffer has less than a block of 4,096 bytes, or there is no such writer.
    """

    def __init__(self, file_path: str, config: FastFileWriterConfig) -> None:
        super().__init__(file_path)
        self._num, self._rank = config.num_parallel_writers, config.writer_rank
        if not 0 <= self._rank < self._num:
            numbers = f"writer_rank={self._rank} of num_parallel_writers={self._num}"
            raise ValueError(f"{numbers}: ranks are 0 to num_parallel_writers - 1")
        memory = config.pinned_tensor.view(-1).view(torch.uint8)
        size = memory.numel() // (1 + config.double_buffer) // _BLOCK * _BLOCK
        if not size:
            room = _BLOCK * (1 + config.double_buffer)
            raise ValueError(f"pinned_tensor has {memory.numel()} bytes; at least {room} are used")
        self._handle = config.dnvme_handle
        self._buffers = list(memory[: size * (1 + config.double_buffer)].split(size))
        self._filled = self._written = 0
        self._is_open = True
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        os.close(os.open(file_path, flags, 0o666))

    def save_torch_storage_object_list(
        self, storage_obj_list: Sequence[tuple[torch.UntypedStorage, torch.dtype]], save_size: bool
    ) -> int:
        """Write this writer's share of the bytes of storages: the shares of all writers, in the
        order of ranks, are what one writer would write. Each storage comes with its dtype; with
        `save_size` 8 bytes before it say how many elements it has. Returns the bytes of the share.
        """
        pieces = []
        for storage, dtype in storage_obj_list:
            if save_size:
                pieces.append(torch.tensor([storage.nbytes() // dtype.itemsize]).view(torch.uint8))
            pieces.append(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
        size, more = divmod(sum(map(len, pieces)), self._num)
        begin = self._rank * size + min(self._rank, more)
        end = begin + size + (self._rank < more)
        at = 0
        for piece in pieces:
            self.write(piece[max(0, begin - at) : max(0, end - at)].cpu().numpy().data)
            at += len(piece)
        return end - begin

    def close(self) -> None:
        """Write what is left and return once all is on disk."""
        if not self._is_open:
            return
        self._is_open = False
        self._stats[CLOSE_COUNT_KEY] += 1
        self._drain()
        self._handle.wait()
        file = os.open(self._file_path, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)

    def _take(self, source: memoryview) -> None:
        if not self._is_open:
            raise ValueError(f"{self._file_path}: the writer is closed")
        taken = 0
        while taken < len(source):
            buffer = self._buffers[0]
            count = min(buffer.numel() - self._filled, len(source) - taken)
            piece = numpy.frombuffer(source[taken : taken + count], numpy.uint8)
            buffer.numpy()[self._filled : self._filled + count] = piece
            taken += count
            self._filled += count
            if self._filled == buffer.numel():
                self._drain()

    def _drain(self) -> None:
        full = self._buffers.pop(0)
        self._buffers.append(full)
        # Also what was written last: the buffer to be filled next.
        self._handle.wait()
        if self._filled:
            self._handle.async_pwrite(full[: self._filled], self._file_path, self._written)
        self._written += self._filled
        self._filled = 0
        if len(self._buffers) == 1:
            self._handle.wait()

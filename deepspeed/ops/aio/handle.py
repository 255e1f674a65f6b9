"""Upstream's handle of asynchronous file I/O: tensors to files and back, whole or with an error
that names the file.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

import torch

from deepspeed.accelerator import file_trace
from deepspeed.ops.aio.engines import DONE, Alignment, Engine, How, Outcome, Transfer, choose_engine
from deepspeed.ops.aio.locked import (
    free_cpu_locked_tensor,
    is_locked,
    new_cpu_locked_tensor,
)
from deepspeed.utils.exceptions import disk_error

_MAX_DEPTH = 4096
_MAX_BLOCK = 1 << 30


class _OpenFile:
    """The two descriptors of a file, until all parts of a transfer are done."""

    def __init__(self, file: str | int, is_write: bool, engine: Engine) -> None:
        # Opened anew where a descriptor is given: past the page cache, and not closed for others.
        path = f"/proc/self/fd/{file}" if isinstance(file, int) else file
        flags = (os.O_RDWR | os.O_CREAT if is_write else os.O_RDONLY) | os.O_CLOEXEC
        self.path = os.readlink(path) if isinstance(file, int) else path
        self.plain = self.direct = os.open(path, flags, 0o666)
        self.alignment = Alignment(1, 1)
        alignment = engine.alignment(self.plain)
        if alignment is not None and hasattr(os, "O_DIRECT"):
            try:
                self.direct = os.open(path, flags | os.O_DIRECT)
                self.alignment = alignment
            except OSError as error:
                if error.errno != errno.EINVAL:  # this file system cannot
                    self.close()
                    raise

    def close(self) -> None:
        for file in {self.plain, self.direct}:
            os.close(file)

    def cut(self, begin: int, end: int, parts: int, block_size: int) -> list[tuple[int, int, bool]]:
        """First and last+1 byte in the file of parts, each in whole pages, but for a head and a
        tail, which are for the page cache: what it has of a page that is written past it, too,
        would go to the disk over that.
        """
        block = self.alignment.file
        if self.direct != self.plain:  # a disk's blocks may be smaller
            block = multiple(block, mmap.PAGESIZE)
        first, last = -(-begin // block) * block, end // block * block
        if first >= last:
            return [(begin, end, True)] if begin < end else []
        blocks = -(-(last - first) // block_size)
        step = -(-blocks // parts) * block_size // block * block or block
        middle = [(at, min(at + step, last), False) for at in range(first, last, step)]
        edges = [(begin, first, True), (last, end, True)]
        return [*middle, *(edge for edge in edges if edge[0] < edge[1])]


class _Operation(NamedTuple):
    """A read or write on its way, with what must live until it is done."""

    file: _OpenFile
    is_write: bool
    offset: int
    memory: torch.Tensor
    parts: list[Future[Outcome]]
    finish: Callable[[], object]
    waited: Callable[[], None] | None  # tells who listens

    def wait(self) -> None:
        """Wait for all parts; raise what the first byte failed of."""
        try:
            outcomes = [part.result() for part in self.parts]
        finally:
            self.file.close()
            if self.waited is not None:
                self.waited()
        failed = min((outcome for outcome in outcomes if outcome != DONE), default=DONE)
        if failed != DONE:
            raise self._error(failed)
        self.finish()

    def _error(self, failed: Outcome) -> OSError:
        at, size = self.offset + failed.failed_at, self.memory.nbytes
        if self.is_write:
            return disk_error(
                OSError(failed.errno, os.strerror(failed.errno)), self.file.path, size
            )
        why = os.strerror(failed.errno) if failed.errno else f"the file ends at byte {at:,}"
        reason = f"{why}: {size:,} bytes are to be read from byte {self.offset:,}"
        return OSError(failed.errno or errno.ENODATA, reason, self.file.path)


class AsyncIOHandle:
    """Reads and writes contiguous tensors: at once (`sync_*`, `read`, `write`) or until `wait`.
    A file is a path or, of one that is open, its descriptor.

    Several threads may use one handle; `wait` then is for the reads and writes of all of them.

    Args:
        block_size: Bytes of one request to the disk.
        queue_depth: Requests in flight, of each thread.
        single_submit: Hand requests to the kernel one by one.
        overlap_events: Begin the next request when any is complete, not when all are.
        intra_op_parallelism: Threads that share each transfer.
        engine: "io_uring", "threads" or "python"; None takes the first that this machine has.
    """

    def __init__(
        self,
        block_size: int = 1 << 20,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
        *,
        engine: str | None = None,
    ) -> None:
        counts = {"block_size": block_size, "queue_depth": queue_depth}
        for name, count in {**counts, "intra_op_parallelism": intra_op_parallelism}.items():
            if count < 1:
                raise ValueError(f"aio_handle: {name}={count}; it is 1 or more")
        self._how = How(block_size, queue_depth, single_submit, overlap_events)
        self._parallelism = intra_op_parallelism
        self._engine = choose_engine(engine)
        self._lock = threading.Lock()
        self._pending: list[_Operation] = []
        self._threads: ThreadPoolExecutor | None = None
        self._process = os.getpid()

    def get_block_size(self) -> int:
        """Return the bytes of one request."""
        return self._how.block_size

    def get_queue_depth(self) -> int:
        """Return how many requests are in flight."""
        return self._how.queue_depth

    def get_single_submit(self) -> bool:
        """Say whether requests are handed over one by one."""
        return self._how.single_submit

    def get_overlap_events(self) -> bool:
        """Say whether requests begin while others are not complete."""
        return self._how.overlap_events

    def get_intra_op_parallelism(self) -> int:
        """Return how many threads share a transfer."""
        return self._parallelism

    def get_alignment(self) -> int:
        """Return what sizes upstream's handle takes multiples of; this one takes any."""
        return 512 * self._parallelism

    def get_engine(self) -> str:
        """Return what moves the bytes."""
        return self._engine.name

    def read(
        self, buffer: torch.Tensor, filename: str | int, validate: bool, file_offset: int = 0
    ) -> int:
        """Fill the tensor from a file. Returns 0, as upstream."""
        return 0 * self.pread(buffer, filename, validate, False, file_offset)

    def write(
        self, buffer: torch.Tensor, filename: str | int, validate: bool, file_offset: int = 0
    ) -> int:
        """Write the tensor. Returns 0, as upstream."""
        return 0 * self.pwrite(buffer, filename, validate, False, file_offset)

    def sync_pread(self, buffer: torch.Tensor, filename: str | int, file_offset: int = 0) -> int:
        """Fill the tensor from a file. Returns 1."""
        return self.pread(buffer, filename, False, False, file_offset)

    def sync_pwrite(self, buffer: torch.Tensor, filename: str | int, file_offset: int = 0) -> int:
        """Write the tensor. Returns 1."""
        return self.pwrite(buffer, filename, False, False, file_offset)

    def async_pread(self, buffer: torch.Tensor, filename: str | int, file_offset: int = 0) -> int:
        """Begin to fill the tensor, which is not to be touched until `wait`."""
        return self.pread(buffer, filename, False, True, file_offset)

    def async_pwrite(self, buffer: torch.Tensor, filename: str | int, file_offset: int = 0) -> int:
        """Begin to write the tensor, which is not to be changed until `wait`."""
        return self.pwrite(buffer, filename, False, True, file_offset)

    def pread(
        self,
        buffer: torch.Tensor,
        filename: str | int,
        validate: bool,
        async_op: bool,
        file_offset: int = 0,
    ) -> int:
        """Read as the others do; `validate` reads once more through the page cache and compares.

        Raises:
            OSError: the file is not there, ends too early or cannot be read; it has the name.
        """
        return self._begin(buffer, filename, False, validate, async_op, file_offset)

    def pwrite(
        self,
        buffer: torch.Tensor,
        filename: str | int,
        validate: bool,
        async_op: bool,
        file_offset: int = 0,
    ) -> int:
        """Write as the others do; a file that is longer keeps the rest.

        Raises:
            OSError: the disk is full or the file cannot be written; it has the name.
        """
        return self._begin(buffer, filename, True, validate, async_op, file_offset)

    def wait(self) -> int:
        """Wait for all that was begun. Returns how many reads and writes those were.

        Raises:
            OSError: of the first that failed; all have ended.
        """
        with self._lock:
            pending, self._pending = self._pending, []
        wait_for_all(pending)
        return len(pending)

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """Return host memory that files are read into without a copy, of the tensor's dtype."""
        return new_cpu_locked_tensor(num_elem, example_tensor)

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Let such memory go; False: it is none."""
        return free_cpu_locked_tensor(tensor)

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        """Say whether it is such memory, or page-locked by torch."""
        return is_locked(buffer)

    def _begin(
        self,
        buffer: torch.Tensor,
        filename: str | int,
        is_write: bool,
        validate: bool,
        async_op: bool,
        offset: int,
    ) -> int:
        if not buffer.is_contiguous():
            strides = tuple(buffer.stride())
            raise ValueError(f"aio_handle: the tensor has strides {strides}; call .contiguous()")
        if offset < 0:
            raise ValueError(f"aio_handle: file_offset={offset}; it is 0 or more")
        operation = self._submit(buffer, filename, is_write, validate, offset)
        if async_op:
            with self._lock:
                self._pending.append(operation)
            return 0
        operation.wait()
        return 1

    def _submit(
        self, buffer: torch.Tensor, filename: str | int, is_write: bool, validate: bool, offset: int
    ) -> _Operation:
        memory = buffer.detach()
        if memory.device.type != "cpu":
            memory = memory.cpu() if is_write else torch.empty_like(memory, device="cpu")
        file = _OpenFile(filename, is_write, self._engine)
        cut = file.cut(offset, offset + memory.nbytes, self._parallelism, self._how.block_size)

        def finish() -> None:
            if validate:
                _compare(memory, file.path, offset)
            if memory.device != buffer.device and not is_write:
                buffer.copy_(memory)

        def move(begin: int, end: int, plain: bool) -> Outcome:
            transfer = Transfer(
                *(file.direct, file.plain, is_write, memory.data_ptr() + begin - offset),
                *(end - begin, begin, file.alignment),
            )
            blocks = self._how._replace(
                block_size=min(_MAX_BLOCK, multiple(self._how.block_size, file.alignment.file)),
                queue_depth=min(_MAX_DEPTH, self._how.queue_depth),
            )
            if plain:
                moved = transfer.move(0, end - begin, plain=True)
            else:
                moved = self._engine.run(transfer, blocks)
            return (
                moved if moved == DONE else Outcome(begin - offset + moved.failed_at, moved.errno)
            )

        waited = None
        if file_trace.active is not None:
            trace = file_trace.active
            waited = trace.begun(memory, filename, file.plain, offset, is_write).host_waited
        parts = [self._pool().submit(move, *part) for part in cut]
        return _Operation(file, is_write, offset, memory, parts, finish, waited)

    def _pool(self) -> ThreadPoolExecutor:
        with self._lock:
            # After a fork the threads are the parent's, and what they had to do is its too.
            if self._threads is None or self._process != os.getpid():
                self._threads = ThreadPoolExecutor(self._parallelism, "aio")
                self._process, self._pending = os.getpid(), []
            return self._threads


aio_handle = AsyncIOHandle


def aio_read(
    buffer: torch.Tensor,
    filename: str,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """Fill the tensor from a file by a handle of its own."""
    handle = AsyncIOHandle(block_size, queue_depth, single_submit, overlap_events)
    return handle.read(buffer, filename, validate)


def aio_write(
    buffer: torch.Tensor,
    filename: str,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """Write the tensor to a file by a handle of its own."""
    handle = AsyncIOHandle(block_size, queue_depth, single_submit, overlap_events)
    return handle.write(buffer, filename, validate)


def deepspeed_memcpy(dst: torch.Tensor, src: torch.Tensor) -> int:
    """Copy all bytes of one host tensor to another of the same size."""
    dst.view(-1).view(torch.uint8).copy_(src.reshape(-1).view(torch.uint8))
    return 0


def multiple(size: int, of: int) -> int:
    """The least multiple of `of` that is not below `size`."""
    return -(-size // of) * of


class _Waitable(Protocol):
    def wait(self) -> object: ...


def wait_for_all(several: Iterable[_Waitable]) -> None:
    """Wait for all of them, and raise the first OSError only then."""
    errors = []
    for one in several:
        try:
            one.wait()
        except OSError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _compare(memory: torch.Tensor, path: str, offset: int) -> None:
    expected = memory.view(-1).view(torch.uint8).numpy()
    with open(path, "rb") as file:
        file.seek(offset)
        found = file.read(expected.nbytes)
    if found != expected.tobytes():
        raise OSError(errno.EIO, f"what was moved at byte {offset:,} is not what is there", path)

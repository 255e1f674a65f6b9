"""One file being written: buffered, summed and flushed to disk, by threads of its own if asked.

One thread writes while another sums. Large pieces are taken from where they are; small ones go
through two buffers. Beside a training run what counts is processor time: there one thread gathers
everything in one aligned buffer and writes it past the page cache (O_DIRECT), which costs a quarter
less; with threads that is slower.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

import xxhash

if TYPE_CHECKING:
    from typing_extensions import Buffer
import contextlib
import errno
import fcntl
import mmap
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from deepspeed.utils.exceptions import disk_error

ALGORITHM = "xxh3_128"
_CHUNK_BYTES = 1 << 20


class FileRecord(NamedTuple):
    """What is known of a file's bytes."""

    bytes: int
    checksum: str


def write_bytes(path: str, data: bytes, flush: bool = True) -> None:
    """Write a small file, by default to disk; one that does not fit is an OSError with the path and
    the bytes.
    """
    try:
        with open(path, "wb") as file:
            file.write(data)
            if flush:
                file.flush()
                os.fsync(file.fileno())
    except OSError as error:
        if error.filename is not None:  # it was not opened
            raise
        raise disk_error(error, path, len(data)) from error


class Checksum:
    """The checksum of bytes that come in pieces; how they are cut makes no difference."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()

    def update(self, data: Buffer) -> None:
        self._hash.update(data)

    def value(self) -> str:
        """`xxh3_128:` and 32 hexadecimal digits, of all bytes so far."""
        return f"{ALGORITHM}:{self._hash.hexdigest()}"


def file_checksum(path: str) -> str:
    """The checksum of a file."""
    checksum, chunk = Checksum(), memoryview(bytearray(_CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(chunk):
            checksum.update(chunk[:count])
    return checksum.value()


def file_record(path: str) -> FileRecord:
    """The record of a file as it is on disk."""
    return FileRecord(os.path.getsize(path), file_checksum(path))


# With 64 MiB, two thirds of the processor time more: fresh memory, and no longer in the cache.
DEFAULT_BUFFER_BYTES = 16 << 20
_PAGE = mmap.PAGESIZE
# Of a piece that is not copied. Less, and what threads tell each other costs more than the copy.
_LARGE_BYTES = 1 << 20
_AHEAD_BYTES = 32 << 20  # that the disk is told to begin with


class WriteOptions(NamedTuple):
    """How a file is written; what can be read from it is the same.

    Attributes:
        buffer_bytes: Size of a buffer.
        num_buffers: 2: one is filled while the other is written and summed by threads. 1: the
            caller's thread does all, as it must where no more threads can be started (the
            interpreter exits). Large pieces need no buffer.
        direct: Past the page cache, where possible: least processor time. One buffer takes all.
        crc32: Put torch's sum into the file, which `unzip` needs and `torch.load` does not.
        zip_format: torch's format of today; False is that before torch 1.6.
    """

    buffer_bytes: int = DEFAULT_BUFFER_BYTES
    num_buffers: int = 2
    direct: bool = False
    crc32: bool = True
    zip_format: bool = True


DEFAULT_OPTIONS = WriteOptions()


class FileWriter:
    """A file-like object to write one new file with.

    `write` never raises: torch's zip writer would replace an error of the disk by one of its own.
    `finish` raises the first error.

    Args:
        path: The file; an existing one is overwritten.
        options: How.
    """

    def __init__(self, path: str, options: WriteOptions) -> None:
        self._path = path
        self._file, self._is_direct = _open(path, options.direct)
        size = -(-max(_PAGE, options.buffer_bytes) // _PAGE) * _PAGE
        self._buffers = [_take_buffer(size) for _ in range(options.num_buffers)]
        self._is_gathering = options.direct
        self._pending: list[list[Future[None]]] = [[] for _ in self._buffers]
        self._threads: list[ThreadPoolExecutor] = []
        self._current = self._filled = self._bytes = self._written = 0
        self._checksum = Checksum()
        self._error: Exception | None = None

    def write(self, data: Buffer) -> int:
        """Take the next bytes; they may change when it has returned."""
        source = memoryview(data).cast("B")
        if self._is_gathering or len(source) < _LARGE_BYTES:
            self._gather(source)
        elif self._error is None:
            self._hand_over()
            self._finish_all(self._start(source))
        self._bytes += len(source)
        return len(source)

    def flush(self) -> None:
        """Do nothing: torch calls it; `finish` flushes to disk."""

    def finish(self) -> FileRecord:
        """Write the rest and return once all is on disk; the first error of any write is raised."""
        for index in range(len(self._buffers)):
            self._wait(index)
        tail = self._buffers[self._current][: self._filled]
        if self._error is None:
            self._checksum.update(tail)
            self._attempt(lambda: self._write_out(tail))
        if isinstance(self._error, OSError):
            raise disk_error(self._error, self._path, self._bytes) from self._error
        if self._error is not None:
            raise self._error
        os.fsync(self._file)
        return FileRecord(self._bytes, self._checksum.value())

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, *error: object) -> None:
        """End the threads and close the file; unless `finish` has returned, it is not complete."""
        for thread in self._threads:
            thread.shutdown()
        os.close(self._file)
        if self._is_gathering:
            _keep_buffer(self._buffers.pop())

    def _gather(self, source: memoryview) -> None:
        taken = 0
        while taken < len(source) and self._error is None:
            buffer = self._buffers[self._current]
            if self._filled == 0:
                self._wait(self._current)
            count = min(len(buffer) - self._filled, len(source) - taken)
            _copy(buffer[self._filled : self._filled + count], source[taken : taken + count])
            taken += count
            self._filled += count
            if self._filled == len(buffer):
                self._hand_over()

    def _hand_over(self) -> None:
        if self._filled:
            self._pending[self._current] = self._start(self._buffers[self._current][: self._filled])
            self._current = (self._current + 1) % len(self._buffers)
            self._filled = 0

    def _start(self, data: memoryview) -> list[Future[None]]:
        actions = (lambda: self._checksum.update(data)), (lambda: self._write_out(data))
        if len(self._buffers) == 1:
            for action in actions:
                self._attempt(action)
            return []
        # A thread each, no pool: the checksum of a piece must not overtake the one before.
        self._threads = self._threads or [ThreadPoolExecutor(1, "checkpoint-file") for _ in actions]
        return [thread.submit(act) for thread, act in zip(self._threads, actions, strict=True)]

    def _wait(self, index: int) -> None:
        pending, self._pending[index] = self._pending[index], []
        self._finish_all(pending)

    def _finish_all(self, futures: list[Future[None]]) -> None:
        for future in futures:
            self._attempt(future.result)

    def _attempt(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception as error:  # the disk's; the first is the reason
            self._error = self._error or error

    def _write_out(self, data: memoryview) -> None:
        while len(data):
            if self._is_direct and len(data) < _PAGE:
                self._end_direct()  # the tail: whole pages only
            size = len(data) // _PAGE * _PAGE if self._is_direct else len(data)
            try:
                count = os.write(self._file, data[: min(size, _AHEAD_BYTES)])
            except OSError as error:
                if not (self._is_direct and error.errno == errno.EINVAL):
                    raise
                # The disk's blocks are larger than a page, or it is full and took a part of one.
                self._end_direct()
                continue
            self._begin_flush(count)
            data = data[count:]

    def _end_direct(self) -> None:
        fcntl.fcntl(
            self._file, fcntl.F_SETFL, fcntl.fcntl(self._file, fcntl.F_GETFL) & ~os.O_DIRECT
        )
        self._is_direct = False

    def _begin_flush(self, count: int) -> None:
        """Let the disk work on the bytes just written meanwhile: `finish` waits for it."""
        if count == _AHEAD_BYTES and hasattr(os, "posix_fadvise"):
            # Says that they are not needed again. Linux then begins to write them, and does not
            # forget them before they are.
            with contextlib.suppress(OSError):  # advice: where it is not taken, nothing is lost
                os.posix_fadvise(self._file, self._written, count, os.POSIX_FADV_DONTNEED)
        self._written += count


def _open(path: str, direct: bool) -> tuple[int, bool]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    if direct and hasattr(os, "O_DIRECT"):
        try:
            return os.open(path, flags | os.O_DIRECT, 0o666), True
        except OSError as error:
            if error.errno != errno.EINVAL:  # this file system cannot
                raise
    return os.open(path, flags, 0o666), False


# At most one: fresh memory costs more than filling it, and the copy of the state is kept too.
_kept: list[memoryview] = []
_kept_lock = threading.Lock()


def _take_buffer(size: int) -> memoryview:
    with _kept_lock:
        if _kept and len(_kept[0]) == size:
            return _kept.pop()
    # Private: in a process that is forked later it is another memory.
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def _keep_buffer(buffer: memoryview) -> None:
    with _kept_lock:
        _kept[:] = [buffer]


def _copy(target: memoryview, source: memoryview) -> None:
    if len(source) < _PAGE:
        target[:] = source
        return
    import numpy  # startup: only needed here

    # Unlike memoryviews, arrays let other threads run while they are copied.
    numpy.copyto(numpy.frombuffer(target, numpy.uint8), numpy.frombuffer(source, numpy.uint8))

"""What moves aligned bytes between files and memory: the native op, by io_uring or by threads, or
Python. All take the same request and give the same answer.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

from deepspeed.ops.native import native_op

ENGINES = ("io_uring", "threads", "python")
_PAGE = 4096  # fits every disk of today, where nobody says what would do
_MAX_THREADS = 256


class Alignment(NamedTuple):
    """What a file's memory and offsets must be multiples of, past the page cache."""

    memory: int
    file: int


class How(NamedTuple):
    """How a transfer is cut: the `aio` block's keys."""

    block_size: int = 1 << 20
    queue_depth: int = 128
    single_submit: bool = False
    overlap_events: bool = False


class Transfer(NamedTuple):
    """Bytes of one file to or from one place in memory.

    Attributes:
        direct: Descriptor past the page cache, or `plain` again.
        plain: Descriptor through it.
    """

    direct: int
    plain: int
    is_write: bool
    address: int
    num_bytes: int
    offset: int
    alignment: Alignment

    def move(self, begin: int, end: int, *, plain: bool = False) -> Outcome:
        """Move a part by positioned calls, the rest of a short one too."""
        file = self.plain if plain else self.direct
        memory = memoryview((ctypes.c_char * (end - begin)).from_address(self.address + begin))
        memory, done = memory.cast("B"), 0
        while done < len(memory):
            try:
                call = os.pwritev if self.is_write else os.preadv
                count = call(file, [memory[done:]], self.offset + begin + done)
                code = 0 if count or not self.is_write else errno.EIO
            except OSError as error:
                count, code = 0, error.errno or errno.EIO
            done += count
            if count or code in (errno.EINTR, errno.EAGAIN):
                continue
            if file == self.plain or code not in (0, errno.EINVAL, errno.EOPNOTSUPP):
                return Outcome(begin + done, code)
            file = self.plain  # between blocks of the disk only the page cache can say more
        return DONE


class Outcome(NamedTuple):
    """The first byte that could not be moved, and the errno; 0 says that the file ends there."""

    failed_at: int
    errno: int


DONE = Outcome(-1, 0)


class Engine(Protocol):
    """Moves bytes while other threads of Python run."""

    name: str

    def alignment(self, file: int) -> Alignment | None:
        """Return what O_DIRECT wants of an open file; None where it cannot be had."""

    def run(self, transfer: Transfer, how: How) -> Outcome:
        """Move all of a transfer, aligned in the file, or tell where it ended."""


class NativeEngine:
    """`csrc/aio`: with io_uring or, where a kernel or a container forbids it, with threads."""

    def __init__(self, name: str, op: object) -> None:
        self.name = name
        self._op = op

    def alignment(self, file: int) -> Alignment | None:
        """Ask the kernel (6.1 and later; before, a page)."""
        told = self._op.alignment(file)  # type: ignore[attr-defined]  # an extension module
        if told is None:
            return Alignment(_PAGE, _PAGE)
        return Alignment(*told) if all(told) else None

    def run(self, transfer: Transfer, how: How) -> Outcome:
        """Call the op, which lets Python's lock go."""
        direct, plain, is_write, address, num_bytes, offset, alignment = transfer
        bounce = direct != plain and address % alignment.memory != 0
        files = self.name == "io_uring", direct, plain, is_write
        memory = address, num_bytes, offset, how.block_size, how.queue_depth, alignment.file
        cut = bounce, how.single_submit, how.overlap_events
        return Outcome(*self._op.transfer(*files, *memory, *cut))  # type: ignore[attr-defined]


class PythonEngine:
    """Positioned calls in threads, where the op cannot be compiled."""

    name = "python"

    def alignment(self, file: int) -> Alignment | None:
        """Return a page."""
        return Alignment(_PAGE, _PAGE)

    def run(self, transfer: Transfer, how: How) -> Outcome:
        """Move blocks, as many at once as the queue is deep."""
        plain = transfer.address % transfer.alignment.memory != 0
        starts = range(0, transfer.num_bytes, how.block_size)
        depth = min(how.queue_depth, len(starts), _MAX_THREADS)
        with ThreadPoolExecutor(max(1, depth), "aio-block") as threads:
            outcomes: Iterator[Outcome] = threads.map(
                lambda start: transfer.move(
                    start, min(start + how.block_size, transfer.num_bytes), plain=plain
                ),
                starts,
            )
            failed = [outcome for outcome in outcomes if outcome != DONE]
        return min(failed, default=DONE)


def choose_engine(name: str | None = None) -> Engine:
    """Return the engine of that name, or the best that there is here.

    Raises:
        ValueError: there is none of that name; the text says why.
    """
    if name is not None and name not in ENGINES:
        raise ValueError(f"engine {name!r} is unknown; use one of {', '.join(ENGINES)}")
    op = None if name == "python" else native_op("async_io", "Python reads and writes files")
    if op is None:
        if name in (None, "python"):
            return PythonEngine()
        raise ValueError(f"engine {name!r} needs a C++ compiler; use 'python'")
    code = 0 if name == "threads" else op.io_uring_error()
    if name == "io_uring" and code:
        why = os.strerror(code)
        raise ValueError(f"engine 'io_uring' cannot be used here ({why}); use 'threads'")
    return NativeEngine("threads" if name == "threads" or code else "io_uring", op)

"""Reads and writes of files, told to a `StreamTracer`: each is an operator that begins after what
the host knows, on a lane of its own, of which the host knows when it has waited for it. Memory and
the file's bytes are what it touches. While no tracer is set that is one comparison.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from deepspeed.accelerator.stream_trace import Access, HostLane, StreamTracer

# Files have addresses below 0, each as many as this: no memory has.
_FILE_SPAN = 1 << 50


class MappedFile(int):
    """A descriptor of a file whose bytes, from the first on, are also the memory of a tensor."""

    memory: torch.Tensor

    @classmethod
    def of(cls, descriptor: int, memory: torch.Tensor) -> MappedFile:
        """Make it."""
        file = cls(descriptor)
        file.memory = memory
        return file


class _Lane(HostLane):
    """Has one read or write at a time: of several that are on their way none is ordered."""

    def __init__(self, trace: FileTrace, number: int) -> None:
        self._trace = trace
        self._number = number

    def __repr__(self) -> str:
        return f"<file lane {self._number}>"

    def host_waited(self) -> None:
        """The host knows that what was begun here has ended."""
        self._trace.ended(self)


class FileTrace:
    """Tells a tracer; `accesses` is the device's, of a tensor that is read, or written."""

    def __init__(
        self, tracer: StreamTracer, accesses: Callable[[torch.Tensor, bool], Sequence[Access]]
    ) -> None:
        self._tracer = tracer
        self._accesses = accesses
        self._free: list[_Lane] = []
        self._count = 0
        self._files: dict[tuple[int, int], int] = {}
        self._paths: dict[int, str] = {}

    def begun(
        self, memory: torch.Tensor, file: str | int, opened: int, offset: int, is_write: bool
    ) -> _Lane:
        """A read or write was handed over: of all of `memory`, at byte `offset` of a file, which is
        a path or a descriptor, and open as `opened`.
        """
        end = offset + memory.nbytes
        if isinstance(file, MappedFile):
            whole = self._accesses(file.memory, is_write)
            touched = [
                one._replace(start=first, end=last, address=one.address + first - one.start)
                for one in whole
                for first, last in [(one.start + offset, min(one.start + end, one.end))]
            ]
        else:
            number = self._number_of(opened)
            touched = [Access(number, offset, end, is_write, number * _FILE_SPAN + offset)]
        if not self._free:
            self._count += 1
            self._free.append(_Lane(self, self._count))
        lane = self._free.pop()
        name = f"{'write' if is_write else 'read'} of {_path_of(opened)}"
        self._tracer.launched(name, lane, [*self._accesses(memory, not is_write), *touched])
        return lane

    def ended(self, lane: _Lane) -> None:
        """The host has waited for it."""
        self._tracer.stream_synchronized(lane)
        self._free.append(lane)

    def _number_of(self, opened: int) -> int:
        found = os.fstat(opened)
        number = self._files.setdefault((found.st_dev, found.st_ino), -len(self._files) - 1)
        self._paths[number] = _path_of(opened)
        return number

    def name_of(self, address: int) -> str | None:
        """The file that has such an address; None: it is one of memory."""
        return None if address >= 0 else f"file {self._paths[address // _FILE_SPAN]}"


def _path_of(opened: int) -> str:
    return os.readlink(f"/proc/self/fd/{opened}")


active: FileTrace | None = None


@contextmanager
def tracing(trace: FileTrace) -> Iterator[None]:
    """Within it, `trace` hears of every read and write that is begun."""
    global active
    active = trace
    try:
        yield
    finally:
        active = None


def name_of(address: int) -> str | None:
    """The file at an address that was told; None: it is memory."""
    return None if active is None else active.name_of(address)

"""State on the host that lies in files: a tensor of it is a mapping, which anybody may read and
write. Updates of optimizers go through windows of it, past the page cache, while others are read
and written; shards of parameters are read and written so by `runtime.zero.gathering.shard_files`.

Files have no name: what a process had goes with it, however it ends.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from typing import IO, Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.file_trace import MappedFile
from deepspeed.ops.aio.handle import AsyncIOHandle, multiple, wait_for_all
from deepspeed.ops.aio.locked import new_cpu_locked_tensor
from deepspeed.utils import memory_names
from deepspeed.utils.exceptions import disk_error

# Elements in memory at a time, of each tensor: whole blocks of every disk, in every dtype.
WINDOW_NUMEL = 1 << 21
# One window is read, one updated, one written.
NUM_WINDOWS = 3
BLOCK = 4096
# Bytes of a file that small tensors share: a process may open a thousand files, and a model has
# more parameters. What nobody has taken of it takes no room.
SHARED_BYTES = 1 << 30


class _Mapping(mmap.mmap):
    """A file's bytes as memory; the file, one of `files`, is open as long as that is used.
    `num_taken`: so many of the first bytes have room on the disk; `num_kept`: are read and written
    as memory alone.
    """

    file: IO[bytes]
    files: StateFiles
    num_taken: int
    num_kept = 0


# By the address of the memory, which all views of it have in their storage.
_mappings: weakref.WeakValueDictionary[int, _Mapping] = weakref.WeakValueDictionary()


class FilePlace(NamedTuple):
    """Where a tensor lies: the first byte in its file.

    Attributes:
        is_kept: It is read and written as memory; the kernel has it there as long as it has room.
        files: Whose file it is.
    """

    start: int
    is_kept: bool
    files: StateFiles


def place_in_file(tensor: torch.Tensor) -> FilePlace | None:
    """Say where a contiguous tensor lies, a view of one too; None: in no file."""
    mapping = _mappings.get(tensor.untyped_storage().data_ptr()) if _mappings else None
    if mapping is None:
        return None
    start = int(tensor.storage_offset()) * tensor.element_size()
    kept = start + tensor.nbytes <= mapping.num_kept
    return FilePlace(start, kept, mapping.files)


def file_of(tensor: torch.Tensor) -> MappedFile:
    """Return the open file that a tensor lies in."""
    storage = tensor.untyped_storage()
    whole = tensor.view(-1).view(torch.uint8).as_strided((storage.nbytes(),), (1,), 0)
    return MappedFile.of(_mappings[storage.data_ptr()].file.fileno(), whole)


def keep_in_memory(tensor: torch.Tensor, numel: int) -> int:
    """Read and write up to `numel` of a tensor's first elements, and what lies before them, by way
    of the page cache. Returns how many of `numel` are left.
    """
    taken, place = min(numel, tensor.numel()), place_in_file(tensor)
    if place is not None and taken:
        mapping = _mappings[tensor.untyped_storage().data_ptr()]
        end = place.start + taken * tensor.element_size()
        mapping.num_kept = max(mapping.num_kept, end)
    return numel - taken


def mend() -> None:
    """Give files that were cut their size again, where the disk has room: whoever loads state would
    be ended by a page that is not there.
    """
    for mapping in list(_mappings.values()):
        with suppress(OSError):
            os.posix_fallocate(mapping.file.fileno(), 0, mapping.num_taken)
            os.truncate(mapping.file.fileno(), len(mapping))


class _Slot:
    """Memory for one window of several tensors, and what moves it."""

    def __init__(self, handle: AsyncIOHandle) -> None:
        self.handle = handle
        self.memory: list[torch.Tensor] = []

    def bytes_of(self, index: int) -> torch.Tensor:
        """Memory for any window of tensor `index`."""
        while len(self.memory) <= index:
            size = WINDOW_NUMEL * 4
            self.memory.append(new_cpu_locked_tensor(size, torch.empty(0, dtype=torch.uint8)))
        return self.memory[index]


class StateFiles:
    """Makes tensors that lie in files of a folder, and updates them.

    Args:
        folder: Is made where it is not there; on the disk that has room.
        make_handle: Makes what moves bytes; called `NUM_WINDOWS` times.
    """

    def __init__(self, folder: str, make_handle: Callable[[], AsyncIOHandle]) -> None:
        self._folder = folder
        self.make_handle = make_handle
        self._slots: list[_Slot] = []
        self._shared: StorageWeakRef | None = None  # the newest such file
        self._taken = 0  # of its bytes
        memory_names.register(self)

    @classmethod
    def configured(cls, folder: object, aio: Any) -> StateFiles:
        """Make it of the keys of the `aio` block."""
        how = aio.block_size, aio.queue_depth, aio.single_submit, aio.overlap_events
        return cls(str(folder), lambda: AsyncIOHandle(*how, aio.intra_op_parallelism))

    def zeros(self, numel: int, dtype: torch.dtype, shares: bool = False) -> torch.Tensor:
        """Return a tensor `[numel]` that lies in a file, with room for all of it: one of its own,
        or one that it `shares`, which goes when nobody has any part of it.

        Raises:
            OSError: there is none; it has the folder.
        """
        if not numel:
            return torch.zeros(0, dtype=dtype)
        size = multiple(numel * dtype.itemsize, BLOCK)
        if not shares or size > SHARED_BYTES:
            # No view, as a script's would be: nobody else has its memory.
            return self._file(size, size).view(dtype)[:numel].data
        whole, start = self._shared_file(), self._taken
        if whole is None or start + size > SHARED_BYTES:
            whole, start = self._file(SHARED_BYTES, size), 0
            self._shared = StorageWeakRef(whole.untyped_storage())
        mapping = _mappings[whole.data_ptr()]
        self._take_room(mapping.file.fileno(), start, size)
        mapping.num_taken = self._taken = start + size
        return whole[start : start + size].view(dtype)[:numel]

    def _shared_file(self) -> torch.Tensor | None:
        """Return the newest shared file, if anybody has a part of it."""
        # A strong reference would be a circle that no collector sees: its memory has the mapping,
        # which has `self`.
        if self._shared is None or self._shared.expired():
            return None
        storage = torch.UntypedStorage._new_with_weak_ptr(self._shared.cdata)
        return torch.empty(0, dtype=torch.uint8).set_(storage)

    def _file(self, size: int, taken: int) -> torch.Tensor:
        """Map a new file of `size` bytes, of which room for the first `taken` is taken."""
        os.makedirs(self._folder, exist_ok=True)
        file: IO[bytes] = tempfile.TemporaryFile(dir=self._folder, buffering=0)
        self._take_room(file.fileno(), 0, taken, size)
        mapping = _Mapping(file.fileno(), size)
        mapping.file, mapping.files, mapping.num_taken = file, self, taken
        whole = get_accelerator().as_host_memory(torch.frombuffer(mapping, dtype=torch.uint8))
        _mappings[whole.data_ptr()] = mapping
        return whole

    def _take_room(self, file: int, start: int, size: int, whole: int = 0) -> None:
        try:
            if whole > size:
                os.truncate(file, whole)
            # A page of a mapping for which the disk has no room would end the process.
            os.posix_fallocate(file, start, size)
        except OSError as error:
            raise disk_error(error, os.path.join(self._folder, "state"), size) from error

    def holds(self, tensor: torch.Tensor) -> bool:
        """Say whether it is such a tensor, whole."""
        return tensor.data_ptr() in _mappings

    def windows(
        self,
        tensors: Sequence[torch.Tensor],
        to: Sequence[torch.Tensor],
        left: Sequence[tuple[int, int]] | None = None,
    ) -> Windows:
        """Update tensors of this folder, of equal size; used as a context.

        Args:
            tensors: Are read.
            to: Are written: the same, or others like them.
            left: Elements, first and last+1, of the windows to be updated; None: all. The others
                have been: of them the first tensor of `to` is read, and nothing written.
        """
        while len(self._slots) < NUM_WINDOWS:
            self._slots.append(_Slot(self.make_handle()))
        files = [file_of(tensor) for tensor in tensors]
        written = [file_of(one) for one in to]
        return Windows(self._slots, tensors, files, written, left)

    def named_memory(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name the windows, for reports."""
        for number, slot in enumerate(self._slots):
            for index, memory in enumerate(slot.memory):
                yield f"window {number} of state {index}", memory


class Windows:
    """One pass over flat tensors in files: the next window is read and the one before written
    meanwhile. Leaving the context waits until all is written.
    """

    def __init__(
        self,
        slots: Sequence[_Slot],
        tensors: Sequence[torch.Tensor],
        files: Sequence[int],
        to: Sequence[int],
        left: Sequence[tuple[int, int]] | None,
    ) -> None:
        self._slots, self._tensors, self._files = slots, tensors, files
        self._to, self._left = to, left
        self._count = -(-tensors[0].numel() // WINDOW_NUMEL)
        self._now, self._read = -1, -1  # the window at hand, the last that was asked for
        # The first tensor is written by whoever reads it at once, through its mapping.
        self.writes_first = True

    def is_left(self, element: int) -> bool:
        """Whether an element's window is to be updated."""
        return self._left is None or any(start <= element < end for start, end in self._left)

    def each(self, numbers: Iterator[int]) -> Iterator[tuple[int, int, list[torch.Tensor]]]:
        """Yield whole windows, of these numbers; one of them is asked for ahead."""
        number = next(numbers, -1)
        while number >= 0:
            following, first = next(numbers, -1), number * WINDOW_NUMEL
            last = min(first + WINDOW_NUMEL, self._tensors[0].numel())
            yield from self.of(first, last, following)
            number = following

    def of(
        self, start: int, end: int, following: int | None = None
    ) -> Iterator[tuple[int, int, list[torch.Tensor]]]:
        """Yield the parts of elements `start` to `end`, as first, last+1 and memory of each. The
        window that is read ahead is that behind, or `following`, if there is one.
        """
        while start < end:
            number = start // WINDOW_NUMEL
            self._enter(number, number + 1 if following is None else following)
            first = number * WINDOW_NUMEL
            stop = min(end, first + WINDOW_NUMEL)
            slot = self._slots[number % NUM_WINDOWS]
            memory = [
                slot.bytes_of(index).view(tensor.dtype)[start - first : stop - first]
                for index, tensor in enumerate(self._tensors)
            ]
            yield start, stop, memory
            start = stop

    def _enter(self, number: int, following: int) -> None:
        if number == self._now:
            return
        self._leave()
        if self._read != number:
            self._begin(number)
        self._slots[number % NUM_WINDOWS].handle.wait()
        self._now = number
        # Not into the memory of the one at hand.
        if 0 <= following < self._count and (following - number) % NUM_WINDOWS:
            self._begin(following)

    def _begin(self, number: int) -> None:
        slot = self._slots[number % NUM_WINDOWS]
        slot.handle.wait()  # until what it had is written
        is_left = self.is_left(number * WINDOW_NUMEL)
        places = list(self._places(number, self._files if is_left else self._to))
        # Who reads masters through their mapping has no use for them here.
        for memory, file, offset in places if is_left else places[: self.writes_first]:
            slot.handle.async_pread(memory, file, offset)
        self._read = number

    def _leave(self) -> None:
        if self._now < 0 or not self.is_left(self._now * WINDOW_NUMEL):
            return
        slot = self._slots[self._now % NUM_WINDOWS]
        places = list(self._places(self._now, self._to))
        for memory, file, offset in places if self.writes_first else places[1:]:
            slot.handle.async_pwrite(memory, file, offset)

    def _places(self, number: int, files: Sequence[int]) -> Iterator[tuple[torch.Tensor, int, int]]:
        slot = self._slots[number % NUM_WINDOWS]
        for index, (tensor, file) in enumerate(zip(self._tensors, files, strict=True)):
            offset = number * WINDOW_NUMEL * tensor.dtype.itemsize
            left = multiple(tensor.nbytes - offset, BLOCK)
            size = min(WINDOW_NUMEL * tensor.dtype.itemsize, left)
            yield slot.bytes_of(index)[:size], file, offset

    def __enter__(self) -> Windows:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            if error is None:
                self._leave()
        finally:
            with nullcontext() if error is None else suppress(OSError):
                wait_for_all(slot.handle for slot in self._slots)

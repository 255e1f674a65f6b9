"""Writing files in torch's format: whole, or tensor by tensor. Reading is `files`'."""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import zipfile
from collections.abc import Iterator
from typing import IO, cast

import torch

from deepspeed.checkpoint.file_writer import (
    DEFAULT_OPTIONS,
    FileRecord,
    FileWriter,
    WriteOptions,
)
from deepspeed.checkpoint.utils import map_tensors, separate
from deepspeed.utils.exceptions import disk_error


def write_file(path: str, content: object, options: WriteOptions = DEFAULT_OPTIONS) -> FileRecord:
    """Save `content`, each tensor with its own memory alone, and return once it is on disk."""
    with (
        FileWriter(path, options) as file,
        contextlib.nullcontext() if options.crc32 else _without_crc32(),
    ):
        torch.save(
            separate(content),
            cast(IO[bytes], file),
            _use_new_zipfile_serialization=options.zip_format,
        )
        return file.finish()


_crc32_lock = threading.Lock()
_without_crc32_depth = 0


@contextlib.contextmanager
def _without_crc32() -> Iterator[None]:
    """Let torch leave its sums out. The switch is the process's, and two threads may be writing."""
    global _without_crc32_depth
    with _crc32_lock:
        if _without_crc32_depth == 0 and not torch.serialization.get_crc32_options():
            _without_crc32_depth = 1  # the client has switched them off; leave it so
        _without_crc32_depth += 1
        torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        with _crc32_lock:
            _without_crc32_depth -= 1
            if _without_crc32_depth == 0:
                torch.serialization.set_crc32_options(True)


# Of an entry's header: its size, and where it has the sizes of the name and of what is behind it.
_HEADER_BYTES, _LENGTHS = 30, slice(26, 30)


class StreamedFile:
    """A file in torch's format whose tensors are written one by one; `content` has placeholders."""

    def __init__(self, path: str, content: object) -> None:
        self.tensors: list[torch.Tensor] = []

        def note(tensor: torch.Tensor) -> torch.Tensor:
            self.tensors.append(tensor)
            return tensor

        with torch.serialization.skip_data():
            # torch numbers storages in the order in which they occur.
            torch.save(map_tensors(content, note), path)
        self._path = path
        self._starts = _starts_of(path, self.tensors)
        self._file = os.open(path, os.O_WRONLY)

    def fill(self, place: torch.Tensor, value: torch.Tensor) -> None:
        """Write the elements of one of the content's tensors."""
        start = self._starts[id(place)]
        data = value.detach().to("cpu", place.dtype).contiguous().reshape(-1)
        left = data.view(torch.uint8).numpy().data
        while left:
            try:
                written = os.pwrite(self._file, left, start)
            except OSError as error:
                raise disk_error(error, self._path, os.fstat(self._file).st_size) from error
            start, left = start + written, left[written:]

    def finish(self) -> None:
        os.fsync(self._file)

    def __enter__(self) -> StreamedFile:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._file)


def _starts_of(path: str, tensors: list[torch.Tensor]) -> dict[int, int]:
    """Where in the file the bytes of each tensor go, by its identity."""
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        entries = {}
        for entry in archive.infolist():
            folder, _, name = entry.filename.rpartition("/")
            if folder.endswith("/data"):
                entries[name] = entry
        starts = {}
        for number, tensor in enumerate(tensors):
            entry = entries[str(number)]
            if entry.file_size != tensor.numel() * tensor.element_size():
                raise RuntimeError(
                    f"torch {torch.__version__} left {entry.file_size} bytes for a tensor of "
                    f"{tensor.numel() * tensor.element_size()} in {path}: it orders storages "
                    "otherwise than this release knows"
                )
            file.seek(entry.header_offset)
            name_bytes, extra_bytes = struct.unpack("<HH", file.read(_HEADER_BYTES)[_LENGTHS])
            starts[id(tensor)] = entry.header_offset + _HEADER_BYTES + name_bytes + extra_bytes
    return starts

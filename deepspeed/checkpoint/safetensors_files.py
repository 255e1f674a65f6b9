"""Tensors in safetensors files, of which any run of elements can be read by itself.

A file begins with the length of its header (8 bytes, little-endian) and the header, which is JSON:
of every tensor its dtype, shape, and where behind the header its bytes are. A model's folder has
one such file, or several and an index that says which tensor is in which.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import torch

from deepspeed.checkpoint.files import CheckpointError

_LENGTH_BYTES = 8
_SUFFIX, _INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
# Read at a time; a multiple of every element's size.
_CHUNK_BYTES = 16 << 20


class SafeTensor(NamedTuple):
    """One tensor of a file.

    Attributes:
        path: The file.
        dtype, shape: The tensor's.
        start: Where in the file its first byte is.
    """

    path: str
    dtype: torch.dtype
    shape: torch.Size
    start: int


class SafetensorsFolder:
    """The tensors of a model. Headers are read at once, elements when they are asked for.

    Args:
        path: A file, or a folder with one file, with several and an index, or with several that
            share no name.

    Attributes:
        tensors: By name.
        bytes_read: What was read of all files so far, headers included.

    Raises:
        CheckpointError: A file is missing, damaged, or has a name that another has too.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.bytes_read = 0
        self.tensors: dict[str, SafeTensor] = {}
        for file in _files_of(os.fspath(path)):
            for name, tensor in self._tensors_of(file):
                other = self.tensors.setdefault(name, tensor)
                if other is not tensor:
                    raise CheckpointError(f"{name} is in {other.path} and in {file}; remove one")

    def _tensors_of(self, path: str) -> Iterator[tuple[str, SafeTensor]]:
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
                if length > size - _LENGTH_BYTES:
                    raise ValueError(f"a header of {length} bytes in a file of {size}")
                header: dict[str, Any] = json.loads(file.read(length))
            self.bytes_read += _LENGTH_BYTES + length
            for name, entry in header.items():
                if name != "__metadata__":
                    yield name, _tensor(path, entry, _LENGTH_BYTES + length, size)
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} does not exist") from error
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            raise CheckpointError(
                f"{path} cannot be read as safetensors: {error}. It is damaged, or another format"
            ) from error

    def read(self, name: str, first: int, into: torch.Tensor) -> None:
        """Read some of a tensor's elements.

        Args:
            name: The tensor.
            first: Number of the first element that is wanted.
            into: 1-D, of any dtype and device; receives as many as it has.

        Raises:
            CheckpointError: The file ends early, or cannot be read.
        """
        tensor = self.tensors[name]
        size = tensor.dtype.itemsize
        count = min(_CHUNK_BYTES // size, into.numel())
        buffer = torch.empty(count, dtype=tensor.dtype)
        view = buffer.view(torch.uint8).numpy().data
        try:
            with open(tensor.path, "rb", buffering=0) as file:
                file.seek(tensor.start + first * size)
                for at in range(0, into.numel(), max(count, 1)):
                    part = min(count, into.numel() - at)
                    self._read_into(file, view[: part * size])
                    into[at : at + part].copy_(buffer[:part])
        except OSError as error:
            raise CheckpointError(f"{tensor.path} cannot be read: {error}") from error

    def _read_into(self, file: Any, view: memoryview) -> None:
        while view:
            got = file.readinto(view)
            if not got:
                raise CheckpointError(f"{file.name} ends before its last tensor does")
            self.bytes_read += got
            view = view[got:]


def _tensor(path: str, entry: Any, header_bytes: int, file_bytes: int) -> SafeTensor:
    dtype, shape = _DTYPES.get(entry["dtype"]), torch.Size(entry["shape"])
    begin, end = entry["data_offsets"]
    if dtype is None:
        raise ValueError(f"dtype {entry['dtype']!r} is not known")
    if end - begin != prod(shape) * dtype.itemsize or not 0 <= begin <= end:
        raise ValueError(f"{end - begin} bytes for a {dtype} of shape {tuple(shape)}")
    if header_bytes + end > file_bytes:
        raise ValueError(f"it has {file_bytes} bytes, at least {header_bytes + end} were written")
    return SafeTensor(path, dtype, shape, header_bytes + begin)


def _files_of(path: str) -> list[str]:
    if not os.path.isdir(path):
        return [path]
    names = sorted(os.listdir(path))
    indices = [name for name in names if name.endswith(_INDEX_SUFFIX)]
    if len(indices) > 1:
        raise CheckpointError(f"{path} has several indices: {', '.join(indices)}; give one file")
    found = {name for name in names if name.endswith(_SUFFIX)}
    if indices:
        try:
            with open(os.path.join(path, indices[0]), encoding="utf-8") as file:
                found = set(json.load(file)["weight_map"].values())
        except (ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(
                f"{os.path.join(path, indices[0])} is damaged: {error!r}"
            ) from error
    if not found:
        raise CheckpointError(f"{path} has no *{_SUFFIX}; it holds {', '.join(names) or 'nothing'}")
    return [os.path.join(path, name) for name in sorted(found)]

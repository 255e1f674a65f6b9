"""Lists of numbers of different lengths in two files, read without loading them.

The layout is that of Megatron's and upstream's memory-mapped datasets: `NAME.bin` has the numbers
of all items behind one another, `NAME.idx` a magic word, version, type, the number of items and of
documents, then lengths (int32), places in bytes (int64) and first items of documents (int64).
"""

from __future__ import annotations

import os
import struct
from typing import Any, BinaryIO

import numpy
import torch

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<QBQQ")
_DTYPES: dict[int, Any] = {
    1: numpy.uint8,
    2: numpy.int8,
    3: numpy.int16,
    4: numpy.int32,
    5: numpy.int64,
    6: numpy.float64,
    7: numpy.float64,
    8: numpy.uint16,
    9: numpy.uint32,
    10: numpy.uint64,
}
_CODES = {numpy.dtype(dtype): code for code, dtype in reversed(_DTYPES.items())}


def index_file_path(prefix_path: str) -> str:
    """Name the file of lengths and places."""
    return prefix_path + ".idx"


def data_file_path(prefix_path: str) -> str:
    """Name the file of numbers."""
    return prefix_path + ".bin"


def dataset_exists(path: str, impl: str = "mmap") -> bool:
    """Tell whether both files are there."""
    return all(os.path.isfile(name(path)) for name in (index_file_path, data_file_path))


class MMapIndexedDataset(torch.utils.data.Dataset[Any]):
    """Items of a pair of files, named without suffix; an item is a numpy array.

    Raises:
        ValueError: They are no such files, or do not belong together.
    """

    def __init__(self, path: str, skip_warmup: bool = True) -> None:
        self._path = path
        with open(index_file_path(path), "rb") as file:
            head = file.read(len(_MAGIC) + _HEADER.size)
        if not head.startswith(_MAGIC) or len(head) < len(_MAGIC) + _HEADER.size:
            raise ValueError(f"{index_file_path(path)} is no index of a memory-mapped dataset")
        version, code, count, num_documents = _HEADER.unpack(head[len(_MAGIC) :])
        if version != _VERSION or code not in _DTYPES:
            raise ValueError(
                f"{index_file_path(path)}: version {version}, type {code}; known are version "
                f"{_VERSION}, types {sorted(_DTYPES)}"
            )
        index = numpy.memmap(index_file_path(path), mode="r", offset=len(head))
        if index.size != count * 12 + num_documents * 8:
            raise ValueError(f"{index_file_path(path)} is cut off: {count} items do not fit in it")
        self.sizes = index[: 4 * count].view(numpy.int32)
        self._places = index[4 * count : 12 * count].view(numpy.int64)
        self.doc_idx = index[12 * count :].view(numpy.int64)
        self._data = (
            numpy.memmap(data_file_path(path), dtype=_DTYPES[code], mode="r")
            if os.path.getsize(data_file_path(path))
            else numpy.empty(0, dtype=_DTYPES[code])
        )
        if int(self.sizes.sum()) != self._data.size:
            raise ValueError(
                f"{data_file_path(path)} has {self._data.size} numbers, and its index tells of "
                f"{int(self.sizes.sum())}"
            )

    def __len__(self) -> int:
        return int(self.sizes.size)

    def __getitem__(self, index: int) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(f"item {index} of {len(self)} in {self._path}")
        begin = int(self._places[index]) // self._data.itemsize
        return self._data[begin : begin + int(self.sizes[index])]

    @property
    def everything(self) -> Any:
        """The numbers of all items behind one another, 1-d."""
        return self._data


class MMapIndexedDatasetBuilder:
    """Writes such a pair of files, the numbers into `data_file_path(prefix)`."""

    def __init__(self, out_file: str, dtype: Any = numpy.int64) -> None:
        self._dtype = numpy.dtype(dtype)
        if self._dtype not in _CODES:
            raise ValueError(
                f"{self._dtype} cannot be stored; use one of {sorted(map(str, _CODES))}"
            )
        self._file: BinaryIO = open(out_file, "wb")
        self._sizes: list[int] = []
        self._documents = [0]

    def add_item(self, tensor: object) -> None:
        """Append an item: a 1-d tensor, array or list."""
        numbers = numpy.asarray(tensor, dtype=self._dtype).reshape(-1)
        self._file.write(numbers.tobytes(order="C"))
        self._sizes.append(numbers.size)

    def end_document(self) -> None:
        """Let the items since the last call belong together."""
        self._documents.append(len(self._sizes))

    def finalize(self, index_file: str) -> None:
        """Write the index and close."""
        self._file.close()
        sizes = numpy.array(self._sizes, dtype=numpy.int32)
        ends = numpy.cumsum(sizes, dtype=numpy.int64) * self._dtype.itemsize
        places = numpy.concatenate([numpy.zeros(1, dtype=numpy.int64), ends])[: sizes.size]
        with open(index_file, "wb") as file:
            file.write(_MAGIC)
            code, documents = _CODES[self._dtype], len(self._documents)
            file.write(_HEADER.pack(_VERSION, code, sizes.size, documents))
            for numbers in (sizes, places, numpy.array(self._documents, dtype=numpy.int64)):
                file.write(numbers.tobytes(order="C"))


def write_metric_index(metric_of_samples: object, sample_path: str, metric_path: str) -> None:
    """Write the two files that a metric of the sampler reads: item i of `sample_path` has the
    samples of the i-th smallest value, item i of `metric_path` is that value; both are named
    without suffix.

    `metric_of_samples` is one number per sample of the dataset, in its order.
    """
    values = numpy.asarray(metric_of_samples).reshape(-1)
    order = numpy.argsort(values, kind="stable")
    levels, begins = numpy.unique(values[order], return_index=True)
    samples = MMapIndexedDatasetBuilder(data_file_path(sample_path), numpy.int64)
    metrics = MMapIndexedDatasetBuilder(data_file_path(metric_path), values.dtype)
    for level, members in zip(levels, numpy.split(order, begins[1:]), strict=True):
        samples.add_item(members)
        metrics.add_item([level])
    samples.finalize(index_file_path(sample_path))
    metrics.finalize(index_file_path(metric_path))

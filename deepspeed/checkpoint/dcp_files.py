"""Checkpoint files whose tensors are in the format of torch.distributed.checkpoint (DCP).

A file `NAME.pt` becomes an index, in torch's format, with everything but the tensors, and a folder
`NAME.dcp` that any tool for DCP reads. DCP's `.metadata`, a pickle, is read with a list of classes.
"""

from __future__ import annotations

import contextlib
import enum
import inspect
import io
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict
from torch.utils import _pytree as pytree

from deepspeed.checkpoint.constants import DCP_FOLDER
from deepspeed.checkpoint.file_names import dcp_folder
from deepspeed.checkpoint.file_writer import (
    DEFAULT_OPTIONS,
    FileRecord,
    WriteOptions,
    file_checksum,
)
from deepspeed.checkpoint.torch_files import write_file
from deepspeed.utils.exceptions import disk_error

# First item of a pair that stands for a tensor; the second is its name.
_TENSOR = "torch.distributed.checkpoint tensor"
_METADATA = ".metadata"
_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {
        "Size",
        *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
    },
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "WindowsPath"},
}


def write_dcp(
    path: str, content: Any, options: WriteOptions = DEFAULT_OPTIONS
) -> dict[str, FileRecord]:
    """Write an index and its folder, and return once they are on disk."""
    folder = dcp_folder(path)
    tensors: dict[str, torch.Tensor] = {}
    seen: dict[int, str] = {}  # tied weights are one tensor, and stay one

    def replace(place: Any, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        name = seen.setdefault(id(leaf), pytree.keystr(place))
        tensors[name] = leaf
        return (_TENSOR, name)

    index = pytree.tree_map_with_path(replace, content)
    records = {
        path: write_file(path, {DCP_FOLDER: os.path.basename(folder), "content": index}, options)
    }
    if tensors:
        try:
            with _plain_errors():
                _save(tensors, dcp.FileSystemWriter(folder, sync_files=True))
        except OSError as error:
            raise disk_error(error, folder, sum(t.nbytes for t in tensors.values())) from error
        for name in sorted(os.listdir(folder)):
            part = os.path.join(folder, name)
            records[part] = FileRecord(os.path.getsize(part), file_checksum(part))
    return records


def read_dcp(path: str, index: dict[str, Any]) -> Any:
    """What `write_dcp` was given."""
    folder = os.path.join(os.path.dirname(path), os.path.basename(index[DCP_FOLDER]))
    names: list[str] = []
    pytree.tree_map(
        lambda leaf: names.append(leaf[1]) if _is_reference(leaf) else None,
        index["content"],
        is_leaf=_is_reference,
    )
    tensors = _read_tensors(folder, set(names)) if names else {}
    return pytree.tree_map(
        lambda leaf: tensors[leaf[1]] if _is_reference(leaf) else leaf,
        index["content"],
        is_leaf=_is_reference,
    )


def _is_reference(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and value[0] == _TENSOR


def _read_tensors(folder: str, names: set[str]) -> dict[str, torch.Tensor]:
    reader = _Reader(folder)
    known = reader.read_metadata().state_dict_metadata
    tensors = {}
    for name in names:
        described = known.get(name)
        if not isinstance(described, TensorStorageMetadata):  # anything else DCP would unpickle
            raise ValueError(f"{folder} has no tensor {name}")
        tensors[name] = torch.empty(described.size, dtype=described.properties.dtype)
    with _plain_errors():
        _load(tensors, reader)
    return tensors


def _save(tensors: dict[str, torch.Tensor], writer: dcp.FileSystemWriter) -> None:
    if "no_dist" in inspect.signature(dcp.save).parameters:
        dcp.save(tensors, storage_writer=writer, no_dist=True)
    else:  # torch 2.6 knows the argument, and that of `load`, one floor below only
        writer.reset()
        _save_state_dict(tensors, writer, no_dist=True)


def _load(tensors: dict[str, torch.Tensor], reader: dcp.FileSystemReader) -> None:
    if "no_dist" in inspect.signature(dcp.load).parameters:
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    else:
        reader.reset()
        _load_state_dict(tensors, reader, no_dist=True)


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise what went wrong itself: DCP's own exception is no `Exception`."""
    try:
        yield
    except dcp.CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None


class _Reader(dcp.FileSystemReader):
    """Reads a folder of DCP whose metadata hold only what they should."""

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        metadata = _Unpickler(io.BytesIO(Path(self.path, _METADATA).read_bytes())).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(
                f"{os.path.join(self.path, _METADATA)} holds {type(metadata).__name__}, no metadata"
            )
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Unpickler(pickle.Unpickler):
    """Knows the classes of DCP's metadata, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in (("builtins", "getattr"), ("__builtin__", "getattr")):
            return _member  # how Python 3.11.0 to 3.11.3 write members of an enum
        if module == "pathlib._local":
            module = "pathlib"  # where Python 3.13 says that paths are
        if name not in _CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} is no class of DCP's metadata")
        return super().find_class(module, name)


def _member(kind: object, name: str) -> Any:
    """The member `name` of an enum, and nothing else that `getattr` could get."""
    if not (isinstance(kind, enum.EnumMeta) and name in kind.__members__):
        raise pickle.UnpicklingError(f"{name} of {kind} is no member of an enum")
    return kind[name]

"""`load_sharded_safetensors`: weights of a safetensors folder; each rank reads what it keeps.

A file begins with the length of its header (8 bytes, little-endian) and the header, which is JSON:
of every tensor its dtype, shape, and where behind the header its bytes are. A model's folder has
one such file, or several and an index that says which tensor is in which.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from math import prod
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.experts import renumbered
from deepspeed.checkpoint.files import CheckpointError
from deepspeed.comm.initialization import ensure_distributed
from deepspeed.moe.expert_rows import whole_shape
from deepspeed.runtime.checkpointing.folders import together
from deepspeed.runtime.checkpointing.model_files import ModelExperts
from deepspeed.runtime.checkpointing.weight_resharding import own_fragment
from deepspeed.runtime.sharding.model_ranks import is_model_parallel_parameter
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.parameters.zero_parameter import is_zero_param, record_of

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
    """One tensor of a file."""

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
        """Read some of a tensor's elements."""
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


class LoadedSafetensors(NamedTuple):
    """What `load_sharded_safetensors` did.

    Attributes:
        missing_keys: Names of the model that are not in the files.
        unexpected_keys: Names in the files that are not the model's.
        bytes_read: Read by this rank, headers included.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]
    bytes_read: int


def load_sharded_safetensors(
    model: nn.Module,
    path: str | os.PathLike[str],
    strict: bool = True,
    rename: Callable[[str], str] | None = None,
) -> LoadedSafetensors:
    """Load weights into a model whose parameters ZeRO stage 3 shards, so that the model never
    stands whole on any host. All ranks call it.

    Of each sharded parameter a rank reads the elements that it owns, 16 MiB at a time; buffers and
    parameters that are not sharded are read by all. Names, shapes and sizes are compared first.

    Args:
        model: Made under `deepspeed.zero.Init`, or an engine's module, whose masters follow. Of
            tied weights one name is enough.
        path: A file, or a folder with files and their index as `save_pretrained` writes them.
        strict: Names must be the same; False leaves what is missing as it is.
        rename: Name in the files -> name in the model, where experts of `deepspeed.moe` are
            numbered over all ranks.

    Returns:
        Names that differ, and how much this rank has read.

    Raises:
        CheckpointError: On all ranks: a file is missing or damaged, a shape is another, or
            (`strict`) names differ. An error of a disk may leave weights neither old nor new.
    """
    ensure_distributed(None)
    device = torch.device(get_accelerator().current_device_name())
    what = f"loading {os.fspath(path)}"
    loading: _Loading = together(lambda: _Loading(model, path, strict, rename), device, what)
    for owner in loading.owners:
        owner.before_update()
    together(loading.load, device, what)
    loading.tell()
    for owner in loading.owners:
        owner.after_update()
    return LoadedSafetensors(loading.missing, loading.unexpected, loading.files.bytes_read)


class _Loading:
    """What goes where, compared; and the loading itself. Knows this rank alone."""

    def __init__(
        self,
        model: nn.Module,
        path: str | os.PathLike[str],
        strict: bool,
        rename: Callable[[str], str] | None,
    ) -> None:
        self.files = SafetensorsFolder(path)
        sources = {(rename(name) if rename else name): name for name in self.files.tensors}
        if len(sources) != len(self.files.tensors):
            raise CheckpointError("rename gives several tensors of the files one name")
        experts = ModelExperts(model)
        # Files number all experts, a model those of its own rank.
        state = {
            renumbered(name, experts.first): value
            for name, value in model.state_dict(keep_vars=True).items()
            if isinstance(value, torch.Tensor)
        }
        self.targets: dict[torch.Tensor, str] = {}
        for name, tensor in state.items():
            if name in sources and tensor not in self.targets:
                self._check(name, tensor, sources[name])
                self.targets[tensor] = sources[name]
        self.missing = [
            name for name, tensor in state.items() if name not in sources and not self._has(tensor)
        ]
        self.unexpected = [
            source
            for name, source in sources.items()
            if name not in state and not experts.are_elsewhere(name)
        ]
        if strict and (self.missing or self.unexpected):
            raise CheckpointError(
                f"the files are of another model: {_told(self.missing)} missing from them, "
                f"{_told(self.unexpected)} not in the model. Give rename, or strict=False"
            )
        units = [record_of(param).unit for param in self.targets if is_zero_param(param)]
        found = dict.fromkeys(unit.resources.owner for unit in units if unit is not None)
        self.owners: list[DeepSpeedZeRoOffload] = [owner for owner in found if owner is not None]

    def _has(self, tensor: torch.Tensor) -> bool:
        return tensor in self.targets

    def _check(self, name: str, tensor: torch.Tensor, source: str) -> None:
        saved = self.files.tensors[source]
        if is_model_parallel_parameter(tensor):
            raise CheckpointError(
                f"{name} is a slice of a layer that tensor-parallel ranks share: load before the "
                "layers are cut (by deepspeed.tp_model_init or deepspeed.initialize)"
            )
        shape = whole_shape(tensor) if is_zero_param(tensor) else tensor.shape
        if saved.shape != shape:
            raise CheckpointError(
                f"{name} has shape {tuple(saved.shape)} in {saved.path}, in this model "
                f"{tuple(shape)}"
            )
        if saved.dtype.is_floating_point != tensor.is_floating_point():
            raise CheckpointError(f"{name} is {saved.dtype} in {saved.path}, here {tensor.dtype}")
        if is_zero_param(tensor):
            if record_of(tensor).readers:
                raise CheckpointError(f"{name} is gathered; load outside of GatheredParameters")
        elif hasattr(tensor, "_hp_mapping"):
            raise CheckpointError(
                f"{name} has a master weight, which would not follow: load before "
                "deepspeed.initialize (below ZeRO stage 3)"
            )

    @torch.no_grad()
    def load(self) -> None:
        """Read every tensor, or this rank's elements of it, to where it is."""
        for tensor, source in self.targets.items():
            if is_zero_param(tensor):
                own = own_fragment(tensor)
                record_of(tensor).before_write()
                self.files.read(source, own.param_start, record_of(tensor).shard[: own.numel])
            elif tensor.is_contiguous():
                self.files.read(source, 0, tensor.detach().view(-1))
            else:
                whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
                self.files.read(source, 0, whole.view(-1))
                tensor.copy_(whole)

    def tell(self) -> None:
        for tensor in self.targets:
            on_edit = record_of(tensor).on_edit if is_zero_param(tensor) else None
            if on_edit is not None:
                on_edit(cast(nn.Parameter, tensor))


def _told(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3]) or 'nothing'}{more}"

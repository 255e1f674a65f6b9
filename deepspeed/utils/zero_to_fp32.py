#!/usr/bin/env python
"""The fp32 weights of a checkpoint folder, put together without the run that wrote it: as functions
and as a command.

    python zero_to_fp32.py CHECKPOINT_DIR OUTPUT_DIR [--safe_serialization] [--max_shard_size 5GB]

This file needs torch (and uses safetensors and xxhash where they are installed) and nothing of the
package around it, because a copy lies beside every checkpoint and must work where the package is
not installed; names that it shares with the format's definitions are therefore written out again.
It reads ZeRO 0 to 3, pipelines and experts. Shards are mapped, so memory holds one output file at a
time.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import os
import re
import sys
import tempfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

logger = logging.getLogger("zero_to_fp32")

_MODEL_FILE = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_ZERO3_MODEL_FILE = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
_LAYER_FILE = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")
_EXPERT_FILE = re.compile(r"layer_(\d+)_expert_(\d+)_mp_rank_(\d+)_model_states\.pt")
_SHARD_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_EXPERT_OPTIMIZER_FILE = re.compile(r"expp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_EXPERT_NAME = re.compile(r"^(.*\bdeepspeed_experts\.)(\d+)(\..+)$")
_DCP_FOLDER = "torch.distributed.checkpoint folder"
_STAGE3 = 3


# Reading files


class _Data:
    """Stands in for the classes whose instances are in checkpoint files: keeps their attributes,
    runs nothing of theirs.
    """

    numel: int
    start: int


class _Stage(int):
    """Stands in for the enumeration of ZeRO stages."""


_ALLOWED: list[Any] = [
    (_Data, "deepspeed.utils.tensor_fragment.fragment_address"),
    (_Data, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_Data, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (_Stage, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_Data, "deepspeed.checkpoint.universal_checkpoint.SubparamShape"),
    argparse.Namespace,
]


def _read(path: str) -> Any:
    """The content of a file of `torch.save`; nothing but data is unpickled, and tensors stay in the
    file until they are used.
    """
    try:
        with torch.serialization.safe_globals(_ALLOWED):
            # Files of the format before zip archives can't be mapped.
            content = torch.load(
                path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
            )
    except FileNotFoundError:
        raise
    except Exception as error:  # torch raises many kinds for a damaged file
        told = [
            line.strip() for line in str(error).splitlines() if "WeightsUnpickler error" in line
        ]
        reason = (told or str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{path} cannot be read: {reason}. It is damaged, or holds objects that are not data"
        ) from error
    if isinstance(content, dict) and _DCP_FOLDER in content:
        raise ValueError(
            f"{path} keeps its tensors in {content[_DCP_FOLDER]}, in the format of "
            "torch.distributed.checkpoint, which is not read here: convert the folder with "
            "deepspeed.checkpoint.ds_to_universal, or save with another checkpoint.writer than "
            '"dcp"'
        )
    return content


def _check_manifest(folder: str) -> None:
    """Compare the files with the folder's `manifest.json`, if it has one; upstream's have none.

    Raises:
        ValueError: A file that is read here is missing or not the one that was saved.
    """
    path = os.path.join(folder, "manifest.json")
    if not os.path.isfile(path):
        return
    try:
        with open(path, "rb") as file:
            files = json.load(file)["files"]
        records = {name: (int(record[0]), str(record[1])) for name, record in files.items()}
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from error
    for name, record in records.items():
        file_path = os.path.join(folder, name)
        if name.endswith("_states.pt") and not _is_saved_file(file_path, *record):
            raise ValueError(
                f"{file_path} is not the file that was saved: the size and checksum in {path} are "
                "others"
            )


def _is_saved_file(path: str, size: int, checksum: str) -> bool:
    """Whether a file has its size in the manifest, and its sum where the package for it is
    installed.
    """
    if not os.path.isfile(path) or os.path.getsize(path) != size:
        return False
    try:
        import xxhash  # optional: this file works without it
    except ImportError:
        logger.warning(
            "only the sizes of files are compared with the manifest: install xxhash to compare "
            "their sums"
        )
        return True
    found = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            found.update(chunk)
    return checksum == f"xxh3_128:{found.hexdigest()}"


def atoi(text: str) -> int | str:
    """The number that `text` is; `text` itself if it is none."""
    return int(text) if text.isdigit() else text


def natural_keys(text: str) -> list[int | str]:
    """Sorting key by which "rank_10" comes after "rank_9"."""
    return [atoi(part) for part in re.split(r"(\d+)", text)]


def get_checkpoint_files(checkpoint_dir: str, glob_pattern: str) -> list[str]:
    """Paths of the files in a folder whose names end as `glob_pattern` ("*_optim_states.pt") does,
    in the order of their numbers.

    Raises:
        FileNotFoundError: There are none.
    """
    names = _listing(checkpoint_dir)
    found = [
        os.path.join(checkpoint_dir, name)
        for name in names
        if name.endswith(glob_pattern.removeprefix("*"))
    ]
    if not found:
        raise FileNotFoundError(
            f"can't find {glob_pattern} files in directory '{checkpoint_dir}'; it holds {names}"
        )
    return sorted(found, key=natural_keys)


def get_optim_files(checkpoint_dir: str) -> list[str]:
    """Paths of the optimizer files in a tag's folder."""
    return get_checkpoint_files(checkpoint_dir, "*_optim_states.pt")


def get_model_state_files(checkpoint_dir: str) -> list[str]:
    """Paths of the model files in a tag's folder, one per part of the model (ZeRO-3: per rank)."""
    return get_checkpoint_files(checkpoint_dir, "*_model_states.pt")


def get_model_state_file(checkpoint_dir: str, zero_stage: int) -> str:
    """Path of the first rank's model file.

    Raises:
        FileNotFoundError: It does not exist.
    """
    _listing(checkpoint_dir)
    path = os.path.join(
        checkpoint_dir,
        f"{'zero_pp_rank_0_' if zero_stage == _STAGE3 else ''}mp_rank_00_model_states.pt",
    )
    if not os.path.isfile(path):
        raise FileNotFoundError(f"can't find model states file at '{path}'")
    return path


def _listing(folder: str) -> list[str]:
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"Directory '{folder}' doesn't exist")
    return sorted(os.listdir(folder), key=natural_keys)


def _matching(folder: str, pattern: re.Pattern[str]) -> Iterator[tuple[tuple[int, ...], str]]:
    """(numbers in the name, path) of the files whose names match; a number that is not there is
    0.
    """
    for name in _listing(folder):
        match = pattern.fullmatch(name)
        if match is not None:
            yield tuple(int(number or 0) for number in match.groups()), os.path.join(folder, name)


# Tensors that are still in their files


class LazyTensor:
    """A tensor whose elements are still in mapped files.

    Args:
        pieces: Its elements in order; what the last has beyond them is padding.
        shape: Its shape.

    Attributes:
        dtype: float32 in place of shorter floating-point types; others stay.
    """

    def __init__(self, pieces: Sequence[torch.Tensor], shape: Sequence[int]) -> None:
        # Upstream's masters are saved as requiring a gradient.
        self.pieces = [piece.detach() for piece in pieces]
        self.shape = torch.Size(shape)
        saved = pieces[0].dtype if pieces else torch.float32
        self.dtype = (
            torch.float32
            if saved.is_floating_point and saved.itemsize < torch.float32.itemsize
            else saved
        )

    @property
    def nbytes(self) -> int:
        """Size in memory."""
        return self.shape.numel() * self.dtype.itemsize

    def elements(self) -> list[torch.Tensor]:
        """The pieces, each 1-D, without padding."""
        found, left = [], self.shape.numel()
        for piece in self.pieces:
            found.append(piece.reshape(-1)[:left])
            left -= found[-1].numel()
        return found

    def contiguous(self) -> torch.Tensor:
        """The whole tensor, in memory of its own."""
        whole = torch.empty(self.shape, dtype=self.dtype)
        flat, at = whole.view(-1), 0
        for piece in self.elements():
            flat[at : at + piece.numel()].copy_(piece)
            at += piece.numel()
        if at != flat.numel():
            raise ValueError(f"a tensor of {flat.numel()} elements has only {at} in its files")
        return whole


class GatheredTensor(LazyTensor):
    """A parameter that ZeRO-3 divided over all ranks.

    Args:
        flat_groups: Per rank its 1-D buffers.
        flat_groups_offset: Where each of them starts in the sequence of all; and where the last one
            ends.
        offset: Where every rank's part of the parameter starts in that sequence.
        partitioned_numel: Elements that every rank has, with padding.
        shape: The parameter's shape.
    """

    def __init__(
        self,
        flat_groups: Sequence[Sequence[torch.Tensor]],
        flat_groups_offset: Sequence[int],
        offset: int,
        partitioned_numel: int,
        shape: Sequence[int],
    ) -> None:
        pieces = []
        for buffers in flat_groups:
            for start, buffer in zip(flat_groups_offset, buffers, strict=False):
                first, end = (
                    max(0, offset - start),
                    min(buffer.numel(), offset + partitioned_numel - start),
                )
                if first < end:
                    pieces.append(buffer[first:end])
        super().__init__(pieces, shape)


def to_torch_tensor(
    state_dict: Mapping[str, LazyTensor | torch.Tensor], return_empty_tensor: bool = False
) -> dict[str, torch.Tensor]:
    """Read tensors; names with one value go on sharing it.

    Args:
        state_dict: What `get_fp32_state_dict_from_zero_checkpoint(..., lazy_mode=True)` returns, or
            some of it.
        return_empty_tensor: Reserve memory only, without reading.
    """
    whole: dict[int, torch.Tensor] = {}
    for tensor in state_dict.values():
        if id(tensor) not in whole:
            read = (
                torch.empty(tensor.shape, dtype=tensor.dtype)
                if return_empty_tensor
                else tensor.contiguous()
            )
            whole[id(tensor)] = read
    return {name: whole[id(tensor)] for name, tensor in state_dict.items()}


# Masters of ZeRO 0 to 2


class _Masters:
    """Pieces of fp32 master weights by parameter name, as they are found in the optimizer files of
    one part of the model.
    """

    def __init__(self) -> None:
        self.shapes: dict[str, torch.Size] = {}
        self._pieces: dict[str, list[torch.Tensor]] = {}

    def covered(self, name: str) -> int:
        """How many of a parameter's elements are known."""
        return sum(piece.numel() for piece in self._pieces.get(name, ()))

    def add(self, name: str, shape: torch.Size, piece: torch.Tensor) -> None:
        """Take the next elements of a parameter."""
        self.shapes[name] = shape
        self._pieces.setdefault(name, []).append(piece)

    def tensors(self, folder: str) -> dict[str, LazyTensor]:
        """The parameters.

        Raises:
            ValueError: Elements are missing, or there are too many.
        """
        for name, shape in self.shapes.items():
            if name in self._pieces and self.covered(name) != shape.numel():
                raise ValueError(
                    f"{folder} holds {self.covered(name)} of the {shape.numel()} fp32 elements of "
                    f"{name}"
                )
        return {
            name: LazyTensor(pieces, self.shapes[name]) for name, pieces in self._pieces.items()
        }


def _renumber(name: str, offsets: Mapping[str, int]) -> str:
    """An expert's name, numbered over all ranks: `offsets` has by layer the number of the rank's
    first expert.
    """
    match = _EXPERT_NAME.match(name)
    return name if match is None else f"{match[1]}{int(match[2]) + offsets[match[1]]}{match[3]}"


def _experts_per_rank(names: Iterable[str]) -> dict[str, int]:
    held: dict[str, set[str]] = {}
    for match in filter(None, map(_EXPERT_NAME.match, names)):
        held.setdefault(match[1], set()).add(match[2])
    return {prefix: len(numbers) for prefix, numbers in held.items()}


def _expert_ranks_of(name: str, model: Mapping[str, Any]) -> int:
    """Over how many ranks the rows of a parameter that has one for each expert are spread; 1: each
    has it whole.
    """
    for layer in model.get("ds_autoep_layers") or ():
        if name.startswith(f"{layer['expert_key_prefix']}."):
            return int(layer["ep_size"])
    return 1


def _whole(shape: torch.Size, ranks: int) -> torch.Size:
    return torch.Size((ranks * shape[0], *shape[1:])) if ranks > 1 else shape


def _add_shards(masters: _Masters, files: Mapping[int, str], model: Mapping[str, Any]) -> None:
    """What a ZeRO rank has of a parameter comes after what the ranks before it have; rows of
    experts come in the order of the experts.
    """
    count, shapes = (
        len(files),
        {name: shape for group in model["param_shapes"] for name, shape in group.items()},
    )
    data_first = _comes_data_first(model)
    per_rank = _experts_per_rank(shapes)
    packed = {name: _expert_ranks_of(name, model) for name in shapes}
    rows: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for rank, path in sorted(files.items()):
        state = _read(path)["optimizer_state_dict"]
        shards = state["partition_count"]
        for index, flat in enumerate(state["single_partition_of_fp32_groups"]):
            addresses = _addresses(state, index, model["param_shapes"], masters, flat.numel())
            owners = shards[index] if isinstance(shards, list) else shards
            has_experts = any(_EXPERT_NAME.match(name) or packed[name] > 1 for name in addresses)
            expert_ranks = count // owners if has_experts else 1
            if rank >= count or (addresses and owners * expert_ranks != count):
                raise ValueError(
                    f"{path} is one of {owners} shards, the folder has {count}: some are missing "
                    "or another run's"
                )
            own = rank // owners if data_first else rank % expert_ranks
            offsets = {prefix: held * own for prefix, held in per_rank.items()}
            for name, (start, numel) in addresses.items():
                piece = flat[start : start + numel]
                if packed[name] > 1:
                    rows.setdefault(name, []).append((own, piece))
                else:
                    masters.add(_renumber(name, offsets), shapes[name], piece)
    for name, pieces in rows.items():
        for _, piece in sorted(pieces, key=lambda found: found[0]):
            masters.add(name, _whole(shapes[name], packed[name]), piece)


def _addresses(
    state: Mapping[str, Any],
    index: int,
    shapes: Sequence[Mapping[str, torch.Size]],
    masters: _Masters,
    room: int,
) -> dict[str, tuple[int, int]]:
    """(start, number of elements) of each parameter in a rank's buffer of group `index`; old files
    don't say, but have an order.
    """
    if state.get("param_slice_mappings") is not None:
        return {
            name: (found.start, found.numel)
            for name, found in state["param_slice_mappings"][index].items()
        }
    addresses, at = {}, 0
    for name, shape in shapes[index].items():
        count = min(shape.numel() - masters.covered(name), room - at)
        if count > 0:
            addresses[name] = (at, count)
            at += count
    return addresses


def _add_whole(
    masters: _Masters,
    state: Mapping[str, Any],
    offsets: Mapping[str, int],
    rows: Mapping[str, tuple[int, bool]],
) -> None:
    """Masters of a run without ZeRO; in fp32 it has none, and the names tell which weights are
    trained. `rows`: parameters with a row for each expert, over how many ranks they are spread and
    whether these rows are new.
    """
    flat, separate = state.get("fp32_groups_flat"), state.get("fp32_groups")
    known = set(masters.shapes)
    for index, group in enumerate(state.get("param_shapes") or ()):
        at = 0
        for position, (local, shape) in enumerate(group.items()):
            name, start = _renumber(local, offsets), at
            at += shape.numel()
            ranks, are_new = rows.get(local, (1, name not in known))
            if not are_new:  # several expert ranks hold it
                continue
            masters.shapes[name] = whole = _whole(shape, ranks)
            if flat is not None:
                masters.add(name, whole, flat[index][start:at])
            elif separate is not None:
                masters.add(name, whole, separate[index][position].reshape(-1))


def _add_expert_ranks(
    masters: _Masters, files: Mapping[int, str], model: Mapping[str, Any]
) -> None:
    """Without ZeRO the ranks of different experts keep whole state in files of their own, ordered
    by the largest expert group.
    """
    taken: set[tuple[str, int]] = set()
    for rank, path in sorted(files.items()):
        state = _read(path)["optimizer"]
        sizes, data_first = (
            state.get("expert_group_sizes") or {},
            state.get("use_data_before_expert_parallelism"),
        )
        names = [name for group in state.get("param_shapes") or () for name in group]
        held = _experts_per_rank(names)
        rows = {}
        for name in names:
            ranks = _expert_ranks_of(name, model)
            if ranks > 1:
                place = (name, rank * ranks // len(files) if data_first else rank % ranks)
                rows[name] = (ranks, place not in taken)
                taken.add(place)
        own = {
            prefix: rank * size // len(files) if data_first else rank % size
            for prefix, size in sizes.items()
        }
        offsets = {prefix: count * own[prefix] for prefix, count in held.items()}
        _add_whole(masters, state, offsets, rows)


def _masters_of_part(folder: str, part: int, model: Mapping[str, Any]) -> _Masters:
    masters = _Masters()
    shards = {
        rank: path for (rank, of_part), path in _matching(folder, _SHARD_FILE) if of_part == part
    }
    expert_ranks = {
        rank: path
        for (rank, of_part), path in _matching(folder, _EXPERT_OPTIMIZER_FILE)
        if of_part == part
    }
    if shards:
        _add_shards(masters, shards, model)
        missing = [
            name
            for group in model["param_shapes"]
            for name in group
            if name not in masters.shapes and group[name].numel()
        ]
        if missing:
            raise ValueError(f"{folder} holds none of the fp32 elements of {missing[0]}")
    elif model.get("param_shapes"):
        raise FileNotFoundError(
            f"{folder} holds no *_optim_states.pt of model-parallel rank {part}, where its fp32 "
            "weights are"
        )
    elif expert_ranks:
        _add_expert_ranks(masters, expert_ranks, model)
    elif model.get("optimizer") is not None:
        _add_whole(masters, model["optimizer"], {}, {})
    return masters


# Weights of ZeRO 0 to 2


def _models(folder: str) -> dict[int, dict[str, Any]]:
    """Part of the model -> content of its model file."""
    models = {part: _read(path) for (part,), path in _matching(folder, _MODEL_FILE)}
    if not models:
        raise FileNotFoundError(
            f"can't find mp_rank_*_model_states.pt in directory '{folder}'; it holds "
            f"{_listing(folder)}"
        )
    first = next(iter(models.values()))
    parts = int(first.get("mp_world_size") or 1)
    if sorted(models) != list(range(parts)):
        raise ValueError(
            f"{folder} was saved by {parts} model-parallel ranks, but holds the model files of "
            f"ranks {sorted(models)}"
        )
    tensor_size = (first.get("checkpoint_parallel_dimensions") or {}).get("tp_degree", 1)
    slices = max((number for (_, number), _ in _matching(folder, _LAYER_FILE)), default=0) + 1
    if max(tensor_size, slices) > 1 or parts > 1 and first["module"] is not None:
        raise _slices_error(folder)
    return models


def _slices_error(folder: str) -> ValueError:
    return ValueError(
        f"{folder} was saved with tensor parallelism, and only the model knows how its weights are "
        "sliced: convert it with deepspeed.checkpoint.ds_to_universal"
    )


def _weights(
    folder: str,
    models: Mapping[int, Mapping[str, Any]],
    shapes: Mapping[str, torch.Size],
    masters: Mapping[str, LazyTensor],
) -> dict[str, torch.Tensor]:
    """All weights and buffers in the model's own dtype; `shapes` are those of the trained
    parameters.
    """
    found: dict[str, Any] = {}
    for model in models.values():
        found.update(model["module"] or {})
        for name, fragment in (model.get("frozen_param_fragments") or {}).items():
            found.setdefault(name, fragment)
    named = {*shapes, *_buffer_names(models), *found}
    tied: dict[str, Any] = {}
    for (layer, _), path in _matching(folder, _LAYER_FILE):
        content = _read(path)
        prefix = str(layer)
        if content and not any(f"{layer}.{name}" in named for name in content):
            prefix = _tied_module(content, shapes, {**tied, **masters}) or prefix
        values = {f"{prefix}.{name}": value for name, value in content.items()}
        found.update(values)
        tied.update(values)
    for _, path in _matching(folder, _EXPERT_FILE):
        found.update(_read(path))
    skipped = [name for name, value in found.items() if not isinstance(value, torch.Tensor)]
    if skipped:
        logger.warning("left out, because they are no tensors: %s", ", ".join(skipped))
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


def _buffer_names(models: Mapping[int, Mapping[str, Any]]) -> set[str]:
    return {name for model in models.values() for name in model.get("buffer_names") or ()}


def _tied_module(
    content: Mapping[str, Any], shapes: Mapping[str, torch.Size], values: Mapping[str, Any]
) -> str | None:
    """The tied module of a pipeline that a layer's file holds: the one with these names, shapes
    and, where known, values.
    """
    for prefix in dict.fromkeys(
        ".".join(name.split(".")[:2]) for name in shapes if name.startswith("tied_modules.")
    ):
        trained = [
            name.removeprefix(f"{prefix}.") for name in shapes if name.startswith(f"{prefix}.")
        ]
        if all(
            name in content
            and content[name].shape == shapes[full]
            and (
                full not in values
                or torch.equal(values[full].contiguous().to(content[name].dtype), content[name])
            )
            for name, full in ((name, f"{prefix}.{name}") for name in trained)
        ):
            return prefix
    return None


def _tied_names(
    models: Mapping[int, Mapping[str, Any]],
    weights: Mapping[str, torch.Tensor],
    first: Iterable[str],
) -> dict[str, str]:
    """Name -> the name whose value it shares; those of `first` keep their own."""
    ties = {
        name: other
        for model in models.values()
        for name, other in _pairs(model.get("shared_params"))
    }
    owners: dict[Any, str] = {}
    for name in [*(name for name in weights if name in set(first)), *weights]:
        value = weights[name]
        place = (value.data_ptr(), value.dtype, value.shape, value.stride())
        if value.numel() and owners.setdefault(place, name) != name:
            ties.setdefault(name, owners[place])
    return ties


def _pairs(shared: Any) -> list[tuple[str, str]]:
    return list(shared.items() if isinstance(shared, Mapping) else map(tuple, shared or ()))


def _read_below_stage3(folder: str, exclude_frozen: bool) -> dict[str, LazyTensor]:
    """Masters where there are any, else the weights themselves, in the model's order."""
    models = _models(folder)
    shapes: dict[str, torch.Size] = {}
    masters: dict[str, LazyTensor] = {}
    for part, model in models.items():
        of_part = _masters_of_part(folder, part, model)
        shapes = {**of_part.shapes, **shapes}
        # Of several stages with one tied weight the first is taken.
        masters = {**of_part.tensors(folder), **masters}
    weights = _weights(folder, models, shapes, masters)
    if not masters and any(
        value.dtype in (torch.float16, torch.bfloat16) for value in weights.values()
    ):
        logger.warning(
            "%s holds no fp32 weights by name: these are its 16-bit weights, in fp32", folder
        )
    if exclude_frozen and not shapes:
        raise ValueError(
            f"exclude_frozen_parameters: {folder} was saved without ZeRO and does not say what is "
            "trained"
        )
    ties = _tied_names(models, weights, shapes)
    kept = {*shapes, *_buffer_names(models)} if exclude_frozen else {*weights, *shapes}
    state: dict[str, LazyTensor] = {}
    for name in [*weights, *(name for name in masters if name not in weights), *ties]:
        source = ties.get(name, name)
        if source in kept:
            known = state.get(source) or masters.get(source)
            state[name] = (
                known if known is not None else LazyTensor([weights[source]], weights[source].shape)
            )
            state.setdefault(source, state[name])
    return state


# ZeRO-3


@dataclass
class zero_model_state:  # upstream's name
    """What a model file holds beside weights.

    Attributes:
        buffers: By name.
        param_shapes: Per parameter group the shapes of its parameters by name, in the order of the
            shards.
        shared_params: (name, name whose value it shares).
        ds_version: Which release wrote it.
        frozen_param_shapes: By name; None if the file does not say.
        frozen_param_fragments: Values by name; at ZeRO-3 this rank's part of them.
    """

    buffers: dict[str, torch.Tensor]
    param_shapes: list[dict[str, torch.Size]]
    shared_params: list[tuple[str, str]]
    ds_version: Any
    frozen_param_shapes: dict[str, torch.Size] | None
    frozen_param_fragments: dict[str, torch.Tensor] | None


def parse_model_states(files: Sequence[str]) -> list[zero_model_state]:
    """Read model files of ZeRO.

    Raises:
        ValueError: One is damaged, or not a model file of ZeRO.
    """
    states = []
    for path in files:
        saved = _read(path)
        if (
            not isinstance(saved, Mapping)
            or saved.get("param_shapes") is None
            or "buffer_names" not in saved
        ):
            raise ValueError(f"{path} is not a model state checkpoint of ZeRO")
        module = saved["module"] or {}
        states.append(
            zero_model_state(
                buffers={name: module[name] for name in saved["buffer_names"] if name in module},
                param_shapes=saved["param_shapes"],
                shared_params=_pairs(saved.get("shared_params")),
                ds_version=saved.get("ds_version"),
                frozen_param_shapes=saved.get("frozen_param_shapes"),
                frozen_param_fragments=saved.get("frozen_param_fragments"),
            )
        )
    return states


def parse_optim_states(
    files: Sequence[str], ds_checkpoint_dir: str
) -> tuple[int, int, list[list[torch.Tensor]]]:
    """Read optimizer files of ZeRO.

    Args:
        files: Those of all ranks, in order.
        ds_checkpoint_dir: Where they are, for messages.

    Returns:
        The ZeRO stage, the number of ranks, and per rank its fp32 buffers, one per parameter group.

    Raises:
        ValueError: They are not ZeRO's, damaged, or not all.
    """
    states = [_read(path).get("optimizer_state_dict") or {} for path in files]
    key = (
        "fp32_flat_groups" if "fp32_flat_groups" in states[0] else "single_partition_of_fp32_groups"
    )
    for path, state in zip(files, states, strict=True):
        if key not in state:
            raise ValueError(f"{path} is not a zero checkpoint")
    stage = states[0].get("zero_stage", 1)  # BF16_Optimizer divides like stage 1 and doesn't say so
    count = states[0]["partition_count"]
    world_size = max(count) if isinstance(count, list) else count
    if isinstance(count, list) and len(files) % world_size == 0:
        world_size = len(files)  # experts alone are trained, which fewer ranks share
    if world_size != len(files):
        raise ValueError(
            f"expected {world_size} of '*_optim_states.pt' under '{ds_checkpoint_dir}' but found "
            f"{len(files)} files"
        )
    return stage, world_size, [list(state[key]) for state in states]


def zero3_partitioned_param_info(unpartitioned_numel: int, world_size: int) -> tuple[int, int]:
    """Elements of a parameter that each ZeRO-3 rank has, and how many of all of them are
    padding.
    """
    partitioned = -(-unpartitioned_numel // world_size)
    return partitioned, partitioned * world_size - unpartitioned_numel


def _counts_of_groups(folder: str, model: Mapping[str, Any]) -> tuple[list[int], bool]:
    """Over how many ranks each group of parameters is cut: experts over those that hold the same
    ones; and whether these are neighbours.
    """
    saved = _read(get_optim_files(folder)[0])["optimizer_state_dict"]["partition_count"]
    counts = saved if isinstance(saved, list) else [saved] * len(model["param_shapes"])
    return counts, _comes_data_first(model)


def _comes_data_first(model: Mapping[str, Any]) -> bool:
    """Whether ranks with the same experts are neighbours in the run that saved a model file."""
    return bool((model.get("ds_config") or {}).get("use_data_before_expert_parallelism", False))


class _HeldExperts:
    """Which of the experts stand in the files of one rank of ZeRO-3, by the names there.

    Args:
        model: Content of its model file.
        rank: Which rank it is of
        ranks: all that have files.
    """

    def __init__(self, model: Mapping[str, Any], rank: int, ranks: int) -> None:
        self._model, self._rank, self._ranks = model, rank, ranks
        self._held = _experts_per_rank(model["module"] or {})

    def share_and_place(self, name: str) -> tuple[int, int]:
        """Which share of its layer's experts the rank holds, and which of those that hold it the
        rank is.
        """
        match = _EXPERT_NAME.match(name)
        sizes = self._model.get("expert_group_sizes") or {}
        shares = _expert_ranks_of(name, self._model) if match is None else sizes.get(match[1], 1)
        if _comes_data_first(self._model):
            return divmod(self._rank, self._ranks // shares)
        return self._rank % shares, self._rank // shares

    def of_all(self, name: str) -> str:
        """The name with its expert numbered over all ranks."""
        share, _ = self.share_and_place(name)
        return _renumber(name, {prefix: number * share for prefix, number in self._held.items()})


def _frozen_of_stage3(model_files: Sequence[str]) -> dict[str, LazyTensor]:
    """What was not trained, of the model files of all ranks in order: each has an equal part of
    every parameter, and of experts a part of those that it holds, or of their rows.
    """
    shapes: dict[str, torch.Size] = {}
    pieces: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for rank, path in enumerate(model_files):
        model = _read(path)
        held = _HeldExperts(model, rank, len(model_files))
        for local, saved_shape in (model.get("frozen_param_shapes") or {}).items():
            name, rows = held.of_all(local), _expert_ranks_of(local, model)
            share, place = held.share_and_place(local)
            shapes[name] = torch.Size(saved_shape)
            shard = model["frozen_param_fragments"][local].reshape(-1)
            numel = shapes[name].numel() // rows
            first = min(place * shard.numel(), numel)
            start = first + (share * numel if rows > 1 else 0)
            pieces.setdefault(name, []).append((start, shard[: numel - first]))
    return {
        name: LazyTensor([piece for _, piece in sorted(pieces[name], key=_first)], shape)
        for name, shape in shapes.items()
    }


def _first(piece: tuple[int, torch.Tensor]) -> int:
    return piece[0]


def _read_stage3(
    folder: str, model_files: Sequence[str], exclude_frozen: bool
) -> dict[str, LazyTensor]:
    models = parse_model_states(model_files)
    _, world_size, flat_groups = parse_optim_states(get_optim_files(folder), folder)
    if len(models) != world_size:
        raise ValueError(
            f"expected the model files of {world_size} ranks under '{folder}' but found "
            f"{len(models)} files"
        )
    first, content = models[0], _read(model_files[0])
    state: dict[str, LazyTensor] = {}
    for rank, path in enumerate(model_files):
        experts = _HeldExperts(_read(path), rank, world_size)
        for name, value in models[rank].buffers.items():
            state.setdefault(experts.of_all(name), LazyTensor([value], value.shape))
    if not exclude_frozen:
        state |= _frozen_of_stage3(model_files)
    starts = [0, *accumulate(buffer.numel() for buffer in flat_groups[0])]
    counts, data_first = _counts_of_groups(folder, content)
    held = _experts_per_rank(content["module"] or {})
    offset = 0
    for group, count in zip(first.param_shapes, counts, strict=True):
        shares = world_size // count  # different experts
        for name, shape in group.items():
            partitioned, _ = zero3_partitioned_param_info(shape.numel(), count)
            rows: list[torch.Tensor] = []
            for share in range(shares):
                ranks = (
                    range(share * count, (share + 1) * count)
                    if data_first
                    else range(share, world_size, shares)
                )
                own = [flat_groups[rank] for rank in ranks]
                part = GatheredTensor(own, starts, offset, partitioned, shape)
                of_all = _renumber(name, {prefix: size * share for prefix, size in held.items()})
                state[of_all] = part
                rows += part.elements()
            if _expert_ranks_of(name, content) > 1:
                state[name] = LazyTensor(rows, _whole(shape, shares))
            offset += partitioned
    # Buffers may be padded so that ranks communicate in aligned pieces; more than that are elements
    # of another model.
    if not 0 <= starts[-1] - offset < 2 * world_size * len(flat_groups[0]):
        raise ValueError(
            f"{folder}: the shards have {starts[-1]} elements per rank, the parameters {offset}"
        )
    for local, local_source in first.shared_params:
        for share in range(world_size if _EXPERT_NAME.match(local) else 1):
            offsets = {prefix: number * share for prefix, number in held.items()}
            source = _renumber(local_source, offsets)
            if source in state:
                state[_renumber(local, offsets)] = state[source]
    return state


# What scripts call


def _folder_of(checkpoint_dir: str, tag: str | None) -> str:
    latest = os.path.join(checkpoint_dir, "latest")
    if tag is None:
        if not os.path.isfile(latest):
            raise ValueError(
                f"Unable to find 'latest' file at {latest}: give the folder above those of the "
                "tags, or a tag"
            )
        with open(latest) as file:
            tag = file.read().strip()
    folder = os.path.join(checkpoint_dir, str(tag))
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"Directory '{folder}' doesn't exist")
    return folder


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Any]:
    """The weights of a checkpoint in fp32, as one process would have them; tied names share one
    tensor.

    Args:
        checkpoint_dir: Folder with the tags' folders and the `latest` file.
        tag: Which; None: the one that `latest` names.
        exclude_frozen_parameters: Leave out parameters that were not trained.
        lazy_mode: Return objects that read their tensor when `contiguous()` is called, for models
            larger than memory.

    Returns:
        Name -> tensor on the CPU. Buffers that are integers or of higher precision keep their
        dtype.

    Raises:
        FileNotFoundError: There is no such folder, or files are missing.
        ValueError: Files are damaged, of different checkpoints, hold objects that are not data, or
            can't be put together.
    """
    folder = _folder_of(checkpoint_dir, tag)
    _check_manifest(folder)
    stage3 = list(_matching(folder, _ZERO3_MODEL_FILE))
    if any(part for (_, part), _ in stage3):
        raise _slices_error(folder)
    state = (
        _read_stage3(folder, [path for _, path in stage3], exclude_frozen_parameters)
        if stage3
        else None
    )
    state = _read_below_stage3(folder, exclude_frozen_parameters) if state is None else state
    return OrderedDict(state) if lazy_mode else to_torch_tensor(state)


def load_state_dict_from_zero_checkpoint(
    model: torch.nn.Module, checkpoint_dir: str, tag: str | None = None
) -> torch.nn.Module:
    """Give a model, moved to the CPU, the fp32 weights of a checkpoint; names that differ are told
    in a warning.

    Returns:
        The model.

    Raises:
        ValueError: None of its names is in the checkpoint; and as
            `get_fp32_state_dict_from_zero_checkpoint`.
    """
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    own = model.state_dict()
    if own and not own.keys() & state.keys():
        raise ValueError(
            f"{checkpoint_dir} is of another model: it has {[*state][:3]}, this one {[*own][:3]}"
        )
    found = model.cpu().load_state_dict(state, strict=False)
    for names, what in (
        (found.missing_keys, "not in the checkpoint"),
        (found.unexpected_keys, "not in the model"),
    ):
        if names:
            logger.warning("%d names are %s: %s", len(names), what, ", ".join(names[:5]))
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str,
    output_dir: str,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the fp32 weights as `pytorch_model.bin` or `model.safetensors`; several of them and an
    index, if they are large.

    Files appear under their names only when all are written; the index comes last, then those of an
    earlier conversion are removed.

    Args:
        checkpoint_dir: As in `get_fp32_state_dict_from_zero_checkpoint`.
        output_dir: Made if it does not exist.
        max_shard_size: Bytes, or a number and a unit ("500MB", "5GiB"); a larger tensor has a file
            of its own. None: one file.
        safe_serialization: Write safetensors (package `safetensors`), where a tied weight is stored
            once, and the other names are in the metadata.
        tag: Which checkpoint.
        exclude_frozen_parameters: Leave out parameters that were not trained.

    Raises:
        ImportError: `safe_serialization` without that package.
        ValueError: max_shard_size is no size; and as `get_fp32_state_dict_from_zero_checkpoint`.
    """
    stem, suffix = ("model", ".safetensors") if safe_serialization else ("pytorch_model", ".bin")
    write = _safetensors_writer() if safe_serialization else _write_bin
    limit = _parse_size(max_shard_size)
    state = get_fp32_state_dict_from_zero_checkpoint(
        checkpoint_dir, tag, exclude_frozen_parameters, lazy_mode=True
    )
    shards = _plan(state, limit)
    os.makedirs(output_dir, exist_ok=True)
    names = (
        [f"{stem}-{i + 1:05d}-of-{len(shards):05d}{suffix}" for i in range(len(shards))]
        if len(shards) > 1
        else [stem + suffix]
    )
    # A folder of its own: all ranks of a script may convert at once.
    with tempfile.TemporaryDirectory(prefix=".", suffix=".writing", dir=output_dir) as folder:
        weight_map = {}
        for name, shard in zip(names, shards, strict=True):
            logger.info("writing %s", os.path.join(output_dir, name))
            stored = write({key: state[key] for key in shard}, os.path.join(folder, name))
            weight_map.update(dict.fromkeys(stored, name))
        if len(shards) > 1:
            total = sum({id(tensor): tensor.nbytes for tensor in state.values()}.values())
            names.append(f"{stem}{suffix}.index.json")
            with open(os.path.join(folder, names[-1]), "w") as file:
                json.dump(
                    {"metadata": {"total_size": total}, "weight_map": weight_map},
                    file,
                    indent=2,
                    sort_keys=True,
                )
        _publish(
            folder,
            output_dir,
            names,
            re.compile(
                re.escape(stem) + r"(-\d{5}-of-\d{5})?" + re.escape(suffix) + r"(\.index\.json)?"
            ),
        )


def _plan(state: Mapping[str, LazyTensor], limit: float) -> list[list[str]]:
    """The names in each file: in order, tied ones together."""
    shards: list[list[str]] = [[]]
    place: dict[int, list[str]] = {}
    size = 0
    for name, tensor in state.items():
        if id(tensor) not in place:
            if shards[-1] and size + tensor.nbytes > limit:
                shards.append([])
                size = 0
            size += tensor.nbytes
            place[id(tensor)] = shards[-1]
        place[id(tensor)].append(name)
    return shards


def _parse_size(size: str | int | None) -> float:
    if size is None:
        return float("inf")
    match = re.fullmatch(r"\s*(\d+)\s*(?:([KMGT])(I?)B|B)?\s*", str(size).upper())
    if match is None or int(match[1]) == 0 or isinstance(size, bool):
        raise ValueError(
            f"max_shard_size: {size!r} is no size; give bytes, or a number and a unit, like 500MB "
            "or 5GiB"
        )
    power = " KMGT".index(match[2] or " ")
    return int(match[1]) * float(1024 if match[3] else 1000) ** power


def _write_bin(state: Mapping[str, LazyTensor], path: str) -> list[str]:
    torch.save(to_torch_tensor(state), path)
    gc.collect()  # torch 2.6 leaves what it has saved in a circle, so files would pile up in memory
    return list(state)


def _safetensors_writer() -> Callable[[Mapping[str, LazyTensor], str], list[str]]:
    try:
        from safetensors.torch import save_file  # optional: this format only
    except ImportError as error:
        raise ImportError(
            "safe_serialization needs the package safetensors: pip install safetensors, or leave "
            "it out"
        ) from error

    def write(state: Mapping[str, LazyTensor], path: str) -> list[str]:
        first: dict[int, str] = {}
        ties = {
            name: first[id(tensor)]
            for name, tensor in state.items()
            if first.setdefault(id(tensor), name) != name
        }
        save_file(
            to_torch_tensor({name: state[name] for name in first.values()}),
            path,
            metadata={"format": "pt", **ties},
        )
        return list(first.values())

    return write


def _publish(folder: str, output_dir: str, names: Sequence[str], own: re.Pattern[str]) -> None:
    """Flush the files of a folder to disk, move them to where they belong, and remove others of the
    same kind there.
    """
    for name in names:
        with open(os.path.join(folder, name), "rb+") as file:
            os.fsync(file.fileno())
    for name in names:
        os.replace(os.path.join(folder, name), os.path.join(output_dir, name))
    for name in os.listdir(output_dir):
        if own.fullmatch(name) and name not in names:
            with contextlib.suppress(FileNotFoundError):
                os.remove(os.path.join(output_dir, name))


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="zero_to_fp32.py", description="Write the fp32 weights of a checkpoint."
    )
    parser.add_argument(
        "checkpoint_dir", help="folder with the tags' folders and the `latest` file"
    )
    parser.add_argument("output_dir", help="folder for pytorch_model*.bin or model*.safetensors")
    parser.add_argument(
        "--max_shard_size", default="5GB", help="largest size of one file, like 500MB or 5GiB"
    )
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument(
        "-t", "--tag", help="which checkpoint; the one that `latest` names if not given"
    )
    parser.add_argument(
        "--exclude_frozen_parameters",
        action="store_true",
        help="leave out parameters that were not trained",
    )
    parser.add_argument(
        "-d", "--debug", action="store_true", help="tell with a traceback what went wrong"
    )
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        convert_zero_checkpoint_to_fp32_state_dict(
            options.checkpoint_dir,
            options.output_dir,
            max_shard_size=options.max_shard_size,
            safe_serialization=options.safe_serialization,
            tag=options.tag,
            exclude_frozen_parameters=options.exclude_frozen_parameters,
        )
    except (ValueError, OSError, ImportError) as error:
        if options.debug:
            raise
        parser.exit(1, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()

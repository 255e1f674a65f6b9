#!/usr/bin/env python
"""The fp32 weights of a checkpoint folder, put together without the run that wrote it: as functions
and as a command.

    python zero_to_fp32.py CHECKPOINT_DIR OUTPUT_DIR [--safe_serialization] [--max_shard_size 5GB]

Saving leaves this file beside the checkpoints, together with the modules of the package that it
reads by, as one program that needs torch alone (and uses safetensors and xxhash where they are
installed). It reads ZeRO 0 to 3, pipelines and experts. Shards are mapped, so memory holds one
output file at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import gc
import json
import logging
import os
import re
import shutil
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint import file_names
from deepspeed.checkpoint.experts import expert_number, expert_prefix, renumbered
from deepspeed.checkpoint.files import (
    CheckpointError,
    lead_model_file,
    load_data,
    read_by,
    read_file,
)
from deepspeed.checkpoint.resharding.cuts import (
    ParallelDegrees,
    data_ranks,
    zero3_partitioned_param_info,
)
from deepspeed.checkpoint.resharding.saved_optimizer import FP32
from deepspeed.checkpoint.resharding.saved_weights import SavedRank, tied_names
from deepspeed.utils.exceptions import disk_error

__all__ = ["zero3_partitioned_param_info"]

logger = logging.getLogger("zero_to_fp32")


# Reading files


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    """Map files of torch's format, and raise what a program without the package has a name for."""
    with read_by(_load_mapped):
        try:
            yield
        except CheckpointError as error:
            raise ValueError(str(error)) from error


def _load_mapped(path: str, map_location: str) -> Any:
    content = load_data(path, map_location, mmap=True)
    if isinstance(content, dict) and keys.DCP_FOLDER in content:
        raise CheckpointError(
            f"{path} keeps its tensors in {content[keys.DCP_FOLDER]}, in the format of "
            "torch.distributed.checkpoint, which is not read here: convert the folder with "
            "deepspeed.checkpoint.ds_to_universal, or save with another checkpoint.writer than "
            '"dcp"'
        )
    if file_names.is_stage3_model_file(os.path.basename(path)):
        names = filter(file_names.is_stage3_model_file, os.listdir(os.path.dirname(path)))
        content.setdefault(keys.DP_WORLD_SIZE, sum(1 for _ in names))
    return content


def _read(path: str) -> Any:
    """The content of a file; nothing but data is unpickled."""
    if not os.path.isfile(path):
        raise FileNotFoundError(f"can't find '{path}'")
    with _reading():
        return read_file(path)


def _check_manifest(folder: str) -> None:
    """Compare the files with the folder's `manifest.json`, if it has one; upstream's have none.

    Raises:
        ValueError: A file that is read here is missing or not the one that was saved.
    """
    path = os.path.join(folder, file_names.MANIFEST)
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
        is_read = file_names.is_layer_or_expert_file(name) or name.endswith(
            (keys.MODEL_FILE_SUFFIX, keys.OPTIM_FILE_SUFFIX)
        )
        if is_read and not _is_saved_file(file_path, *record):
            raise ValueError(
                f"{file_path} is not the file that was saved: the size and checksum in {path} are "
                "others"
            )


def _is_saved_file(path: str, size: int, checksum: str) -> bool:
    """Whether a file has its size in the manifest, and its sum where that can be computed."""
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
    suffix = glob_pattern.removeprefix("*")
    found = [os.path.join(checkpoint_dir, name) for name in names if name.endswith(suffix)]
    if not found:
        raise FileNotFoundError(
            f"can't find {glob_pattern} files in directory '{checkpoint_dir}'; it holds {names}"
        )
    return sorted(found, key=natural_keys)


def get_optim_files(checkpoint_dir: str) -> list[str]:
    """Paths of the optimizer files in a tag's folder."""
    return get_checkpoint_files(checkpoint_dir, f"*{keys.OPTIM_FILE_SUFFIX}")


def get_model_state_files(checkpoint_dir: str) -> list[str]:
    """Paths of the model files in a tag's folder, one per part of the model (ZeRO-3: per rank)."""
    return get_checkpoint_files(checkpoint_dir, f"*{keys.MODEL_FILE_SUFFIX}")


def get_model_state_file(checkpoint_dir: str, zero_stage: int) -> str:
    """Path of the first rank's model file.

    Raises:
        FileNotFoundError: It does not exist.
    """
    _listing(checkpoint_dir)
    name = file_names.stage3_model_file(0, 0) if zero_stage == 3 else file_names.model_file(0)
    path = os.path.join(checkpoint_dir, name)
    if not os.path.isfile(path):
        raise FileNotFoundError(f"can't find model states file at '{path}'")
    return path


def _listing(folder: str) -> list[str]:
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"Directory '{folder}' doesn't exist")
    return sorted(os.listdir(folder), key=natural_keys)


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
        self.dtype = pieces[0].dtype if pieces else torch.float32
        if self.dtype.is_floating_point and self.dtype.itemsize < torch.float32.itemsize:
            self.dtype = torch.float32

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
                first = max(0, offset - start)
                end = min(buffer.numel(), offset + partitioned_numel - start)
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
        if id(tensor) not in whole and return_empty_tensor:
            whole[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype)
        elif id(tensor) not in whole:
            whole[id(tensor)] = tensor.contiguous()
    return {name: whole[id(tensor)] for name, tensor in state_dict.items()}


# Weights of a folder


def _read_folder(folder: str, exclude_frozen: bool) -> dict[str, LazyTensor]:
    """Masters where there are any, else the weights themselves, in the model's order."""
    _check_ranks(folder)
    saved = SavedRank(folder, 0, masters_only=True)
    local = {saved.local(name) for name in saved.fragments}
    for name, shape in saved.shapes.items():
        if shape.numel() and name not in local:
            raise ValueError(
                f"{folder} holds none of the fp32 elements of {name}: *_optim_states.pt are "
                "missing, or another run's"
            )
    if exclude_frozen and not saved.shapes:
        raise ValueError(
            f"exclude_frozen_parameters: {folder} was saved without ZeRO and does not say what is "
            "trained"
        )
    places = {name: place for place, name in enumerate(saved.shapes)}
    tensors = {
        name: LazyTensor(saved.pieces(name, FP32), saved.shape(name))
        for name in sorted(saved.fragments, key=lambda name: places[saved.local(name)])
        if FP32 in saved.fragments[name][0].values
    }
    weights = _weights(folder, saved, tensors)
    dtypes = {value.dtype for value in weights.values()}
    if not tensors and dtypes & {torch.float16, torch.bfloat16}:
        text = "%s holds no fp32 weights by name: these are its 16-bit weights, in fp32"
        logger.warning(text, folder)
    for name, value in weights.items():
        tensors.setdefault(name, LazyTensor([value], value.shape))
    for name, shards in saved.weights.frozen.items():
        tensors[name] = LazyTensor([piece.values for piece in shards.pieces], shards.shape)
    for name, shape in saved.shapes.items():
        if not shape.numel():
            tensors.setdefault(name, LazyTensor([], shape))
    ties = _ties(saved, weights, list(tensors))
    state: dict[str, LazyTensor] = {}
    for name in dict.fromkeys([*weights, *saved.weights.frozen, *tensors, *ties]):
        source = ties.get(name, name)
        is_frozen = saved.local(source) not in saved.shapes and not saved.weights.is_buffer(source)
        if source in tensors and not (exclude_frozen and is_frozen):
            state[name] = tensors[source]
    return state


def _check_ranks(folder: str) -> None:
    """Raise if model files are missing, or weights are slices."""
    listing = _listing(folder)
    found = [name for name in listing if file_names.is_model_file(name)]
    of_stage3 = [name for name in listing if file_names.is_stage3_model_file(name)]
    if not found and not of_stage3:
        raise FileNotFoundError(
            f"can't find mp_rank_*_model_states.pt in directory '{folder}'; it holds {listing}"
        )
    first = read_file(lead_model_file(folder) if of_stage3 else os.path.join(folder, found[0]))
    degrees = ParallelDegrees.of_file(first)
    if not of_stage3 and found != [file_names.model_file(part) for part in range(degrees.parts)]:
        raise ValueError(
            f"{folder} was saved by {degrees.parts} model-parallel ranks, but holds the model "
            f"files {found}"
        )
    layers = filter(None, map(file_names.parse_layer_file, listing))
    slices = {0, *(layer.tensor_parallel_rank for layer in layers)}
    if degrees.tensor > 1 or len(slices) > 1:
        raise ValueError(
            f"{folder} was saved with tensor parallelism, and only the model knows how its weights "
            "are sliced: convert it with deepspeed.checkpoint.ds_to_universal"
        )
    if of_stage3 and len(of_stage3) != data_ranks(first, folder):
        raise ValueError(
            f"expected the model files of {data_ranks(first, folder)} ranks under '{folder}' but "
            f"found {len(of_stage3)} files"
        )


def _weights(
    folder: str, saved: SavedRank, masters: Mapping[str, LazyTensor]
) -> dict[str, torch.Tensor]:
    """Weights and buffers in the model's own dtype; what the file of a tied layer of a pipeline
    holds has the names of the tied module.
    """
    weights = saved.weights
    if weights.extra:
        logger.warning("left out, because they are no tensors: %s", ", ".join(weights.extra))
    renamed: dict[str, str] = {}
    tied: dict[str, LazyTensor] = {}
    for file in filter(None, map(file_names.parse_layer_file, _listing(folder))):
        prefix = f"{file.layer}."
        content = {
            name.removeprefix(prefix): value
            for name, value in weights.values.items()
            if name.startswith(prefix)
        }
        if any(
            prefix + name in saved.fragments or weights.is_buffer(prefix + name) for name in content
        ):
            continue
        module = _tied_module(content, saved, {**tied, **masters}) if content else None
        for name, value in content.items() if module is not None else ():
            renamed[prefix + name] = f"{module}.{name}"
            tied[f"{module}.{name}"] = LazyTensor([value], value.shape)
    return {renamed.get(name, name): value for name, value in weights.values.items()}


def _tied_module(
    content: Mapping[str, torch.Tensor], saved: SavedRank, values: Mapping[str, LazyTensor]
) -> str | None:
    """A pipeline's tied module in a layer's file: with these names, shapes and known values."""
    trained = [name for name in saved.fragments if name.startswith("tied_modules.")]
    for prefix in dict.fromkeys(".".join(name.split(".")[:2]) for name in trained):
        start = f"{prefix}."
        own = {one.removeprefix(start): one for one in trained if one.startswith(start)}
        if all(
            name in content
            and content[name].shape == saved.shape(full)
            and (
                full not in values
                or torch.equal(values[full].contiguous().to(content[name].dtype), content[name])
            )
            for name, full in own.items()
        ):
            return prefix
    return None


def _ties(
    saved: SavedRank, weights: Mapping[str, torch.Tensor], names: Sequence[str]
) -> dict[str, str]:
    """Name -> the name of `names` whose value it shares, as model files say, or because both are
    one tensor in their files; trained ones keep their own.
    """
    listed: dict[str, list[str]] = {}
    for model in saved.weights.models:
        for tied, source in tied_names(model).items():
            listed.setdefault(source, []).append(tied)
    ties: dict[str, str] = {}
    for name in names:
        local = saved.local(name)
        for tied in listed.get(local, ()):
            moved = (expert_number(name) or 0) - (expert_number(local) or 0)
            ties[renumbered(tied, {expert_prefix(tied) or "": moved})] = name
    owners: dict[Any, str] = {}
    for name in sorted(weights, key=lambda name: name not in saved.fragments):
        value = weights[name]
        place = (value.data_ptr(), value.dtype, value.shape, value.stride())
        if value.numel() and owners.setdefault(place, name) != name:
            ties.setdefault(name, owners[place])
    return ties


# Upstream's functions for files of ZeRO


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
        of_zero = isinstance(saved, Mapping) and saved.get("param_shapes") is not None
        if not of_zero or "buffer_names" not in saved:
            raise ValueError(f"{path} is not a model state checkpoint of ZeRO")
        module = saved["module"] or {}
        states.append(
            zero_model_state(
                buffers={name: module[name] for name in saved["buffer_names"] if name in module},
                param_shapes=saved["param_shapes"],
                shared_params=list(tied_names(saved).items()),
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
    of_stage3 = keys.FP32_FLAT_GROUPS in states[0]
    key = keys.FP32_FLAT_GROUPS if of_stage3 else keys.SINGLE_PARTITION_OF_FP32_GROUPS
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
    with _reading():
        state = _read_folder(folder, exclude_frozen_parameters)
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
        OSError: The disk is full, among others.
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
    count = len(shards)
    names = [f"{stem}-{i + 1:05d}-of-{count:05d}{suffix}" for i in range(count)]
    if count == 1:
        names = [stem + suffix]
    # A folder of its own: all ranks of a script may convert at once.
    with tempfile.TemporaryDirectory(prefix=".", suffix=".writing", dir=output_dir) as folder:
        weight_map = {}
        for name, shard in zip(names, shards, strict=True):
            logger.info("writing %s", os.path.join(output_dir, name))
            sizes = {id(state[key]): state[key].nbytes for key in shard}
            with _disk_named(folder, name, sum(sizes.values())):
                stored = write({key: state[key] for key in shard}, os.path.join(folder, name))
            weight_map.update(dict.fromkeys(stored, name))
        if count > 1:
            total = sum({id(tensor): tensor.nbytes for tensor in state.values()}.values())
            names.append(f"{stem}{suffix}.index.json")
            with open(os.path.join(folder, names[-1]), "w") as file:
                index = {"metadata": {"total_size": total}, "weight_map": weight_map}
                json.dump(index, file, indent=2, sort_keys=True)
        own = re.escape(stem) + r"(-\d{5}-of-\d{5})?" + re.escape(suffix) + r"(\.index\.json)?"
        _publish(folder, output_dir, names, re.compile(own))


@contextlib.contextmanager
def _disk_named(folder: str, name: str, size: int) -> Iterator[None]:
    """Say so if writing fails of a full disk: torch and safetensors raise what names neither."""
    # Asked before: what is written in part takes room too, whatever it fails of.
    fits = shutil.disk_usage(folder).free >= size
    try:
        yield
    except Exception as error:
        if fits:
            raise
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise disk_error(full, os.path.join(folder, name), size) from error


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
        stored = to_torch_tensor({name: state[name] for name in first.values()})
        save_file(stored, path, metadata={"format": "pt", **ties})
        return list(first.values())

    return write


def _publish(folder: str, output_dir: str, names: Sequence[str], own: re.Pattern[str]) -> None:
    """Flush a folder's files to disk, move them where they belong, remove others of their kind."""
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
    parser.add_argument("checkpoint_dir", help="folder of the tags' folders and the `latest` file")
    parser.add_argument("output_dir", help="folder for pytorch_model*.bin or model*.safetensors")
    parser.add_argument(
        "--max_shard_size", default="5GB", help="largest size of one file, like 500MB or 5GiB"
    )
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("-t", "--tag", help="which checkpoint; the one `latest` names if not given")
    parser.add_argument(
        "--exclude_frozen_parameters",
        action="store_true",
        help="leave out parameters that were not trained",
    )
    parser.add_argument(
        "-d", "--debug", action="store_true", help="tell with a traceback what went wrong"
    )
    options = vars(parser.parse_args(arguments))
    debug = options.pop("debug")
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        convert_zero_checkpoint_to_fp32_state_dict(**options)
    except (ValueError, OSError, ImportError) as error:
        if debug:
            raise
        parser.exit(1, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()

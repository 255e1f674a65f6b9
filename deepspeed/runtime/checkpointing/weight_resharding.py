"""Weights of a checkpoint that other ranks or stages have saved: this rank's slices of consolidated
parameters, and its shards at stage 3, of which no parameter stands whole on any host. Reading and
loading are apart, so that every rank can check everything before any changes a weight.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint import file_names
from deepspeed.checkpoint.experts import expert_prefix, renumbered, without_experts
from deepspeed.checkpoint.files import (
    CheckpointError,
    has_weights_in_shards,
    lead_model_file,
    read_file,
)
from deepspeed.checkpoint.resharding.consolidation import (
    ConsolidatedCheckpoint,
    ConsolidatedParameters,
)
from deepspeed.checkpoint.resharding.cuts import ParallelDegrees
from deepspeed.checkpoint.resharding.rank_slices import RankSlices
from deepspeed.checkpoint.resharding.saved_weights import (
    SavedWeights,
    WeightPiece,
    saved_state,
    tied_names,
    weight_pieces,
)
from deepspeed.checkpoint.resharding.universal import UniversalCheckpoint
from deepspeed.comm.parallel_map import Axis
from deepspeed.moe.expert_rows import first_element, whole_shape
from deepspeed.runtime.checkpointing.model_files import ModelExperts, ModelFiles, ReadWeights
from deepspeed.runtime.optimizers.step_sequence import StepSequence
from deepspeed.runtime.sharding.fragments import Fragment
from deepspeed.runtime.sharding.model_slices import slices_of
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.parameters.zero_parameter import is_zero_param, record_of
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.utils.tensor_fragment import logical_shape


def slices_of_this_rank(
    module: nn.Module, tensor: Axis, folder: str, model: Mapping[str, Any], universal: bool
) -> RankSlices | None:
    """This rank's share of whole parameters; None where files can be read as they are."""
    saved, own = ParallelDegrees.of_file(model).tensor, tensor.size
    if saved == own and not universal:
        return None
    # Slices are put together as the checkpoint says; how whole parameters are sliced a model that
    # the engine has cut knows itself.
    is_known = model.get(keys.UNIVERSAL_CHECKPOINT_INFO) is not None or (
        saved == 1 and slices_of(module) is not None
    )
    if saved != own and not is_known:
        raise CheckpointError(
            f"{folder} was saved with {saved} tensor-parallel ranks, this run has {own}: only the "
            f"model knows how its weights are sliced, and {keys.UNIVERSAL_CHECKPOINT_INFO} is not "
            "in the checkpoint. Run with as many, or save with "
            f"client_state={{{keys.UNIVERSAL_CHECKPOINT_INFO!r}: {{...}}}}"
        )
    parameters: ConsolidatedParameters = (
        UniversalCheckpoint(folder) if universal else ConsolidatedCheckpoint(folder)
    )
    cut = slices_of(module)
    patterns = None if cut is None else cut.patterns
    return RankSlices(parameters, _shapes_of(module), tensor.rank, tensor.size, patterns)


def shards_as_whole(module: nn.Module, tensor: Axis, folder: str) -> RankSlices:
    """The parameters of a stage 3 folder, for a run below it with as many tensor-parallel ranks."""
    own = ConsolidatedCheckpoint(folder, tensor_rank=tensor.rank)
    return RankSlices(own, _shapes_of(module), 0, 1)


def _shapes_of(module: nn.Module) -> dict[str, torch.Size]:
    names = saved_names(module)
    return {names[name]: whole_shape(param) for name, param in module.named_parameters()}


def saved_names(module: nn.Module) -> dict[str, str]:
    """Name of each parameter in the model -> that in files: of tied weights the first."""
    first = ModelExperts(module).first
    names: dict[int, str] = {}
    return {
        name: names.setdefault(id(param), renumbered(name, first))
        for name, param in module.named_parameters(remove_duplicate=False)
    }


def read_sliced_weights(files: ModelFiles, slices: RankSlices, strict: bool | None) -> ReadWeights:
    """The model's weights: parameters rounded from what is whole, the rest from weight files."""
    state: dict[str, Any] = {}
    for name, tensor, value in sliced_values(files, slices):
        state[name] = value.to(tensor.dtype) if isinstance(tensor, torch.Tensor) else value
    if strict is not None:
        files.check(state | foreign_names(files, slices), strict)
    return ReadWeights(state, None)


def sliced_values(files: ModelFiles, slices: RankSlices) -> Iterator[tuple[str, Any, Any]]:
    """Name, what the model has there, and what the checkpoint has."""
    names, own = saved_names(files.module), files.module.state_dict(keep_vars=True)
    of_layers = dict(_in_layers(files, slices)) if files.is_layered else {}
    for name, tensor in own.items():
        value = slices.weight(names[name]) if name in names else None
        if value is None:
            saved = names.get(name) or renumbered(name, files.experts.first)
            value = of_layers.get(id(tensor), slices.parameters.weight(saved))
        if value is not None:
            yield name, tensor, value


def _in_layers(files: ModelFiles, slices: RankSlices) -> Iterator[tuple[int, torch.Tensor]]:
    """What the layers' files have for each tensor of this stage, by identity: a tied weight's file
    has another name for it.
    """
    if slices.is_resliced:
        return
    for layer, state in files.layered.read_state_dir(slices.parameters.folder, strict=False):
        own = layer.state_dict(keep_vars=True)
        yield from ((id(own[name]), value) for name, value in state.items() if name in own)


def foreign_names(files: ModelFiles, slices: RankSlices) -> dict[str, Any]:
    """Parameters not of this model; another stage or expert rank may have them."""
    if files.is_layered or files.experts.layers:
        return {}
    parameters, own = slices.parameters, set(saved_names(files.module).values())
    return {
        name: torch.empty(0)
        for name in parameters.names()
        if name not in own and len(parameters.slots(name)) > 1  # it is trained
    }


Parts = Mapping[nn.Parameter, torch.Tensor]
"""This rank's elements of parameters, each 1-D without padding, in the dtype that is saved."""


class ShardWeights(NamedTuple):
    """What this rank needs of a checkpoint's weights."""

    rest: Mapping[str, Any]
    parts: Parts


def read_own_model_file(folder: str, group: dist.Group, tensor_rank: int) -> dict[str, Any]:
    """This rank's model file if as many ranks saved the folder, else the first of these slices."""
    rank, world = dist.get_rank(group=group), dist.get_world_size(group=group)
    path = os.path.join(folder, file_names.stage3_model_file(rank, tensor_rank))
    if os.path.isfile(path):
        own: dict[str, Any] = read_file(path)
        if own.get(keys.DP_WORLD_SIZE) == world:
            return own
    path = lead_model_file(folder, tensor_rank)
    lead: dict[str, Any] = read_file(
        path if os.path.isfile(path) else lead_model_file(folder), mmap=True
    )
    return lead


def read_shard_weights(
    files: ModelFiles,
    folder: str,
    model: Mapping[str, Any],
    slices: RankSlices | None,
    wanted: set[nn.Parameter],
    strict: bool,
    tensor_rank: int,
) -> ShardWeights:
    """Read and check this rank's elements of `wanted`; the rest is in the optimizer's state."""
    if slices is not None:
        return _of_slices(files, slices, wanted, strict)
    files.refuse_layers(folder, model)
    in_shards = has_weights_in_shards(folder)
    state = saved_state(model, in_shards)
    if files.experts.layers:
        state = without_experts(state) | _own_experts(files, folder, model)
    files.check(state, strict)
    named = files.module.named_parameters(remove_duplicate=False)
    params = {name for name, param in named if is_zero_param(param)}
    first = tied_names(model) if in_shards else {}
    targets = {
        renumbered(first.get(name, name), files.experts.first): param
        for name, param in files.module.named_parameters()
        if param in wanted and name in state
    }
    group = record_of(next(iter(targets.values()))).group if targets else None
    is_alike = (
        in_shards
        and not files.experts.are_spread
        and not model.get(keys.AUTOEP_LAYERS_KEY)
        and model.get(keys.DP_WORLD_SIZE) == dist.get_world_size(group=group)
    )
    pieces = weight_pieces(
        folder, targets, dist.get_rank(group=group) if is_alike else None, tensor_rank
    )
    rest = {name: value for name, value in state.items() if name not in params}
    return ShardWeights(rest, _take(targets, pieces, folder))


def _own_experts(files: ModelFiles, folder: str, model: Mapping[str, Any]) -> dict[str, Any]:
    """This rank's experts by name, of which other ranks' files may have others."""
    found: dict[str, Any] = {}
    weights = None
    for name, own in files.module.state_dict(keep_vars=True).items():
        if expert_prefix(name) is None:
            continue
        if is_zero_param(own):
            found[name] = torch.empty(logical_shape(own), device="meta")
            continue
        weights = weights or SavedWeights(folder, 0, ParallelDegrees.of_file(model))
        value = weights.get(renumbered(name, files.experts.first))
        if value is not None:
            found[name] = value
    return found


def own_fragment(param: torch.Tensor) -> Fragment:
    """Which elements of a parameter are this rank's, counted over all ranks' rows of experts."""
    own = record_of(param).own
    return own._replace(param_start=first_element(param) + own.param_start)


def _take(
    targets: Mapping[str, nn.Parameter], pieces: Iterable[WeightPiece], folder: str
) -> dict[nn.Parameter, torch.Tensor]:
    """Copy this rank's elements together."""
    parts: dict[nn.Parameter, torch.Tensor] = {}
    found = dict.fromkeys(targets.values(), 0)
    for piece in pieces:
        param = targets[piece.name]
        own = own_fragment(param)
        first = max(own.param_start, piece.start)
        last = min(own.param_start + own.numel, piece.start + piece.values.numel())
        if param not in parts:
            parts[param] = torch.empty(own.numel, dtype=piece.values.dtype)
        if first < last:
            source = piece.values[first - piece.start : last - piece.start]
            parts[param][first - own.param_start : last - own.param_start].copy_(source)
            found[param] += last - first
    for name, param in targets.items():
        if found[param] != own_fragment(param).numel:
            raise CheckpointError(
                f"{folder} has {found[param]} of the {own_fragment(param).numel} elements that "
                f"this rank needs of {name}"
            )
    return parts


def _of_slices(
    files: ModelFiles, slices: RankSlices, wanted: set[nn.Parameter], strict: bool
) -> ShardWeights:
    rest: dict[str, Any] = {}
    seen: dict[str, Any] = {}
    parts: dict[nn.Parameter, torch.Tensor] = {}
    for name, own, value in sliced_values(files, slices):
        if not is_zero_param(own):
            rest[name] = value.to(own.dtype) if isinstance(own, torch.Tensor) else value
            continue
        seen[name] = torch.empty(value.shape, device="meta")
        if own in wanted and own not in parts:
            place = own_fragment(own)
            flat = value.reshape(-1)
            parts[own] = flat[place.param_start : place.param_start + place.numel].clone()
    files.check(rest | seen | foreign_names(files, slices), strict)
    return ShardWeights(rest, parts)


@torch.no_grad()
def load_shard_weights(
    offload: DeepSpeedZeRoOffload,
    sequence: StepSequence | None,
    weights: ShardWeights,
    with_masters: bool,
) -> None:
    """Change shards, and what follows from them, to what was read. All ranks call it."""
    offload.module.load_state_dict(weights.rest, strict=False)
    offload.before_update()
    for param, part in weights.parts.items():
        record_of(param).before_write()
        record_of(param).shard[: part.numel()].copy_(part)
    offload.after_update()
    if isinstance(sequence, DeepSpeedZeroOptimizer_Stage3):
        sequence.refresh_fp32_params()
        if with_masters:
            sequence.set_own_masters(weights.parts)

"""This rank's slices of consolidated parameters: of a universal checkpoint, or of one saved by
another number of tensor-parallel ranks.

Which slice of a parameter is whose is `checkpoint.resharding`'s; here the names and shapes of the
model at hand are put to it. Nothing here communicates or changes the model; who calls it when is
`loading`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint.experts import renumbered
from deepspeed.checkpoint.files import CheckpointError
from deepspeed.checkpoint.parallel_degrees import ParallelDegrees
from deepspeed.checkpoint.resharding.consolidation import (
    ConsolidatedCheckpoint,
    ConsolidatedParameters,
)
from deepspeed.checkpoint.resharding.rank_slices import RankSlices
from deepspeed.checkpoint.resharding.universal import UniversalCheckpoint
from deepspeed.comm.parallel_map import Axis
from deepspeed.moe.expert_rows import whole_shape
from deepspeed.runtime.checkpointing.model_files import ModelExperts, ModelFiles, ReadWeights
from deepspeed.runtime.sharding.model_slices import slices_of


def slices_of_this_rank(
    module: nn.Module, tensor: Axis, folder: str, model: Mapping[str, Any], universal: bool
) -> RankSlices | None:
    """This rank's share of whole parameters; None for a folder whose files can be read as they are.

    Args:
        module: The model.
        tensor: The tensor-parallel ranks.
        folder: The checkpoint.
        model: Content of one of its model files.
        universal: It is to be a universal checkpoint.

    Raises:
        CheckpointError: It is none, or was sliced otherwise and nothing in it says how.
    """
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
    return _slices_of(parameters, module, tensor)


def shards_as_whole(module: nn.Module, tensor: Axis, folder: str) -> RankSlices:
    """The parameters of a folder of stage 3, for a run below it with as many tensor-parallel ranks.

    Raises:
        CheckpointError: A file is missing or damaged.
    """
    own = ConsolidatedCheckpoint(folder, tensor_rank=tensor.rank)
    return RankSlices(own, _shapes_of(module), 0, 1)


def _slices_of(parameters: ConsolidatedParameters, module: nn.Module, tensor: Axis) -> RankSlices:
    own = slices_of(module)
    patterns = None if own is None else own.patterns
    return RankSlices(parameters, _shapes_of(module), tensor.rank, tensor.size, patterns)


def _shapes_of(module: nn.Module) -> dict[str, torch.Size]:
    names = saved_names(module)
    return {names[name]: whole_shape(param) for name, param in module.named_parameters()}


def saved_names(module: nn.Module) -> dict[str, str]:
    """Name of each parameter in the model -> that in files: of tied weights the first, and experts
    numbered over all ranks.
    """
    first = ModelExperts(module).first
    names: dict[int, str] = {}
    return {
        name: names.setdefault(id(param), renumbered(name, first))
        for name, param in module.named_parameters(remove_duplicate=False)
    }


def read_sliced_weights(files: ModelFiles, slices: RankSlices, strict: bool | None) -> ReadWeights:
    """The model's weights: parameters rounded from what is whole, the rest from the files of
    weights.

    Raises:
        CheckpointError: Something is damaged or has another shape, or (`strict`) is missing or of
            another model.
    """
    state: dict[str, Any] = {}
    for name, tensor, value in sliced_values(files, slices):
        state[name] = value.to(tensor.dtype) if isinstance(tensor, torch.Tensor) else value
    if strict is not None:
        files.check(state | foreign_names(files, slices), strict)
    return ReadWeights(state, None)


def sliced_values(files: ModelFiles, slices: RankSlices) -> Iterator[tuple[str, Any, Any]]:
    """Name, what the model has there, and what the checkpoint has: whole parameters in fp32, the
    rest as it is in the files of weights. What is not in the checkpoint is left out.
    """
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
    """Parameters that are not this model's; another stage or expert rank may have them where there
    are any.
    """
    if files.is_layered or files.experts.layers:
        return {}
    parameters, own = slices.parameters, set(saved_names(files.module).values())
    return {
        name: torch.empty(0)
        for name in parameters.names()
        if name not in own and _is_trained(parameters, name)
    }


def _is_trained(parameters: ConsolidatedParameters, name: str) -> bool:
    return len(parameters.slots(name)) > 1

"""Weights of stage 3 in checkpoints, and whole for export.

A rank's model file has no trainable weights: they are the masters in its optimizer file, rounded.
It has buffers, and this rank's shards of frozen parameters. Files are those of as many ranks as
saved them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint import file_names
from deepspeed.checkpoint.files import CheckpointError
from deepspeed.runtime.zero.gathered_parameters import hold_whole, let_go
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.zero_parameter import is_zero_param


def placeholders(state: dict[str, Any], module: nn.Module) -> dict[str, Any]:
    """A state dict in which parameters are empty, whether they are whole at the moment or not."""
    sharded = set(_sharded_names(module))
    return {name: value.new_empty(0) if name in sharded else value for name, value in state.items()}


def without_parameters(state: Mapping[str, Any], module: nn.Module) -> dict[str, Any]:
    """What of a state dict is not of parameters."""
    sharded = set(_sharded_names(module))
    return {name: value for name, value in state.items() if name not in sharded}


def _sharded_names(module: nn.Module) -> Iterator[str]:
    for name, param in module.named_parameters(remove_duplicate=False):
        if is_zero_param(param):
            yield name


def own_model_file(folder: str, group: dist.Group, part: int) -> str:
    """Path of the model file of this rank.

    Raises:
        CheckpointError: It is no folder of stage 3, or was saved by another number of ranks.
    """
    rank, world = dist.get_rank(group=group), dist.get_world_size(group=group)
    path = os.path.join(folder, file_names.stage3_model_file(rank, part))
    beyond = os.path.join(folder, file_names.stage3_model_file(world, part))
    if os.path.isfile(os.path.join(folder, file_names.model_file(part))):
        raise CheckpointError(
            f"{folder} was saved below ZeRO stage 3, which this release does not load into stage "
            "3. Load it at its stage, or make its weights whole with zero_to_fp32 and load those "
            "into the model before deepspeed.initialize"
        )
    if not os.path.isfile(path) or os.path.isfile(beyond):
        raise CheckpointError(
            f"{folder} was not saved at ZeRO stage 3 by {world} ranks: {os.path.basename(path)} "
            f"{'is missing' if not os.path.isfile(path) else 'is not the last'}. Resume stage 3 "
            "with the number of ranks that saved it, or make its weights whole with zero_to_fp32"
        )
    return path


@torch.no_grad()
def load_frozen(offload: DeepSpeedZeRoOffload, fragments: Mapping[str, torch.Tensor]) -> None:
    """Shards of frozen parameters <- those of the model file."""
    for unit in (*offload.units, *offload.persistent_units):
        for record in unit.records:
            saved = fragments.get(record.name or "")
            if saved is not None:
                record.shard.copy_(saved)
    offload.before_update()
    offload.after_update()


def check_frozen(
    offload: DeepSpeedZeRoOffload, model: Mapping[str, Any], strict: bool
) -> Mapping[str, torch.Tensor]:
    """The shards of frozen parameters in a model file.

    Raises:
        CheckpointError: One is missing (`strict`), or of another size.
    """
    fragments: Mapping[str, torch.Tensor] = model.get(keys.FROZEN_PARAM_FRAGMENTS) or {}
    for unit in (*offload.units, *offload.persistent_units):
        for param, record in zip(unit.params, unit.records, strict=True):
            saved = fragments.get(record.name or "")
            if saved is None and strict and not param.requires_grad:
                raise CheckpointError(
                    f"the checkpoint has no frozen parameter {record.name}; if it was saved "
                    "without them, give load_module_strict=False"
                )
            if saved is not None and saved.numel() != record.shard.numel():
                raise CheckpointError(
                    f"the checkpoint's shard of {record.name} has {saved.numel()} elements, this "
                    f"model's {record.shard.numel()}"
                )
    return fragments


@torch.no_grad()
def consolidated(
    offload: DeepSpeedZeRoOffload, exclude_frozen_parameters: bool
) -> dict[str, Any] | None:
    """The whole state dict in host memory on rank 0, None elsewhere. All ranks call it.

    Gathered unit by unit: a device holds one at a time.
    """
    is_first = dist.get_rank() == 0
    whole: dict[nn.Parameter, torch.Tensor] = {}
    for unit in (*offload.units, *offload.persistent_units):
        chosen = [p for p in unit.params if p.requires_grad or not exclude_frozen_parameters]
        hold_whole(chosen)
        if is_first:
            whole.update((param, param.data.to("cpu", copy=True)) for param in chosen)
        let_go(chosen)
    if not is_first:
        return None
    state = offload.module.state_dict(keep_vars=True)
    return {
        name: whole[value] if is_zero_param(value) else _on_host(value)
        for name, value in state.items()
        if not is_zero_param(value) or value in whole
    }


def _on_host(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value

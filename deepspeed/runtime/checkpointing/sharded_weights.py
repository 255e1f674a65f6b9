"""Weights of stage 3 in checkpoints, and whole for export.

A rank's model file has no trained weights: they are the masters in its optimizer file, rounded. It
has buffers, and this rank's shards of other parameters. Reading is `sharded_loading`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.runtime.zero.gathered_parameters import hold_whole, let_go
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.zero_parameter import is_zero_param


def placeholders(state: dict[str, Any], module: nn.Module) -> dict[str, Any]:
    """A state dict in which parameters are empty, whether they are whole at the moment or not."""
    sharded = set(_sharded_names(module))
    return {name: value.new_empty(0) if name in sharded else value for name, value in state.items()}


def _sharded_names(module: nn.Module) -> Iterator[str]:
    for name, param in module.named_parameters(remove_duplicate=False):
        if is_zero_param(param):
            yield name


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

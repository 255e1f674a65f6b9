"""Weights of stage 3 in checkpoints, and whole for export.

A rank's model file has no trained weights: they are the masters in its optimizer file, rounded. It
has buffers, and this rank's shards of other parameters. Reading is `sharded_loading`'s.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.checkpoint.streamed_file import StreamedFile
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from deepspeed.runtime.zero.gathered_parameters import hold_whole, let_go
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.zero_parameter import is_zero_param
from deepspeed.utils.tensor_fragment import logical_shape


def placeholders(state: dict[str, Any], module: nn.Module) -> dict[str, Any]:
    """A state dict in which parameters are empty, whether they are whole at the moment or not."""
    sharded = set(_sharded_names(module))
    return {name: value.new_empty(0) if name in sharded else value for name, value in state.items()}


def _sharded_names(module: nn.Module) -> Iterator[str]:
    for name, param in module.named_parameters(remove_duplicate=False):
        if is_zero_param(param):
            yield name


@torch.no_grad()
def whole_parameters(
    offload: DeepSpeedZeRoOffload, exclude_frozen_parameters: bool
) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Each parameter with its value, which is there until the next is asked for. All ranks go
    through all of them.

    Gathered unit by unit: of what does not persist a rank holds one unit at a time.
    """
    for unit in (*offload.units, *offload.persistent_units):
        chosen = [p for p in unit.params if p.requires_grad or not exclude_frozen_parameters]
        hold_whole(chosen)
        for param in chosen:
            yield param, param.data
        let_go(chosen)


def consolidated(
    offload: DeepSpeedZeRoOffload, exclude_frozen_parameters: bool
) -> dict[str, Any] | None:
    """The whole state dict in host memory on rank 0, None elsewhere. All ranks call it."""
    is_first = dist.get_rank() == 0
    whole: dict[nn.Parameter, torch.Tensor] = {}
    for param, value in whole_parameters(offload, exclude_frozen_parameters):
        if is_first:
            whole[param] = value.to("cpu", copy=True)
    return _state_with(offload.module, whole) if is_first else None


def save_whole(offload: DeepSpeedZeRoOffload, path: str, exclude_frozen_parameters: bool) -> None:
    """Rank 0 writes the whole state dict to a file, whose folder is made if it is not there,
    parameter by parameter: beside the unit that is gathered its memory holds one parameter. All
    ranks call it.

    Raises:
        OSError: On rank 0, when all parameters have been gathered: others do not wait for it.
    """
    if dist.get_rank() > 0:
        for _ in whole_parameters(offload, exclude_frozen_parameters):
            pass
        return
    # Memory that nobody touches takes no room.
    places = {
        param: torch.empty(logical_shape(param), dtype=param.dtype)
        for unit in (*offload.units, *offload.persistent_units)
        for param in unit.params
        if param.requires_grad or not exclude_frozen_parameters
    }
    values: Iterable[tuple[torch.Tensor, torch.Tensor]] = (
        (places[param], value)
        for param, value in whole_parameters(offload, exclude_frozen_parameters)
    )
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with StreamedFile(path, _state_with(offload.module, places)) as file:
            of_params = {id(place) for place in places.values()}
            for tensor in file.tensors:
                if id(tensor) not in of_params:
                    file.fill(tensor, tensor)
            for place, value in values:
                file.fill(place, value)
            file.finish()
    finally:
        for _ in values:
            pass  # the other ranks are gathering


def _state_with(module: nn.Module, whole: Mapping[nn.Parameter, torch.Tensor]) -> dict[str, Any]:
    """The state dict with these values of parameters, without others, and the rest on the host."""
    state = module.state_dict(keep_vars=True)
    rest = {name: value for name, value in state.items() if not is_zero_param(value)}
    rest = clone_tensors_for_torch_save(rest)
    return {
        name: rest[name] if name in rest else whole[value]
        for name, value in state.items()
        if name in rest or value in whole
    }

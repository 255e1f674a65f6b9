"""Whole weights for export: of the shards of stage 3, and of experts that ranks hold apart, which
are sent one tensor at a time, so no rank holds more than one that is not its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.checkpoint.experts import expert_number, expert_prefix, renumbered
from deepspeed.checkpoint.torch_files import StreamedFile
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from deepspeed.moe.auto_ep import named_spread_experts
from deepspeed.moe.expert_rows import whole_shape
from deepspeed.runtime.checkpointing.model_files import ModelExperts
from deepspeed.runtime.sharding.model_ranks import is_model_parallel_parameter
from deepspeed.runtime.sharding.model_slices import slices_of
from deepspeed.runtime.zero.gathering.gathered_parameters import hold_whole, let_go
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.parameters.zero_parameter import is_zero_param, record_of


def names_of_all(experts: ModelExperts, name: str) -> list[str]:
    """What an entry of this rank's state dict stands for: with experts, one of each rank of its
    group.
    """
    prefix = expert_prefix(name)
    if prefix is None or prefix not in experts.layers:
        return [name]
    held, shares = experts.layers[prefix].num_local_experts, range(experts.group_sizes[prefix])
    return [renumbered(name, {prefix: share * held}) for share in shares]


def values_of_all(experts: ModelExperts, name: str, value: object) -> Iterator[tuple[str, Any]]:
    """Each of `names_of_all` with its value, until the next is asked for. All ranks go through
    all.
    """
    names, prefix = names_of_all(experts, name), expert_prefix(name)
    if len(names) == 1 or prefix is None:
        yield names[0], value
        return
    layer = experts.layers[prefix]
    axis = layer.parallel_map.experts(layer.expert_group_name).expert
    if 0 not in axis.ranks:
        yield names[axis.rank], value
        return
    for share, other in enumerate(names):
        is_own, source = share == axis.rank, dist.get_global_rank(axis.group, share)
        if isinstance(value, torch.Tensor):
            sent = value.detach().contiguous()
            if not is_own:
                sent = torch.empty_like(sent)
            dist.broadcast(sent, src=source, group=axis.group)
            yield other, sent
        else:
            told = [value if is_own else None]
            dist.broadcast_object_list(told, src=source, group=axis.group)
            yield other, told[0]


def in_order(names: Iterable[str]) -> list[str]:
    """The names as a model has them that holds all experts: those of a layer expert by expert."""
    listed, place = list(names), dict[str, int]()
    for name in listed:
        place.setdefault(expert_prefix(name) or name, len(place))

    def key(name: str) -> tuple[int, int]:
        return place[expert_prefix(name) or name], expert_number(name) or 0

    return sorted(listed, key=key)


def state_of_all(experts: ModelExperts, state: Mapping[str, Any], keep: bool) -> dict[str, Any]:
    """A state dict with the experts of all ranks, in host memory, empty where none is to be
    kept.
    """
    found: dict[str, Any] = {}
    first: dict[Any, list[str]] = {}
    for name, value in state.items():
        names = names_of_all(experts, name)
        if len(names) == 1:
            found[name] = value
            continue
        earlier = first.setdefault(_memory(name, value), names)
        if earlier is not names:
            found |= {
                other: found[same] for other, same in zip(names, earlier, strict=True) if keep
            }
            continue
        for other, whole in values_of_all(experts, name, value):
            if keep:
                is_tensor = isinstance(whole, torch.Tensor)
                found[other] = whole.detach().to("cpu", copy=True) if is_tensor else whole
    return {name: found[name] for name in in_order(found)} if keep else {}


def _memory(name: str, value: object) -> Any:
    if not isinstance(value, torch.Tensor) or not value.numel():
        return name
    return value.data_ptr(), value.dtype, value.shape, value.stride()


def placeholders(state: dict[str, Any], module: nn.Module) -> dict[str, Any]:
    """A state dict in which parameters are empty, whether they are whole at the moment or not."""
    sharded = set(_sharded_names(module))
    return {
        # Of which nobody is told that it is saved, as of what a state dict has.
        name: torch.empty(0, dtype=value.dtype, device=value.device) if name in sharded else value
        for name, value in state.items()
    }


def _sharded_names(module: nn.Module) -> Iterator[str]:
    for name, param in module.named_parameters(remove_duplicate=False):
        if is_zero_param(param):
            yield name


@torch.no_grad()
def whole_parameters(
    offload: DeepSpeedZeRoOffload, exclude_frozen_parameters: bool
) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Each parameter with its value, which is there until the next is asked for, experts that are
    spread with the rows of all ranks. All ranks go through all of them.

    Gathered unit by unit: of what does not persist a rank holds one unit at a time. Of a model that
    was cut parameter by parameter: ranks with other slices may have other units. Slices are put
    together by the ranks that share layers with the first one, who writes.
    """
    experts = {
        param: module
        for _, module in named_spread_experts(offload.module)
        for param in module.spread_params.values()
    }
    slices = slices_of(offload.module)
    together = [unit.params for unit in (*offload.units, *offload.persistent_units)]
    if slices is not None:
        known = {param for params in together for param in params}
        together = [[param] for param in offload.module.parameters() if param in known]
        if 0 not in dist.get_all_ranks_from_group(slices.group):
            slices = None
    for params in together:
        chosen = [p for p in params if p.requires_grad or not exclude_frozen_parameters]
        hold_whole(chosen)
        for param in chosen:
            spread = experts.get(param)
            if spread is not None:
                yield param, spread.with_all_rows(param.data)
            elif slices is not None and is_model_parallel_parameter(param):
                yield param, slices.put_together(_name_of(param), param.data)
            else:
                yield param, param.data
        let_go(chosen)


def _shape_in_files(module: nn.Module, param: nn.Parameter) -> torch.Size:
    slices, shape = slices_of(module), whole_shape(param)
    if slices is None or not is_model_parallel_parameter(param):
        return shape
    return slices.whole_shape(_name_of(param), shape)


def _name_of(param: nn.Parameter) -> str:
    name = record_of(param).name
    assert name is not None, "a parameter of an engine has the name that it has in the model"
    return name


def consolidated(
    offload: DeepSpeedZeRoOffload, exclude_frozen_parameters: bool
) -> dict[str, Any] | None:
    """The whole state dict in host memory on rank 0, None elsewhere. All ranks call it."""
    is_first, experts = dist.get_rank() == 0, ModelExperts(offload.module)
    rest = _rest(offload.module, experts, keep=is_first)
    whole: dict[Exported, torch.Tensor] = {}
    for key, value in _exported(offload, experts, exclude_frozen_parameters):
        if is_first:
            whole[key] = value.to("cpu", copy=True)
    return _state_with(offload.module, experts, whole, rest) if is_first else None


def save_whole(offload: DeepSpeedZeRoOffload, path: str, exclude_frozen_parameters: bool) -> None:
    """Rank 0 writes the whole state dict to a file, whose folder is made if it is not there,
    parameter by parameter: beside the unit that is gathered its memory holds one parameter. All
    ranks call it.

    Raises:
        OSError: On rank 0, when all parameters have been gathered: others do not wait for it.
    """
    experts = ModelExperts(offload.module)
    rest = _rest(offload.module, experts, keep=dist.get_rank() == 0)
    if dist.get_rank() > 0:
        for _ in _exported(offload, experts, exclude_frozen_parameters):
            pass
        return
    # Memory that nobody touches takes no room.
    places = {
        (param, number): torch.empty(_shape_in_files(offload.module, param), dtype=param.dtype)
        for unit in (*offload.units, *offload.persistent_units)
        for param in unit.params
        if param.requires_grad or not exclude_frozen_parameters
        for number, _ in enumerate(names_of_all(experts, str(record_of(param).name)))
    }
    values: Iterable[tuple[torch.Tensor, torch.Tensor]] = (
        (places[key], value)
        for key, value in _exported(offload, experts, exclude_frozen_parameters)
    )
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with StreamedFile(path, _state_with(offload.module, experts, places, rest)) as file:
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


Exported = tuple[nn.Parameter, int]
"""A parameter of this rank, and which of the entries of the whole state dict that it stands for:
of an expert there is one for each rank of its group, of what all ranks hold alike there is one.
"""


def _exported(
    offload: DeepSpeedZeRoOffload, experts: ModelExperts, exclude_frozen_parameters: bool
) -> Iterator[tuple[Exported, torch.Tensor]]:
    """`whole_parameters` of the whole model, other ranks' experts too. All ranks go through all."""
    for param, value in whole_parameters(offload, exclude_frozen_parameters):
        values = values_of_all(experts, str(record_of(param).name), value)
        yield from (((param, number), whole) for number, (_, whole) in enumerate(values))


def _rest(module: nn.Module, experts: ModelExperts, keep: bool) -> dict[str, Any]:
    """Return what is not of parameters in shards, on the host. All ranks call it."""
    state = module.state_dict(keep_vars=True)
    rest = {name: value for name, value in state.items() if not is_zero_param(value)}
    kept: dict[str, Any] = clone_tensors_for_torch_save(state_of_all(experts, rest, keep))
    return kept


def _state_with(
    module: nn.Module,
    experts: ModelExperts,
    whole: Mapping[Exported, torch.Tensor],
    rest: Mapping[str, Any],
) -> dict[str, Any]:
    """The state dict with these values of parameters, without others, and the rest."""
    found: dict[str, Any] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        for number, of_all in enumerate(names_of_all(experts, name)):
            if of_all in rest:
                found[of_all] = rest[of_all]
            elif (value, number) in whole:
                found[of_all] = whole[value, number]
    return {name: found[name] for name in in_order(found)}

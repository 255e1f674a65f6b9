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
from deepspeed.checkpoint import file_names
from deepspeed.checkpoint.experts import expert_number, expert_prefix, renumbered
from deepspeed.checkpoint.torch_files import StreamedFile, write_file
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from deepspeed.moe.auto_ep import named_spread_experts, own_rows_only
from deepspeed.moe.expert_rows import whole_shape
from deepspeed.runtime.checkpointing.folders import together
from deepspeed.runtime.checkpointing.model_files import ModelExperts, ModelFiles
from deepspeed.runtime.checkpointing.training_state import TrainingState
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
    """Each of `names_of_all` with its value, until the next is asked for. On all ranks."""
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
    """A state dict with the experts of all ranks, in host memory, empty where not to be kept."""
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
    at_once = [unit.params for unit in (*offload.units, *offload.persistent_units)]
    if slices is not None:
        known = {param for params in at_once for param in params}
        at_once = [[param] for param in offload.module.parameters() if param in known]
        if 0 not in dist.get_all_ranks_from_group(slices.group):
            slices = None
    for params in at_once:
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


def consolidated(state: TrainingState, exclude_frozen_parameters: bool) -> dict[str, Any] | None:
    """The whole state dict on rank 0 (host memory), None elsewhere. All ranks call it."""
    offload = state.parameter_offload
    if offload is None:
        return _held_whole(state, exclude_frozen_parameters)
    is_first, experts = dist.get_rank() == 0, ModelExperts(offload.module)
    rest = _rest(offload.module, experts, keep=is_first)
    whole: dict[Exported, torch.Tensor] = {}
    for key, value in _exported(offload, experts, exclude_frozen_parameters):
        if is_first:
            whole[key] = value.to("cpu", copy=True)
    return _state_with(offload.module, experts, whole, rest) if is_first else None


def _held_whole(state: TrainingState, exclude_frozen_parameters: bool) -> dict[str, Any] | None:
    """The weights on rank 0, in storage of their own, None elsewhere: what the engine, which a
    client may have derived from, gives as its weights. Slices of a model that was cut, and
    experts, of which each rank has some, are gathered tensor by tensor, into host memory.
    """
    is_first, slices = dist.get_rank() == 0, slices_of(state.module)
    files = ModelFiles(state.module)
    files.collect(is_writer=is_first)
    if slices is None and not is_first and not files.experts.layers:
        return None
    with own_rows_only():
        own = state.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
    if files.experts.layers:
        own = state_of_all(files.experts, own, keep=is_first)
    if slices is None and not is_first:
        return None
    if slices is None:
        copies: dict[str, Any] = clone_tensors_for_torch_save(files.with_gathered(own))
        return copies
    put_together: dict[str, Any] = {}
    for name, value in slices.whole(state.module, own):
        if is_first:
            put_together[name] = value.to("cpu")
    if not is_first:
        return None
    rest = clone_tensors_for_torch_save(
        {name: value for name, value in own.items() if name not in put_together}
    )
    return {name: put_together.get(name, rest.get(name)) for name in own}


def save_weights(
    state: TrainingState, save_dir: str, save_filename: str, exclude_frozen_parameters: bool
) -> None:
    """Rank 0 writes the whole state dict to a file, named when complete. All ranks call it.

    Raises:
        CheckpointError: On every rank if it could not be written.
    """
    offload = state.parameter_offload
    temporary = os.path.join(save_dir, file_names.saving(save_filename))
    # Before what a rank may fail at alone: slices are gathered.
    weights = _held_whole(state, exclude_frozen_parameters) if offload is None else None

    def save() -> None:
        is_first = dist.get_rank() == 0
        if offload is not None:
            save_whole(offload, temporary, exclude_frozen_parameters)
        elif is_first:
            os.makedirs(save_dir, exist_ok=True)
            write_file(temporary, weights)
        if is_first:
            os.replace(temporary, os.path.join(save_dir, save_filename))

    together(save, state.device, f"saving {save_filename}")


def save_whole(offload: DeepSpeedZeRoOffload, path: str, exclude_frozen_parameters: bool) -> None:
    """Rank 0 writes the whole state dict to a file, whose folder is made if it is not there,
    parameter by parameter: its memory holds one beside the gathered unit. All ranks call it.

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

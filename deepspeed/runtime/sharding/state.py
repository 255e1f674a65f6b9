"""State of sharded masters and moments in upstream's layout: the keys that ZeRO-1/2 and
BF16_Optimizer files share.

Written and read here is this rank's own shard; state that was sharded otherwise is made into that
by `runtime.checkpointing.optimizer_resharding`.

Masters are saved without padding; moments as the wrapped optimizer holds them (padded), or per
group without padding with `elastic_checkpoint`. `param_slice_mappings` says where each parameter's
fragment lies in this rank's shard.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from deepspeed.checkpoint.constants import (
    BASE_OPTIMIZER_PARAM_GROUPS,
    BASE_OPTIMIZER_STATE,
    BASE_OPTIMIZER_STATE_STEP,
    CLIP_GRAD,
    DS_VERSION,
    GROUP_PADDINGS,
    PARAM_SLICE_MAPPINGS,
    PARTITION_COUNT,
    SINGLE_PARTITION_OF_FP32_GROUPS,
)
from deepspeed.git_version_info import version as __version__
from deepspeed.utils.tensor_fragment import fragment_address

if TYPE_CHECKING:
    from deepspeed.runtime.sharding.group import ShardedGroup
    from deepspeed.runtime.zero.zero_optimizer import ZeROOptimizer


class CheckpointMismatchError(RuntimeError):
    """The saved state does not fit this model, optimizer or world."""


def sharded_state_dict(optimizer: ZeROOptimizer, elastic: bool) -> dict[str, Any]:
    """This rank's part of the state."""
    base = _lean_state(optimizer) if elastic else optimizer.optimizer.state_dict()
    masters = [_without_padding(group, group.master) for group in optimizer.groups]
    state = as_sharded_state(optimizer, base, masters)
    if elastic:
        state[BASE_OPTIMIZER_PARAM_GROUPS] = optimizer.optimizer.state_dict()["param_groups"]
        steps = [state.get("step") for state in optimizer.state.values()]
        state[BASE_OPTIMIZER_STATE_STEP] = next((step for step in steps if step is not None), None)
    return state


def as_sharded_state(
    optimizer: ZeROOptimizer,
    base: dict[str, Any] | list[dict[str, Any]],
    masters: Sequence[torch.Tensor],
) -> dict[str, Any]:
    """Moments and masters as this rank's part of the state.

    Args:
        optimizer: Whose layout it has.
        base: The wrapped optimizer's state dict, or moments per group without padding.
        masters: Of each group, without padding.
    """
    return {
        CLIP_GRAD: optimizer.clip_grad,
        BASE_OPTIMIZER_STATE: base,
        SINGLE_PARTITION_OF_FP32_GROUPS: list(masters),
        GROUP_PADDINGS: optimizer.group_paddings,
        PARTITION_COUNT: optimizer.partition_count,
        DS_VERSION: __version__,
        PARAM_SLICE_MAPPINGS: [_slice_mapping(optimizer, group) for group in optimizer.groups],
    }


def _without_padding(group: ShardedGroup, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach()[: group.table.shard_numel - group.table.shard_padding(group.shard_rank)]


def _slice_mapping(
    optimizer: ZeROOptimizer, group: ShardedGroup
) -> OrderedDict[str, fragment_address]:
    """Where this rank's fragments of the group's parameters lie in its shard."""
    return OrderedDict(
        (
            optimizer.param_names.get(group.params[f.param], str(f.param)),
            fragment_address(numel=f.numel, start=f.shard_start),
        )
        for f in group.table.of_shard(group.shard_rank)
    )


def _lean_state(optimizer: ZeROOptimizer) -> list[dict[str, Any]]:
    lean = []
    for group in optimizer.groups:
        state = optimizer.state.get(group.masters[0], {})
        lean.append({key: _lean_value(group, value) for key, value in state.items()})
    return lean


def _lean_value(group: ShardedGroup, value: Any) -> Any:
    is_moment = (
        isinstance(value, torch.Tensor)
        and value.numel() == group.table.shard_numel
        and value.dim() > 0
    )
    return _without_padding(group, value) if is_moment else value


def check_fits(optimizer: ZeROOptimizer, saved: Mapping[str, Any]) -> None:
    """Raise unless `saved` is a part that this rank could have saved.

    Raises:
        CheckpointMismatchError: Naming what differs. Nothing was changed.
    """
    counts = list(saved[PARTITION_COUNT])
    if counts != optimizer.partition_count:
        raise CheckpointMismatchError(
            f"the checkpoint's parameter groups are divided into {counts} shards, this run's into "
            f"{optimizer.partition_count}"
        )
    for index, (group, master) in enumerate(
        zip(optimizer.groups, saved[SINGLE_PARTITION_OF_FP32_GROUPS], strict=True)
    ):
        expected = _without_padding(group, group.master).numel()
        if master.numel() != expected:
            raise CheckpointMismatchError(
                f"parameter group {index}: the checkpoint's shard holds {master.numel()} elements, "
                f"this model's {expected}"
            )
    for index, group in enumerate(
        optimizer.groups if saved.get(PARAM_SLICE_MAPPINGS) is not None else []
    ):
        here = {name: (a.numel, a.start) for name, a in _slice_mapping(optimizer, group).items()}
        there = {name: (a.numel, a.start) for name, a in saved[PARAM_SLICE_MAPPINGS][index].items()}
        if here != there:
            differing = sorted(set(here.items()) ^ set(there.items()))
            raise CheckpointMismatchError(
                f"parameter group {index}: other parameters or another order, e.g. "
                f"{differing[0][0]}"
            )


@torch.no_grad()
def load_sharded_state(
    optimizer: ZeROOptimizer,
    saved: dict[str, Any],
    load_optimizer_states: bool,
    load_from_fp32_weights: bool,
) -> None:
    """Restore masters and moments of this rank.

    Raises:
        CheckpointMismatchError: Before anything is changed.
    """
    check_fits(optimizer, saved)
    if load_optimizer_states:
        _load_moments(optimizer, saved)
    if load_from_fp32_weights:
        for group, master in zip(
            optimizer.groups, saved[SINGLE_PARTITION_OF_FP32_GROUPS], strict=True
        ):
            _without_padding(group, group.master).copy_(master)
    else:
        optimizer.refresh_fp32_params()


def load_in_place(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """`optimizer.load_state_dict(state)` that keeps the dictionaries of its groups.

    torch makes new ones. A schedule over another optimizer that shares these groups (a client
    replaced its optimizer by one of ours for offload) would from then on set the learning rate
    where nobody reads it.
    """
    groups = list(optimizer.param_groups)
    optimizer.load_state_dict(state)
    for group, loaded in zip(groups, optimizer.param_groups, strict=True):
        if group is not loaded:
            group.clear()
            group.update(loaded)
    optimizer.param_groups = groups


def _load_moments(optimizer: ZeROOptimizer, saved: dict[str, Any]) -> None:
    base = saved[BASE_OPTIMIZER_STATE]
    if isinstance(base, dict):
        load_in_place(optimizer.optimizer, base)
        return
    for param_group, kept in zip(
        optimizer.param_groups, saved.get(BASE_OPTIMIZER_PARAM_GROUPS, ()), strict=False
    ):
        param_group.update({key: value for key, value in kept.items() if key != "params"})
    for group, lean in zip(optimizer.groups, base, strict=True):
        if not lean:
            continue
        state = optimizer.state[group.masters[0]]
        for key, value in lean.items():
            state[key] = _padded_value(group, value)


def _padded_value(group: ShardedGroup, value: Any) -> Any:
    lean_numel = group.table.shard_numel - group.table.shard_padding(group.shard_rank)
    if not (isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == lean_numel):
        return value
    padded = torch.zeros(group.table.shard_numel, dtype=value.dtype, device=group.master.device)
    padded[:lean_numel].copy_(value)
    return padded

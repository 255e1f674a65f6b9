"""Expert parameters, and optimizer groups that hold them only: those with `moe: True` and `name:
"ep_size_N"` are reduced and sharded over the expert-data group of that name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from deepspeed.moe.layer import MoE

ParamGroup = dict[str, Any]
DENSE_GROUP_NAME = "dense-params"


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Tell whether a model has MoE layers, and the number of experts of the first (0 without)."""
    layers = named_moe_layers(m)
    return bool(layers), layers[0][1].num_experts if layers else 0


def named_moe_layers(model: nn.Module) -> list[tuple[str, MoE]]:
    """List the MoE layers, in the order that numbers them in checkpoint files."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, MoE)]


def is_moe_param(param: torch.Tensor) -> bool:
    """Whether a parameter is an expert's."""
    return not getattr(param, "allreduce", True)


def is_moe_param_group(param_group: ParamGroup) -> bool:
    """Whether an optimizer group holds experts."""
    return bool(param_group.get("moe", False))


def split_params_into_shared_and_expert_params(
    params: Iterable[nn.Parameter],
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Split dense parameters from experts'."""
    listed = list(params)
    return [param for param in listed if not is_moe_param(param)], [
        param for param in listed if is_moe_param(param)
    ]


def split_params_grads_into_shared_and_expert_params(
    group: Iterable[nn.Parameter],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Split gradients of dense parameters from experts', of those that have one."""
    shared, expert = split_params_into_shared_and_expert_params(group)
    return [p.grad for p in shared if p.grad is not None], [
        p.grad for p in expert if p.grad is not None
    ]


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: ParamGroup | Sequence[ParamGroup], max_group_size: int | float = 178956971
) -> list[ParamGroup]:
    """Take the experts out of one or several optimizer groups, into groups of their own.

    Groups that hold experts only and say so (`moe: True`) stay as they are. New ones, by expert
    group name, follow, with the settings of their origin and at most `max_group_size` elements
    each, unless a single parameter is larger.
    """
    given = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    dense: list[ParamGroup] = []
    expert: list[ParamGroup] = []
    for group in given:
        if is_moe_param_group(group):
            dense.append(group)
            continue
        shared, experts = split_params_into_shared_and_expert_params(group["params"])
        dense.append({**group, "params": shared})
        for name in dict.fromkeys(param.group_name for param in experts):  # type: ignore[attr-defined]  # set by Experts
            of_name = [param for param in experts if param.group_name == name]  # type: ignore[attr-defined]
            expert += [
                {**group, "params": part, "name": name, "moe": True}
                for part in _parts(of_name, max_group_size)
            ]
    return dense + expert


def _parts(params: list[nn.Parameter], max_numel: int | float) -> list[list[nn.Parameter]]:
    parts: list[list[nn.Parameter]] = []
    numel = 0
    for param in params:
        if not parts or numel + param.numel() > max_numel:
            parts.append([])
            numel = 0
        parts[-1].append(param)
        numel += param.numel()
    return parts


def configure_moe_param_groups(model_parameters: Iterable[Any]) -> list[ParamGroup]:
    """Sort parameters, or optimizer groups, into groups none of which mixes experts with others."""
    listed = list(model_parameters)
    if listed and isinstance(listed[0], dict):
        return split_params_into_different_moe_groups_for_optimizer(listed)
    return split_params_into_different_moe_groups_for_optimizer(
        {"params": listed, "name": DENSE_GROUP_NAME}
    )

"""Which parameters of a model Muon updates, and what would leave it off without saying so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from deepspeed.ops.muon.muon import MARK, MuonWithAuxAdam, is_matrix, with_marks
from deepspeed.ops.whole_parameters import WholeParameterOptimizer
from deepspeed.runtime.config_models.training import SchedulerConfig, TrainingConfig
from deepspeed.runtime.config_utils import DeepSpeedConfigError
from deepspeed.runtime.sharding.model_ranks import ModelRanks, is_model_parallel_parameter
from deepspeed.utils.logging import log_dist, warn_once
from deepspeed.utils.tensor_fragment import logical_shape

# In names of matrices whose rows are tokens, each with a direction of its own: AdamW's.
TOKEN_WORDS = ("embed", "lm_head")
# Schedules that set rates of their own instead of a share of each group's: by which key, and what
# they set without it.
RATES_OF_SCHEDULES: dict[str, tuple[str, float | None]] = {
    "WarmupLR": ("warmup_max_lr", None),
    "WarmupDecayLR": ("warmup_max_lr", 0.001),
    "OneCycle": ("cycle_max_lr", None),
    "LRRangeTest": ("lr_range_test_min_lr", 0.001),
}


def one_rate_for_both(params: Mapping[str, Any], schedule: SchedulerConfig | None) -> str | None:
    """Say what to warn of if a schedule overwrites Muon's rate and AdamW's by one."""
    if schedule is None or not {"muon_lr", "adam_lr"}.intersection(params):
        return None
    key, default = RATES_OF_SCHEDULES.get(schedule.type or "", ("", None))
    rate = schedule.params.get(key, default)
    if rate is None or isinstance(rate, list | tuple):
        return None
    return (
        f"scheduler.params.{key}: {rate} of {schedule.type} is the rate of Muon's parameters and "
        "of AdamW's, whatever muon_lr and adam_lr say; give a list of one rate per parameter "
        "group, Muon's first"
    )


def muon_groups(
    module: nn.Module, parameters: Iterable[Any], config: TrainingConfig
) -> list[dict[str, Any]]:
    """Make `parameters` groups with the key `use_muon`; one that has the key stays as it is.

    A parameter that is not marked (`param.use_muon`) uses Muon if it has two dimensions or more and
    is neither the weight of an `nn.Embedding` nor named like one, or like a head over tokens.

    Raises:
        DeepSpeedConfigError: Marks and groups disagree, or something that is marked is no matrix.
    """
    names = {param: name for name, param in module.named_parameters()}
    embeddings = {
        one.weight for one in module.modules() if isinstance(one, nn.Embedding | nn.EmbeddingBag)
    }

    def uses_muon(param: torch.Tensor) -> bool:
        name = names.get(param, "").lower()  # type: ignore[call-overload]  # any tensor is asked for
        is_of_tokens = any(word in name for word in TOKEN_WORDS)
        return is_matrix(param) and param not in embeddings and not is_of_tokens

    try:
        groups = with_marks(parameters, uses_muon, names)
    except ValueError as error:
        raise DeepSpeedConfigError(f'optimizer.type "Muon": {error}') from error
    counts = {
        use: sum(len(group["params"]) for group in groups if bool(group[MARK]) is use)
        for use in (True, False)
    }
    warning = one_rate_for_both(
        config.optimizer.params if config.optimizer else {}, config.scheduler
    )
    if warning is not None:
        warn_once(warning)
    log_dist(f"Muon updates {counts[True]} parameters, AdamW {counts[False]}", ranks=[0])
    return groups


def check_whole_parameters(
    basic: torch.optim.Optimizer,
    is_elementwise: bool,
    by_owners: bool,
    names: Mapping[nn.Parameter, str],
    ranks: ModelRanks,
) -> None:
    """Make sure that what should be updated from whole parameters is.

    Raises:
        DeepSpeedConfigError: A parameter that has `use_muon` would be updated by another rule, Muon
            would update nothing, or a rank has only a slice of a parameter.
    """
    if is_elementwise:
        for group in basic.param_groups:
            for param in group["params"]:
                if getattr(param, MARK, False) or group.get(MARK):
                    raise DeepSpeedConfigError(
                        f"{names.get(param, 'a parameter')} has use_muon, but "
                        f"{type(basic).__name__} would update it: set "
                        '"optimizer": {"type": "Muon"}, or take use_muon away'
                    )
    if by_owners:
        check_has_wholes(basic, names, ranks)
    if not isinstance(basic, WholeParameterOptimizer):
        return
    groups = [group for group in basic.param_groups if group.get(MARK, True)]
    if isinstance(basic, MuonWithAuxAdam) and not ranks.has_parts and not _members(groups):
        left = ", ".join(
            f"{names.get(param, '?')} of shape {tuple(logical_shape(param))}"
            for param in _members(basic.param_groups)[:3]
        )
        raise DeepSpeedConfigError(
            f"Muon would update no parameter (AdamW has {left}, ...): set param.use_muon = True on "
            'matrices, or use "optimizer": {"type": "AdamW"}'
        )
    check_has_wholes(basic, names, ranks)


def check_has_wholes(
    basic: torch.optim.Optimizer, names: Mapping[nn.Parameter, str], ranks: ModelRanks
) -> None:
    """Refuse a slice of what an optimizer updates from the whole of it."""
    groups = [group for group in basic.param_groups if group.get(MARK, True)]
    for param in _members(groups) if ranks.tensor_group is not None else ():
        if is_model_parallel_parameter(param):
            raise DeepSpeedConfigError(
                f"{type(basic).__name__} updates {names.get(param, 'a parameter')} from the whole "
                "of it, and tensor parallelism gives each rank a slice: use AdamW, or "
                "param.use_muon = False"
            )


def _members(groups: Iterable[dict[str, Any]]) -> list[nn.Parameter]:
    return [param for group in groups for param in group["params"]]

"""Upstream's names for loading one parameter of a universal checkpoint by hand.

How such a checkpoint is read and sliced is `resharding`'s. Files name `SubparamShape` by this path.
"""

from __future__ import annotations

import os
import types
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint.resharding.tensor_parallel import SubparamShape as SubparamShape
from deepspeed.checkpoint.resharding.tensor_parallel import slice_of_rank
from deepspeed.checkpoint.resharding.universal import parameter_state
from deepspeed.utils.tensor_fragment import safe_set_full_fp32_param, safe_set_full_optimizer_state


def enable_universal_checkpoint(param_list: Sequence[nn.Parameter]) -> None:
    """Give each parameter the method `load_hp_checkpoint_state`."""
    for param in param_list:
        param.load_hp_checkpoint_state = types.MethodType(load_hp_checkpoint_state, param)  # type: ignore[attr-defined]


def load_hp_checkpoint_state(
    self: nn.Parameter,
    folder: str,
    tp_rank: int,
    tp_world_size: int,
    ep_rank: int = 0,
    ep_size: int = 1,
) -> Any:
    """Load a parameter, its master weight and its optimizer state from its folder.
    `load_checkpoint` does so for all of them.

    Args:
        self: The parameter, of an engine that keeps master weights and has taken a step (there is
            no state before).
        folder: `<checkpoint>/zero/<name>`.
        tp_rank: This rank's number among those that hold slices of the parameter.
        tp_world_size: How many there are.
        ep_rank: No effect: experts have folders of their own here.
        ep_size: As `ep_rank`.

    Returns:
        The step count; None if the folder has none.

    Raises:
        CheckpointError: A file is missing or damaged, or does not fit the parameter.
        KeyError: The optimizer has no such state.
    """
    if (ep_rank, ep_size) != (0, 1):
        raise ValueError(
            f"ep_rank {ep_rank}, ep_size {ep_size}: each expert has a folder of its own; give "
            "that, and 0 and 1"
        )
    step = None
    for slot, content in parameter_state(folder):
        if not isinstance(content, Mapping):
            step = content
            continue
        own = slice_of_rank(os.path.basename(folder), content, self.shape, tp_rank, tp_world_size)
        if slot == keys.FP32_WEIGHT_KEY:
            safe_set_full_fp32_param(self, own)
        else:
            safe_set_full_optimizer_state(self, own, slot)
    return step

"""The state of stage 3 in checkpoints: `CutFiles`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from deepspeed import comm as dist
from deepspeed.checkpoint.constants import (
    FP32_FLAT_GROUPS,
    OPTIMIZER_STATE_DICT,
    PARTITION_COUNT,
    ZERO_STAGE,
)
from deepspeed.runtime.optimizers.state_layout import OwnShard, StateFiles, StateLayout
from deepspeed.runtime.optimizers.step_outcome import Outcomes
from deepspeed.runtime.sharding.loading_in_place import load_in_place
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.runtime.zero.sharded_state import is_dealt_alike
from deepspeed.runtime.zero.units.masters import CutMasters


class CutFiles(StateFiles):
    """See module.

    Args:
        masters: Whose.
        holders: Ranks that have this same shard; None: no other does.
        outcomes: The loss scale.
    """

    def __init__(self, masters: CutMasters, holders: dist.Group, outcomes: Outcomes) -> None:
        super().__init__(masters.optimizer)
        self._masters = masters
        self._outcomes = outcomes
        self._shard = OwnShard(masters.shard_rank, masters.num_shards, holders)

    @property
    def state_layout(self) -> StateLayout:
        """See base class."""
        return StateLayout(self._shard, has_masters=True, has_weights=True, lists_frozen=True)

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the state, in upstream's layout."""
        part = self._masters.device_part
        base = self._optimizer.state_dict() if part is None else part.state_dict()
        return self._in_files(base, [group.master.detach() for group in self._masters.groups])

    def _in_files(self, base: dict[str, Any], masters: Sequence[torch.Tensor]) -> dict[str, Any]:
        """The state of every group's optimizer and its masters, as files have it."""
        if self._masters.device_part is not None:
            base, masters = self._masters.device_part.joined(base, masters)
        return {
            ZERO_STAGE: ZeroStageEnum.weights,
            **self._outcomes.scaler_state(),
            PARTITION_COUNT: self._masters.partition_counts(),
            OPTIMIZER_STATE_DICT: base,
            FP32_FLAT_GROUPS: list(masters),
        }

    @torch.no_grad()
    def load_state_dict(
        self,
        state_dict: dict[str, Any],
        load_optimizer_states: bool = True,
        load_from_fp32_weights: bool = True,
    ) -> None:
        """See base class; the loss scaler too, and with masters the weights, which are those
        rounded.
        """
        self._outcomes.load_scaler_state(state_dict)
        part, masters = self._masters.device_part, state_dict[FP32_FLAT_GROUPS]
        if load_optimizer_states and part is None:
            load_in_place(self._optimizer, state_dict[OPTIMIZER_STATE_DICT])
        elif load_optimizer_states and part is not None:
            part.load(state_dict[OPTIMIZER_STATE_DICT])
        if load_from_fp32_weights:
            parts = masters if part is None else part.master_parts(masters)
            for group, master in zip(self._masters.groups, parts, strict=True):
                group.master.copy_(master)
            self._masters.update_lp_params()
        else:
            self._masters.refresh_fp32_params()

    def fits(self, saved: Mapping[str, Any]) -> bool:
        """See base class. Upstream cuts large groups into several buffers, which are resharded."""
        if saved.get(ZERO_STAGE) != ZeroStageEnum.weights:
            return False
        base, buffers = saved[OPTIMIZER_STATE_DICT], saved[FP32_FLAT_GROUPS]
        return (
            saved[PARTITION_COUNT] == self._masters.partition_counts()
            and all(len(group["params"]) == 1 for group in base["param_groups"])
            and [buffer.numel() for buffer in buffers] == self._masters.shard_numels()
            and is_dealt_alike(self._masters, base)
        )

    def rebuilt_state(
        self, base: dict[str, Any], masters: Sequence[torch.Tensor], scaler: Mapping[str, Any]
    ) -> dict[str, Any]:
        """See base class."""
        started = self._outcomes.rebuilt_scaler_state(scaler)
        return {**self._in_files(base, masters), **started}

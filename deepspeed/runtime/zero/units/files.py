"""The state of stage 3 in checkpoints: `CutFiles`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from deepspeed import comm as dist
from deepspeed.checkpoint import constants as keys
from deepspeed.runtime.optimizers.state_layout import OwnShard, StateFiles, StateLayout
from deepspeed.runtime.optimizers.step_outcome import Outcomes
from deepspeed.runtime.sharding.loading_in_place import load_in_place
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.runtime.zero.sharded_state import is_dealt_alike
from deepspeed.runtime.zero.units.masters import CutMasters


class CutFiles(StateFiles):
    """The state of stage 3 in checkpoints; `holders` are the ranks that have this same shard."""

    def __init__(self, masters: CutMasters, holders: dist.Group, outcomes: Outcomes) -> None:
        super().__init__(masters.optimizer)
        self._masters = masters
        self._outcomes = outcomes
        self._shard = OwnShard(masters.shard_rank, masters.num_shards, holders)

    @property
    def state_layout(self) -> StateLayout:
        return StateLayout(self._shard, has_masters=True, has_weights=True, lists_frozen=True)

    def state_dict(self) -> dict[str, Any]:
        part = self._masters.device_part
        base = self._optimizer.state_dict() if part is None else part.state_dict()
        return self._in_files(base, [group.master.detach() for group in self._masters.groups])

    def _in_files(self, base: dict[str, Any], masters: Sequence[torch.Tensor]) -> dict[str, Any]:
        if self._masters.device_part is not None:
            base, masters = self._masters.device_part.joined(base, masters)
        return {
            keys.ZERO_STAGE: ZeroStageEnum.weights,
            **self._outcomes.scaler_state(),
            keys.PARTITION_COUNT: self._masters.partition_counts(),
            keys.OPTIMIZER_STATE_DICT: base,
            keys.FP32_FLAT_GROUPS: list(masters),
        }

    @torch.no_grad()
    def _load(self, saved: dict[str, Any], with_moments: bool, with_masters: bool) -> None:
        """Restore the loss scaler too, and with masters the weights, which are those rounded."""
        self._outcomes.load_scaler_state(saved)
        part, masters = self._masters.device_part, saved[keys.FP32_FLAT_GROUPS]
        if with_moments and part is None:
            load_in_place(self._optimizer, saved[keys.OPTIMIZER_STATE_DICT])
        elif with_moments and part is not None:
            part.load(saved[keys.OPTIMIZER_STATE_DICT])
        if with_masters:
            parts = masters if part is None else part.master_parts(masters)
            for group, master in zip(self._masters.groups, parts, strict=True):
                group.master.copy_(master)
            self._masters.update_lp_params()
        else:
            self._masters.refresh_fp32_params()

    def fits(self, saved: Mapping[str, Any]) -> bool:
        """Refuse also several buffers for a group, which upstream cuts large ones into."""
        if saved.get(keys.ZERO_STAGE) != ZeroStageEnum.weights:
            return False
        base, buffers = saved[keys.OPTIMIZER_STATE_DICT], saved[keys.FP32_FLAT_GROUPS]
        return (
            saved[keys.PARTITION_COUNT] == self._masters.partition_counts()
            and all(len(group["params"]) == 1 for group in base["param_groups"])
            and [buffer.numel() for buffer in buffers] == self._masters.shard_numels()
            and is_dealt_alike(self._masters, base)
        )

    def rebuilt_state(
        self, base: dict[str, Any], masters: Sequence[torch.Tensor], scaler: Mapping[str, Any]
    ) -> dict[str, Any]:
        started = self._outcomes.rebuilt_scaler_state(scaler)
        return {**self._in_files(base, masters), **started}

"""FP16_UnfusedOptimizer: as FP16_Optimizer, with one master per parameter, by which checkpoints
have the state: for optimizers that need shapes (Lamb, Muon) and for torch's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from deepspeed.checkpoint.constants import FP32_GROUPS
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer, WholeFiles


class ParameterFiles(WholeFiles):
    """Files of one master per parameter."""

    def _masters_state(self) -> dict[str, Any]:
        groups = self._masters.groups
        return {self._key: [[master.detach() for master in group.masters] for group in groups]}

    def _saved_masters(self, state_dict: dict[str, Any]) -> list[list[torch.Tensor]]:
        saved: list[list[torch.Tensor]] = state_dict[self._key]
        return saved

    def _grouped_masters(self, masters: Sequence[torch.Tensor]) -> Sequence[object]:
        following = iter(masters)
        return [[next(following) for _ in group.masters] for group in self._masters.groups]


class FP16_UnfusedOptimizer(FP16_Optimizer):
    """`FP16_Optimizer` with one master per parameter."""

    files_class = ParameterFiles
    masters_key = FP32_GROUPS
    per_param = True

    @property
    def fp32_groups(self) -> list[list[nn.Parameter]]:
        return [group.masters for group in self.groups]

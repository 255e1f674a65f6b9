"""FP16_UnfusedOptimizer: as FP16_Optimizer, with one master per parameter.

For optimizers that need shapes (Lamb, Muon) and for torch's own, whose state is then keyed per
parameter in checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from deepspeed.checkpoint.constants import FP32_GROUPS
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer, WholeFiles


class ParameterFiles(WholeFiles):
    """The same with one master per parameter."""

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
    """See module; arguments as `FP16_Optimizer`."""

    files_class = ParameterFiles
    masters_key = FP32_GROUPS
    per_param = True

    @property
    def fp32_groups(self) -> list[list[nn.Parameter]]:
        """The masters of each group."""
        return [group.masters for group in self.groups]

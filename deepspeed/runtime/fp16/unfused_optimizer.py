"""FP16_UnfusedOptimizer: as FP16_Optimizer, with one master per parameter.

For optimizers that need shapes (Lamb, Muon) and for torch's own, whose state is then keyed per
parameter in checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from deepspeed.checkpoint.constants import FP32_GROUPS
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer


class FP16_UnfusedOptimizer(FP16_Optimizer):
    """See module; arguments as `FP16_Optimizer`."""

    masters_key = FP32_GROUPS

    def __init__(
        self,
        init_optimizer: torch.optim.Optimizer,
        param_names: Mapping[nn.Parameter, str],
        **kwargs: Any,
    ) -> None:
        super().__init__(init_optimizer, param_names, per_param=True, **kwargs)

    @property
    def fp32_groups(self) -> list[list[nn.Parameter]]:
        """The masters of each group."""
        return [group.masters for group in self.groups]

    def _masters_state(self) -> dict[str, Any]:
        return {
            self.masters_key: [
                [master.detach() for master in group.masters] for group in self.groups
            ]
        }

    def _saved_masters(self, state_dict: dict[str, Any]) -> list[list[torch.Tensor]]:
        saved: list[list[torch.Tensor]] = state_dict[self.masters_key]
        return saved

    def _grouped_masters(self, masters: Sequence[torch.Tensor]) -> list[Any]:
        """See base class: one per parameter."""
        following = iter(masters)
        return [[next(following) for _ in group.masters] for group in self.groups]

"""Lion for parameters and state on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from deepspeed.ops.host_optimizer import HostOptimizer


class DeepSpeedCPULion(HostOptimizer):
    """Lion (Chen et al., arXiv:2302.06675, Algorithm 2) with decoupled weight decay. `betas` weigh
    the momentum in the update, and in the momentum; without `fp32_optimizer_states` it is in the
    parameter's dtype. ValueError for a hyper-parameter out of range.
    """

    op_name = "cpu_lion"

    def __init__(
        self,
        model_params: object,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if lr < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                "DeepSpeedCPULion: lr and weight_decay must not be negative and betas lie in [0, "
                f"1), got lr={lr}, weight_decay={weight_decay}, betas={betas}"
            )
        defaults = {"lr": lr, "betas": (betas[0], betas[1]), "weight_decay": weight_decay}
        super().__init__(model_params, defaults, fp32_optimizer_states)

    def _slots(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("exp_avg",)

    def _scalars(self, group: dict[str, Any], step: int, grad_factor: float) -> tuple[float, ...]:
        lr, decay = float(group["lr"]), group["weight_decay"]
        beta1, beta2 = group["betas"]
        return grad_factor, beta1, 1.0 - beta1, beta2, 1.0 - beta2, 1.0 - lr * decay, lr

    @staticmethod
    def _rule(
        scalars: Sequence[float], param: torch.Tensor, grad: torch.Tensor, *states: torch.Tensor
    ) -> None:
        _, beta1, grad_to_update, beta2, grad_to_momentum, decay, lr = scalars
        (momentum,) = states
        direction = (momentum * beta1).add_(grad * grad_to_update)
        # torch's sign of a NaN is 0, which would hide a broken gradient.
        direction = torch.where(direction.isnan(), direction, direction.sign())
        momentum.mul_(beta2).add_(grad * grad_to_momentum)
        param.mul_(decay).sub_(direction.mul_(lr))

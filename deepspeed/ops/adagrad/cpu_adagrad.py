"""Adagrad for parameters and state on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from deepspeed.ops.host_optimizer import HostOptimizer, square_root


class DeepSpeedCPUAdagrad(HostOptimizer):
    """Adagrad (Duchi et al., JMLR 2011), which has no `amsgrad`; `weight_decay` is L2. Without
    `fp32_optimizer_states` the sum of squares is in the parameter's dtype. ValueError for a
    hyper-parameter out of range.
    """

    op_name = "cpu_adagrad"

    def __init__(
        self,
        model_params: object,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if amsgrad:
            raise ValueError(
                "DeepSpeedCPUAdagrad: amsgrad=True is not supported; Adagrad has no such variant"
            )
        if lr < 0 or eps < 0 or weight_decay < 0:
            raise ValueError(
                "DeepSpeedCPUAdagrad: lr, eps and weight_decay must not be negative, "
                f"got lr={lr}, eps={eps}, weight_decay={weight_decay}"
            )
        defaults = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
        super().__init__(model_params, defaults, fp32_optimizer_states)

    def _slots(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("exp_avg_sq",)

    def _scalars(self, group: dict[str, Any], step: int, grad_factor: float) -> tuple[float, ...]:
        return grad_factor, group["weight_decay"], group["eps"], float(group["lr"])

    @staticmethod
    def _rule(
        scalars: Sequence[float], param: torch.Tensor, grad: torch.Tensor, *states: torch.Tensor
    ) -> None:
        _, l2, eps, lr = scalars
        (squares,) = states
        if l2 != 0.0:
            grad.add_(param * l2)
        squares.add_(grad * grad)
        param.sub_((grad / square_root(squares).add_(eps)).mul_(lr))

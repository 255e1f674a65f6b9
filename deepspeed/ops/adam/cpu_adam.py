"""Adam for parameters and state on the host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from deepspeed.ops.host_optimizer import HostOptimizer, square_root


class DeepSpeedCPUAdam(HostOptimizer):
    """Adam (Kingma and Ba, arXiv:1412.6980) with decoupled weight decay (arXiv:1711.05101) unless
    `adamw_mode` is off, which adds it to the gradient (L2).

    `bias_correction` undoes the moments' start at zero, `amsgrad` uses the maximum of second
    moments. Without `fp32_optimizer_states` these are in the parameter's dtype. ValueError for a
    hyper-parameter out of range.
    """

    op_name = "cpu_adam"

    def __init__(
        self,
        model_params: object,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                "DeepSpeedCPUAdam: lr, eps and weight_decay must not be negative and betas lie in "
                f"[0, 1), got lr={lr}, eps={eps}, weight_decay={weight_decay}, betas={betas}"
            )
        self.adam_w_mode = adamw_mode
        defaults = {
            "lr": lr,
            "betas": (betas[0], betas[1]),
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "amsgrad": amsgrad,
        }
        super().__init__(model_params, defaults, fp32_optimizer_states)

    def _slots(self, group: dict[str, Any]) -> tuple[str, ...]:
        return "exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ())

    def _scalars(self, group: dict[str, Any], step: int, grad_factor: float) -> tuple[float, ...]:
        lr, decay = float(group["lr"]), group["weight_decay"]
        beta1, beta2 = group["betas"]
        correct1 = 1.0 - beta1**step if group["bias_correction"] else 1.0
        correct2 = 1.0 - beta2**step if group["bias_correction"] else 1.0
        return (
            grad_factor,
            0.0 if self.adam_w_mode else decay,
            beta1,
            1.0 - beta1,
            beta2,
            1.0 - beta2,
            1.0 / math.sqrt(correct2),
            group["eps"],
            1.0 - lr * decay if self.adam_w_mode else 1.0,
            lr / correct1,
        )

    @staticmethod
    def _rule(
        scalars: Sequence[float], param: torch.Tensor, grad: torch.Tensor, *states: torch.Tensor
    ) -> None:
        _, l2, beta1, grad_to_first, beta2, square_to_second, root_factor, eps, decay, step_size = (
            scalars
        )
        first, second, *largest = states
        if l2 != 0.0:
            grad.add_(param * l2)
        first.mul_(beta1).add_(grad * grad_to_first)
        second.mul_(beta2).add_((grad * grad).mul_(square_to_second))
        if largest:
            second = torch.maximum(largest[0], second, out=largest[0])
        denominator = square_root(second).mul_(root_factor).add_(eps)
        param.mul_(decay).sub_((first / denominator).mul_(step_size))

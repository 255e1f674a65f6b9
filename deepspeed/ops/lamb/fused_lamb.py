"""Lamb: Adam with a trust ratio per parameter (You et al., arXiv:1904.00962, Algorithm 2). torch
has none of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class FusedLamb(torch.optim.Optimizer):
    """Lamb. Needs whole parameters: the trust ratio is a ratio of their norms, so ZeRO's shards
    can't use it.

    Args:
        params: Parameters or groups.
        lr: Learning rate.
        bias_correction: Correct the moments' bias.
        betas: Decay of first and second moment.
        eps: Added to the denominator.
        eps_inside_sqrt: Add `eps` under the root instead.
        weight_decay: Weight decay, part of the update that the trust ratio scales.
        max_grad_norm: Must be 0; set `gradient_clipping` in the configuration.
        max_coeff: Largest trust ratio.
        min_coeff: Smallest trust ratio.
        amsgrad: Must be False.

    Raises:
        ValueError: For what Lamb does not have, naming the argument.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        if amsgrad or max_grad_norm:
            raise ValueError(
                "FusedLamb: amsgrad and max_grad_norm are not supported; clip with "
                "gradient_clipping"
            )
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
        }
        super().__init__(params, defaults)
        self.eps_inside_sqrt = eps_inside_sqrt

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._step_param(param, group)
        return loss

    def _step_param(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if "step" not in state:
            state.update(
                step=0, exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param)
            )
        state["step"] += 1
        beta1, beta2 = group["betas"]
        state["exp_avg"].lerp_(param.grad, 1.0 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(param.grad, param.grad, value=1.0 - beta2)
        correct1 = 1.0 - beta1 ** state["step"] if group["bias_correction"] else 1.0
        correct2 = 1.0 - beta2 ** state["step"] if group["bias_correction"] else 1.0
        second = state["exp_avg_sq"] / correct2
        denominator = (
            (second + group["eps"]).sqrt_()
            if self.eps_inside_sqrt
            else second.sqrt_().add_(group["eps"])
        )
        update = (
            (state["exp_avg"] / correct1).div_(denominator).add_(param, alpha=group["weight_decay"])
        )
        weight_norm, update_norm = param.norm(), update.norm()
        ratio = (weight_norm / update_norm).clamp_(group["min_coeff"], group["max_coeff"])
        # A zero norm says nothing about the scale of the layer: plain step.
        ratio = torch.where((weight_norm > 0) & (update_norm > 0), ratio, torch.ones_like(ratio))
        param.sub_(update * ratio * group["lr"])

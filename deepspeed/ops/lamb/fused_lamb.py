"""Lamb: Adam with a trust ratio per parameter (You et al., arXiv:1904.00962, Algorithm 2)."""

from __future__ import annotations

from collections.abc import Callable
from types import EllipsisType
from typing import Any

import torch

from deepspeed.ops.whole_parameters import WholeParameterOptimizer


class FusedLamb(WholeParameterOptimizer):
    """Lamb. The trust ratio is a ratio of norms of whole parameters, which ranks that have shards
    add up; it lies in `min_coeff` to `max_coeff` and scales weight decay too. `eps` is added to the
    denominator, or with `eps_inside_sqrt` under its root.

    `max_grad_norm` must be 0 (set `gradient_clipping` in the configuration) and `amsgrad` False.
    """

    def __init__(
        self,
        params: object,
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
                "FusedLamb: amsgrad and max_grad_norm are not supported; use gradient_clipping"
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
        """Update every parameter that has a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for tensor in group["params"]:
                if tensor.grad is not None:
                    self._step_tensor(tensor, group)
        return loss

    def _step_tensor(self, tensor: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[tensor]
        for moment in ("exp_avg", "exp_avg_sq"):
            if moment not in state:
                state[moment] = torch.zeros_like(tensor)
        runs = self.runs.get(tensor)
        if runs is None:
            state["step"] = state.get("step", 0) + 1
            update = self._direction(tensor, group, ..., state["step"])
        else:
            update = torch.zeros_like(tensor)
            counted: set[int] = set()
            for run in runs:
                if id(run.shared) not in counted:
                    counted.add(id(run.shared))
                    run.shared["step"] = run.shared.get("step", 0) + 1
                at = slice(run.start, run.end)
                update[at] = self._direction(tensor, group, at, run.shared["step"])
        whole = self.parameters_in(tensor)
        weight_norm, update_norm = whole.squares([tensor, update], self.squares).sqrt_()
        ratio = (weight_norm / update_norm).clamp_(group["min_coeff"], group["max_coeff"])
        # A zero norm says nothing about the scale of the layer: plain step.
        ratio = torch.where((weight_norm > 0) & (update_norm > 0), ratio, torch.ones_like(ratio))
        for part in whole.parts:
            if self.is_stepped(tensor, part):
                tensor[part.at].sub_(update[part.at] * ratio[part.param] * group["lr"])

    def _direction(
        self, tensor: torch.Tensor, group: dict[str, Any], at: slice | EllipsisType, step: int
    ) -> torch.Tensor:
        """Bring the moments at a place up to date; return the update there, before its ratio."""
        assert tensor.grad is not None, "a tensor without a gradient is left out"
        grad, state = tensor.grad[at], self.state[tensor]
        first, second = state["exp_avg"][at], state["exp_avg_sq"][at]
        (beta1, beta2), eps = group["betas"], group["eps"]
        first.lerp_(grad, 1.0 - beta1)
        second.mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
        correct1 = 1.0 - beta1**step if group["bias_correction"] else 1.0
        correct2 = 1.0 - beta2**step if group["bias_correction"] else 1.0
        scaled = second / correct2
        root = (scaled + eps).sqrt_() if self.eps_inside_sqrt else scaled.sqrt_().add_(eps)
        return (first / correct1).div_(root).add_(tensor[at], alpha=group["weight_decay"])

"""Lion: sign of an interpolated momentum (Chen et al., arXiv:2302.06675, Algorithm 2). torch has
none of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """Lion with decoupled weight decay, vectorized over all tensors of a group.

    Args:
        params: Parameters or groups, kept by identity.
        lr: Learning rate.
        betas: Weight of the momentum in the update, and in the momentum.
        weight_decay: Decoupled weight decay.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        if lr < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                f"Lion: lr must not be negative and betas lie in [0, 1), got lr={lr}, betas={betas}"
            )
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        params = [param for param in group["params"] if param.grad is not None]
        if not params:
            return
        for param in params:
            if "exp_avg" not in self.state[param]:
                self.state[param]["exp_avg"] = torch.zeros_like(param)
        grads = [param.grad for param in params]
        momenta = [self.state[param]["exp_avg"] for param in params]
        beta1, beta2 = group["betas"]
        torch._foreach_mul_(params, 1.0 - group["lr"] * group["weight_decay"])
        updates = torch._foreach_lerp(grads, momenta, beta1)
        torch._foreach_sign_(updates)
        torch._foreach_add_(params, updates, alpha=-group["lr"])
        torch._foreach_lerp_(momenta, grads, 1.0 - beta2)


class FusedLion(Lion):
    """Upstream's name on the device."""

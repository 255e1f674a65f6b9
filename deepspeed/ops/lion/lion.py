"""Lion: sign of an interpolated momentum (Chen et al., arXiv:2302.06675, Algorithm 2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """Lion with decoupled weight decay, vectorized over all tensors of a group. `betas` weigh the
    momentum in the update, and in the momentum.

    As torch's fused optimizers it takes `grad_scale` and `found_inf`, set by its caller for a step:
    gradients are divided by the first, and nothing changes if the second is 1. Both are 0-d tensors
    where the parameters are.
    """

    _step_supports_amp_scaling = True  # what torch's GradScaler asks for

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
        """Update every parameter that has a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
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
        lr, decay = group["lr"], 1.0 - group["lr"] * group["weight_decay"]
        grad_scale = getattr(self, "grad_scale", None)
        if grad_scale is not None:
            torch._foreach_div_(grads, grad_scale)
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None:
            # A skipped step moves by nothing times the sign of the momentum, which stands in for
            # the gradient and thereby stays as it is, bit for bit.
            skipped = found_inf > 0
            for grad, momentum in zip(grads, momenta, strict=True):
                torch.where(skipped, momentum, grad, out=grad)
            lr, decay = torch.where(skipped, 0.0, lr), torch.where(skipped, 1.0, decay)
        torch._foreach_mul_(params, decay)
        updates = torch._foreach_lerp(grads, momenta, beta1)
        torch._foreach_sign_(updates)
        if found_inf is not None:
            torch._foreach_mul_(updates, lr)
            torch._foreach_sub_(params, updates)
        else:
            torch._foreach_add_(params, updates, alpha=-lr)
        torch._foreach_lerp_(momenta, grads, 1.0 - beta2)


class FusedLion(Lion):
    """Upstream's name on the device."""

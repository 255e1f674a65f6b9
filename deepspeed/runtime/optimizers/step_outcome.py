"""What a step does with its gradients, and how the host learns of it.

A step multiplies its gradients by a factor (unscale, clip) and is skipped if they are not finite.
Both follow from the norm. A device that the host runs ahead of decides them itself: the factor is
a tensor on it (`GradientScaling`), and the host looks at the norm afterwards, if at all
(`StepOutcome`). `StepSequence` has the order.

[Note: who decides]
- The host, from a norm that it has read: where reading is free, where gradients are updated on the
  host anyway, and for an optimizer that cannot skip on the device, if steps are skipped at all.
- The device, for optimizers that take `grad_scale` and `found_inf` as torch's fused optimizers do
  for its GradScaler: `step` divides gradients by the first, and changes and counts nothing if the
  second is 1. Every optimizer can have its gradients multiplied on the device where no step is
  skipped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch

from deepspeed.runtime.streams import LateNumber


def takes_scaling(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step` reads `optimizer.grad_scale` and `optimizer.found_inf`."""
    # Loaded groups may say otherwise than the constructor did; then torch's step refuses the two.
    fused = all(group.get("fused", True) for group in optimizer.param_groups)
    supports = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
    return supports and fused and not _makes_momentum(optimizer)


def _makes_momentum(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the next step is one that torch's SGD makes momentum buffers in: a skipped one leaves
    them uninitialized, and the step after it takes them for momentum.
    """
    return isinstance(optimizer, torch.optim.SGD) and any(
        group["momentum"] and optimizer.state.get(param, {}).get("momentum_buffer") is None
        for group in optimizer.param_groups
        for param in group["params"]
    )


class GradientScaling(NamedTuple):
    """What happens to gradients on their way into the optimizer.

    Attributes:
        factor: By what they are multiplied: a number, or a 0-d fp32 tensor on their device.
        found_inf: 0-d, fp32, on their device: 1 if the optimizer must change nothing. None: the
            step is taken.
    """

    factor: float | torch.Tensor
    found_inf: torch.Tensor | None = None

    def step(self, optimizer: torch.optim.Optimizer, grads: Iterable[torch.Tensor]) -> None:
        """One step of `optimizer`.

        Args:
            optimizer: Has its gradients. It takes scaling if there is a `found_inf`.
            grads: All memory of those gradients, which may be overwritten.
        """
        in_tensors = isinstance(self.factor, torch.Tensor) and takes_scaling(optimizer)
        if self.found_inf is None and not in_tensors:
            if isinstance(self.factor, torch.Tensor) or self.factor != 1.0:
                for grad in grads:
                    grad.mul_(self.factor)
            optimizer.step()
            return
        # The names are torch's GradScaler's; its optimizers look for them in every step.
        optimizer.grad_scale = self._divisor()  # type: ignore[attr-defined]  # as above
        optimizer.found_inf = self.found_inf  # type: ignore[attr-defined]  # as above
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]  # as above

    def _divisor(self) -> torch.Tensor | None:
        if isinstance(self.factor, torch.Tensor):
            return self.factor.reciprocal()
        if self.factor == 1.0 or self.found_inf is None:
            return None
        return torch.full_like(self.found_inf, 1.0 / self.factor)


class UnreadNorms(NamedTuple):
    """The norms of a step's gradient where they were computed, for whoever reads them later.

    Attributes:
        norm: Of everything, times the loss scale, 0-d, fp32.
        scale: The loss scale that these gradients carry.
        skips: Whether the step is skipped if the norm is not finite.
        group_squares: Squared norms per parameter group, 1-d, fp32; None without gradients.
        group_factor: By what their roots are multiplied to be norms without loss scale.
    """

    norm: torch.Tensor
    scale: float
    skips: bool
    group_squares: torch.Tensor | None
    group_factor: float


class StepOutcome:
    """The norm of a step's gradient, and with it whether the step was skipped.

    Args:
        norm: Times the loss scale, 0-d, fp32, where it was computed.
        scale: The loss scale that these gradients carry.
        skips: Whether the step is skipped if the norm is not finite.

    Attributes:
        norm, scale, skips: The same.
    """

    def __init__(self, norm: torch.Tensor, scale: float, skips: bool) -> None:
        self.norm = norm
        self.scale = scale
        self.skips = skips
        self._late: LateNumber | None = None
        self._host_norm: float | None = None

    def found_inf(self) -> torch.Tensor | None:
        """`GradientScaling.found_inf`, computed on the device; None if no step is skipped."""
        return torch.isfinite(self.norm).logical_not_().float() if self.skips else None

    def send(self, late: LateNumber) -> None:
        """Start copying the norm to the host, if the host will have to know whether the step was
        skipped: it then waits for this copy, and not for what is issued after it.
        """
        if self.skips:
            late.post(self.norm)
            self._late = late

    @property
    def host_norm(self) -> float:
        """The norm, times the loss scale. The first read waits for the device."""
        if self._host_norm is None:
            self._host_norm = self.norm.item() if self._late is None else self._late.read()
            self._late = None
        return self._host_norm

    @property
    def is_skipped(self) -> bool:
        """Whether the step was skipped. The first read waits for the device if steps are skipped
        at all.
        """
        return self.skips and not math.isfinite(self.host_norm)

"""What a step does with its gradients, and how the host learns of it.

A step multiplies its gradients by a factor (unscale, clip) and is skipped if they are not finite.
Both follow from the norm. A device that the host runs ahead of decides them itself: the factor is a
tensor on it, and the host looks at the norm afterwards, if at all.

[Note: who decides]
- The host, from a norm that it has read: where reading is free, where gradients are updated on
  the host anyway, and for an optimizer that cannot skip on the device, if steps are skipped at all.
- The device, for optimizers that take `grad_scale` and `found_inf` as torch's fused optimizers do
  for its GradScaler: `step` divides gradients by the first, and changes and counts nothing if the
  second is 1. Every optimizer can have its gradients multiplied on the device where no step is
  skipped.
"""

from __future__ import annotations

import copy
import logging
import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch

from deepspeed.checkpoint.constants import LOSS_SCALER
from deepspeed.runtime.fp16.loss_scaler import LossScalerBase
from deepspeed.runtime.streams import LateNumber
from deepspeed.utils.logging import log_dist

T = TypeVar("T")


def takes_scaling(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step` reads `optimizer.grad_scale` and `optimizer.found_inf`."""
    # Loaded groups may say otherwise than the constructor did; then torch's step refuses the two.
    fused = all(group.get("fused", True) for group in optimizer.param_groups)
    supports = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
    return supports and fused and not _makes_momentum(optimizer)


def _makes_momentum(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the next step makes momentum buffers of torch's SGD: a skipped one leaves them
    uninitialized, and the step after it takes them for momentum.
    """
    return isinstance(optimizer, torch.optim.SGD) and any(
        group["momentum"] and optimizer.state.get(param, {}).get("momentum_buffer") is None
        for group in optimizer.param_groups
        for param in group["params"]
    )


def begin_adagrad(optimizer: torch.optim.Optimizer) -> None:
    """Give masters the state that torch's Adagrad makes at once, of its first parameters: since
    torch 2.13 of later ones too.
    """
    if isinstance(optimizer, torch.optim.Adagrad):
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None and not optimizer.state[param]:
                    total = torch.full_like(param, group["initial_accumulator_value"])
                    count = torch.zeros((), device=param.device if group.get("fused") else "cpu")
                    optimizer.state[param] = {"step": count, "sum": total}


class GradientScaling(NamedTuple):
    """What happens to gradients on their way into the optimizer: they are multiplied by `factor`, a
    number or a 0-d fp32 tensor on their device, and where `found_inf` (0-d, fp32, there too) is 1
    nothing changes.
    """

    factor: float | torch.Tensor
    found_inf: torch.Tensor | None = None

    def step(self, optimizer: torch.optim.Optimizer, grads: Iterable[torch.Tensor]) -> None:
        """Step `optimizer`; `grads` are all memory of its gradients, which may be overwritten."""
        begin_adagrad(optimizer)
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
    """The norms of a step's gradient where they were computed, for later readers."""

    norm: torch.Tensor  # of everything, times the loss scale, 0-d, fp32
    scale: float  # the loss scale that these gradients carry
    skips: bool  # whether the step is skipped if the norm is not finite
    # squared norms per parameter group, 1-d, fp32; None without gradients
    group_squares: torch.Tensor | None
    group_factor: float  # by what their roots are multiplied to be norms without loss scale


class StepOutcome:
    """The norm of a step's gradient (times the loss `scale`, 0-d, fp32, where it was computed), and
    whether that skipped the step.
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
        """Whether the step was skipped. The first read waits for the device if steps may be."""
        return self.skips and not math.isfinite(self.host_norm)


class Outcomes:
    """The loss scale, the norms and what became of steps, under upstream's names."""

    def __init__(self, scaler: LossScalerBase, check_grad_overflow: bool, clip_grad: float) -> None:
        self._scaler = scaler
        self.check_grad_overflow = check_grad_overflow
        self.clip_grad = clip_grad
        self.skipped_steps = 0
        # Of the last step; and of those that the host still has to learn of, oldest first.
        self._outcome: StepOutcome | None = None
        self._applied: StepOutcome | None = None  # the last that was not skipped
        self._unknown: deque[StepOutcome] = deque()
        self._overflow = False
        # One is on its way while the one before is read.
        self._late_norms = deque((LateNumber(), LateNumber()))
        # Reduced, `[num_norm_groups]`, of the gradient as accumulated.
        self._group_squares: torch.Tensor | None = None
        self._group_factor = 1.0

    # In a step

    def begin(
        self, norm: torch.Tensor, group_squares: torch.Tensor | None, factor: float
    ) -> StepOutcome:
        """Begin a step with a gradient of this norm (times the loss scale, 0-d, fp32); `factor` is
        what the accumulated gradient is multiplied by beside the loss scale.
        """
        self._outcome = StepOutcome(norm, self._used_scale(), self.check_grad_overflow)
        self._group_squares = group_squares
        self._group_factor = factor / self._outcome.scale
        self._unknown.append(self._outcome)
        return self._outcome

    def send(self, outcome: StepOutcome) -> None:
        outcome.send(self._late_norms[0])
        self._late_norms.rotate()

    def _used_scale(self) -> float:
        """The scale of the gradients at hand: the scaler moves on at their step's outcome."""
        return float(self._scaler.loss_scale)

    def learn_outcome(self, but_last: bool = False) -> None:
        """Let the host know which steps were skipped (`but_last`: without the last): the scale
        moves on, and skips are counted and logged.

        Called before anything that depends on it is read. It may wait for the device, but not where
        no step is skipped. A scale that cannot shrink any more raises.
        """
        while len(self._unknown) > int(but_last):
            outcome = self._unknown.popleft()
            self._overflow = outcome.is_skipped
            self._scaler.update_scale(self._overflow)
            if self._overflow:
                self.skipped_steps += 1
                self._report_skip(outcome.scale)
            else:
                self._applied = outcome

    def _report_skip(self, scale: float) -> None:
        new_scale = self._scaler.loss_scale
        detail = "no loss scaling"
        if scale != new_scale or scale != 1.0:
            detail = f"loss scale {scale:g} -> {new_scale:g}"
        message = (
            f"step skipped on all ranks: the gradient is not finite ({detail}); parameters are "
            "unchanged"
        )
        log_dist(message, ranks=[0], level=logging.WARNING)

    # In files of ZeRO

    def scaler_state(self) -> dict[str, Any]:
        return {
            LOSS_SCALER: self.loss_scaler,
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
        }

    def load_scaler_state(self, saved: Mapping[str, Any]) -> None:
        self.loss_scaler = saved[LOSS_SCALER]
        self.overflow = bool(saved["overflow"])

    def rebuilt_scaler_state(self, scaler: Mapping[str, Any]) -> dict[str, Any]:
        """What a file has where another optimizer's scaler was in this state."""
        own = copy.copy(self.loss_scaler)
        own.go_on_from(scaler)
        return {LOSS_SCALER: own, "overflow": False}

    # What clients ask and set

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped as not finite. Reading it may wait for the device."""
        self.learn_outcome()
        return self._overflow

    @overflow.setter
    def overflow(self, value: bool) -> None:
        self.learn_outcome()
        self._overflow = value

    @property
    def loss_scaler(self) -> LossScalerBase:
        """State machine of the loss scale, after the last step."""
        self.learn_outcome()
        return self._scaler

    @loss_scaler.setter
    def loss_scaler(self, value: LossScalerBase) -> None:
        self.learn_outcome()
        self._scaler = value

    @property
    def global_grad_norm(self) -> float | torch.Tensor | None:
        """Norm of the gradient of the last step that was not skipped, unscaled and before clipping;
        None before the first step, 0 if all so far were skipped.

        A number if it clips, or decides on skipping the step; reading it may then wait for the
        device. Otherwise a 0-d tensor.
        """
        if self._outcome is None:
            return None
        self.learn_outcome()
        if self._applied is None:
            return 0.0
        if self.check_grad_overflow or self.clip_grad > 0:
            return self._applied.host_norm / self._applied.scale
        return self._applied.norm / self._applied.scale

    @property
    def group_grad_norms(self) -> list[float] | None:
        """The `global_grad_norm` of each parameter group; None before the first step. Reading it
        waits.

        Ranks that hold other parts of the model may have other numbers of groups: entry `i` is the
        norm over the `i`-th groups of all that have one, the same on every rank.
        """
        if self._group_squares is None:
            return None
        norms: list[float] = (self._group_squares.sqrt() * self._group_factor).tolist()
        return norms

    @property
    def unread_norms(self) -> UnreadNorms | None:
        """The norms of the last step, skipped or not, without waiting; None before one."""
        last = self._outcome
        if last is None:
            return None
        return UnreadNorms(
            last.norm, last.scale, last.skips, self._group_squares, self._group_factor
        )

    @property
    def loss_scale(self) -> float:
        """The scale that the next loss is multiplied by."""
        # Known already: a scale that moves has moved at the end of the step.
        return self._scaler.loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        return bool(self._scaler.dynamic)

    def needs_scaler(self) -> bool:
        return self.dynamic_loss_scale or self.loss_scale != 1.0

    def scale_if_loss(self, value: T) -> T | torch.Tensor:
        """`value` times the loss scale if it is a loss (a floating tensor with a graph)."""
        if (
            isinstance(value, torch.Tensor)
            and value.is_floating_point()
            and value.requires_grad
            and self.needs_scaler()
        ):
            return value * self.loss_scale
        return value

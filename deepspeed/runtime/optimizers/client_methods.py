"""What clients ask and set of an optimizer that the engine has wrapped: `ClientMethods`."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch

from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from deepspeed.runtime.fp16.loss_scaler import LossScalerBase
from deepspeed.runtime.gradients.accumulation import AccumulationTracker
from deepspeed.runtime.optimizers.step_outcome import (
    StepOutcome,
    UnreadNorms,
)


class ClientMethods(DeepSpeedOptimizer):
    """Norms, the loss scale, skipped steps and the wrapped optimizer's own attributes, under
    upstream's names. `StepSequence` has what they are read from.

    Attributes:
        optimizer: The torch optimizer that does the arithmetic.
        tracker: Who knows what is the boundary.
        clip_grad: Maximum global gradient norm; 0 disables clipping.
        check_grad_overflow: Skip steps whose gradient is not finite.
    """

    optimizer: torch.optim.Optimizer
    tracker: AccumulationTracker
    clip_grad: float
    check_grad_overflow: bool
    _scaler: LossScalerBase
    _overflow: bool
    _outcome: StepOutcome | None
    _applied: StepOutcome | None
    _group_squares: torch.Tensor | None
    _group_norm_factor: float

    @abstractmethod
    def learn_outcome(self, but_last: bool = False) -> None:
        """Hear from the device which steps were skipped, waiting for it."""

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped because the gradient was not finite. Reading it may
        wait for the device.
        """
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
        """As `global_grad_norm`, per parameter group; None before the first step. Reading it waits
        for the device.

        Ranks that hold other parts of the model may have other numbers of groups: entry `i` is the
        norm over the `i`-th groups of all that have one, the same on every rank.
        """
        if self._group_squares is None:
            return None
        norms: list[float] = (self._group_squares.sqrt() * self._group_norm_factor).tolist()
        return norms

    @property
    def unread_norms(self) -> UnreadNorms | None:
        """The norms of the last step, skipped or not, which asking for waits for nothing; None
        before the first step.
        """
        outcome = self._outcome
        if outcome is None:
            return None
        squares, factor = self._group_squares, self._group_norm_factor
        return UnreadNorms(outcome.norm, outcome.scale, outcome.skips, squares, factor)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's parameter groups; learning rates set here take effect."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state."""
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value

    @property
    def defaults(self) -> dict[str, Any]:
        """The wrapped optimizer's default hyper-parameters."""
        return self.optimizer.defaults

    @property
    def loss_scale(self) -> float:
        """The scale that the next loss is multiplied by."""
        # Known already: a scale that moves has moved at the end of the step.
        return self._scaler.loss_scale

    @property
    def cur_scale(self) -> float:
        """Upstream's other name of `loss_scale`."""
        return self.loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale adapts."""
        return bool(self._scaler.dynamic)

    def needs_scaler(self) -> bool:
        """Whether a loss must be scaled before backward."""
        return self.dynamic_loss_scale or self.loss_scale != 1.0

    def scale_if_loss(self, value: Any) -> Any:
        """`value` times the loss scale if it is a loss (a floating tensor with a graph)."""
        is_loss = (
            isinstance(value, torch.Tensor) and value.is_floating_point() and value.requires_grad
        )
        return value * self.loss_scale if is_loss and self.needs_scaler() else value

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Backward of the scaled loss. Prefer `engine.backward`, which also divides by the
        accumulation steps.
        """
        self.scale_if_loss(loss.float()).backward(**kwargs)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch at hand is the last before a step."""
        return self.tracker.is_boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set it from outside."""
        self.tracker.set_boundary(is_boundary)

    @property
    def public_optimizer(self) -> Any:
        """What `deepspeed.initialize` returns as the optimizer: this one."""
        return self

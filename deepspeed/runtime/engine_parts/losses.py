"""By what a loss is divided and scaled before its backward, and who is shown it."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed.runtime.engine_parts.timing import EngineTimers
from deepspeed.runtime.gradients.accumulation import AccumulationTracker
from deepspeed.runtime.optimizers.step_sequence import StepSequence
from deepspeed.utils.exceptions import MisuseError


def check_loss(what: str, loss: Any, needs_graph: bool) -> None:
    """Refuse what no gradient starts from: no tensor of one element, or (`needs_graph`) a leaf."""
    is_scalar = isinstance(loss, torch.Tensor) and loss.numel() == 1
    if not is_scalar or (needs_graph and not loss.requires_grad):
        kind = f"a tensor of {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
        raise MisuseError(
            f"engine.{what}(loss): expected a scalar tensor that the model made, got {kind}. For "
            "other outputs call tensor.backward(gradient)"
        )


class Losses:
    """Losses on their way into backward."""

    def __init__(
        self, tracker: AccumulationTracker, timers: EngineTimers, divides_late: bool
    ) -> None:
        self._tracker, self._timers, self._divides_late = tracker, timers, divides_late

    def late_divisor(self, is_plain: bool = False) -> float:
        """By what the reduction divides; `is_plain` of a backward that the engine was not given."""
        return float(self._tracker.divisor) if is_plain or self._divides_late else 1.0

    def tell_opened(
        self, sequence: StepSequence, loss: torch.Tensor | None, scale_wrt_gas: bool
    ) -> None:
        """Tell the gradients' observer that a backward begins; `loss` is the client's, without loss
        scale and, with `scale_wrt_gas`, without accumulation yet.
        """
        sequence.observer.opened(loss, self._tracker.divisor if scale_wrt_gas else 1)

    def show(self, loss: torch.Tensor, scale_wrt_gas: bool) -> None:
        """Let observers see the loss of a micro-batch as it was before it was divided."""
        if self._timers.observers:
            self._timers.saw_loss(
                loss.detach() if scale_wrt_gas else loss.detach() * self._tracker.divisor
            )

    def divided(self, loss: torch.Tensor, scale_wrt_gas: bool) -> torch.Tensor:
        """Divide by the accumulation steps, unless the caller did."""
        divisor = self._tracker.divisor if scale_wrt_gas else 1
        return loss / divisor if divisor != 1 else loss

    def scaled(
        self, sequence: StepSequence, loss: torch.Tensor, scale_wrt_gas: bool
    ) -> torch.Tensor:
        """Return what backward starts from, divided here or, later, by the reduction."""
        if self._divides_late:
            if not scale_wrt_gas:
                # Backward undoes the caller's division exactly, by starting from its divisor: a
                # leaf has no trace of the steps, which are other ones on other ranks.
                loss = loss * self._tracker.divisor
        else:
            loss = self.divided(loss, scale_wrt_gas)
        # fp32: the scaled loss itself must not overflow in half precision.
        return loss.float() * sequence.loss_scale if sequence.needs_scaler() else loss

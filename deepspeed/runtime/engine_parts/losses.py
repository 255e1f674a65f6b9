"""By what a loss is divided and scaled before its backward, and who is shown it."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed.runtime.engine_parts.sequence import EngineSequence
from deepspeed.runtime.engine_parts.timing import EngineTimers
from deepspeed.runtime.gradients.accumulation import AccumulationTracker
from deepspeed.runtime.optimizers.step_sequence import StepSequence
from deepspeed.utils.exceptions import MisuseError


def check_loss(what: str, loss: Any, needs_graph: bool) -> None:
    """Refuse what has no gradient to start from.

    Raises:
        MisuseError: `loss` is no tensor of one element, or with `needs_graph` nothing made it.
    """
    is_scalar = isinstance(loss, torch.Tensor) and loss.numel() == 1
    if not is_scalar or (needs_graph and not loss.requires_grad):
        kind = f"a tensor of {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
        raise MisuseError(
            f"engine.{what}(loss): expected a scalar tensor that the model made, got {kind}. For "
            "other outputs call tensor.backward(gradient)"
        )


class EngineLosses(EngineSequence):
    """Mixin of `DeepSpeedEngine`: losses on their way into backward.

    Attributes:
        tracker: Knows by how many micro-batches a loss is divided.
        timers: Whose observers see each loss.
    """

    tracker: AccumulationTracker
    timers: EngineTimers

    def _tell_opened(
        self, sequence: StepSequence, loss: torch.Tensor | None, scale_wrt_gas: bool
    ) -> None:
        """Let the gradients' observer know that a backward begins; `loss` is the client's, without
        loss scale and, with `scale_wrt_gas`, without accumulation yet.
        """
        sequence.observer.opened(loss, self.tracker.divisor if scale_wrt_gas else 1)

    def _show_loss(self, loss: torch.Tensor, scale_wrt_gas: bool) -> None:
        """Let observers see the loss of a micro-batch; what the caller has divided by the
        accumulation steps, as it was before.
        """
        if self.timers.observers:
            self.timers.saw_loss(
                loss.detach() if scale_wrt_gas else loss.detach() * self.tracker.divisor
            )

    def _divided(self, loss: torch.Tensor, scale_wrt_gas: bool) -> torch.Tensor:
        divisor = self.tracker.divisor if scale_wrt_gas else 1
        return loss / divisor if divisor != 1 else loss

    def _with_loss_scale(self, loss: torch.Tensor) -> torch.Tensor:
        sequence = self._require_optimizer("backward")
        # fp32: the scaled loss itself must not overflow in half precision.
        return loss.float() * sequence.loss_scale if sequence.needs_scaler() else loss

    def _scaled(self, loss: torch.Tensor, scale_wrt_gas: bool) -> torch.Tensor:
        return self._with_loss_scale(self._divided(loss, scale_wrt_gas))

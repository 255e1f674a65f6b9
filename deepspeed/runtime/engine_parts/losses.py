"""By what a loss is divided and scaled before its backward, and who is shown it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch

from deepspeed import comm as dist
from deepspeed.runtime.engine_parts.timing import EngineTimers
from deepspeed.runtime.gradients.accumulation import AccumulationTracker
from deepspeed.runtime.optimizers.step_sequence import StepSequence
from deepspeed.runtime.step_observers.step_observer import MeanLoss
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


def mean_of_all(
    losses: Sequence[torch.Tensor],
    shape: tuple[int, int],
    rank: int,
    device: torch.device,
    group: dist.Group = None,
) -> torch.Tensor:
    """Mean of the losses of all micro-batches, fp32, 0-dim, on all ranks of `group`, by one
    reduction. Each has a place of its own in a table of `shape`, micro-batches and data-parallel
    ranks, so that the mean does not depend on who has which.
    """
    table = torch.zeros(shape, dtype=torch.float32, device=device)
    if losses:
        table[:, rank] = torch.stack(list(losses))
    dist.all_reduce(table, group=group)
    return table.flatten().mean()


class Losses:
    """Losses on their way into backward.

    Args:
        divides_late: The reduction divides by the accumulation steps.
        keeps: `mean_over` will be asked for.
    """

    def __init__(
        self, tracker: AccumulationTracker, timers: EngineTimers, divides_late: bool, keeps: bool
    ) -> None:
        self._tracker, self._timers, self._divides_late = tracker, timers, divides_late
        self._keeps = keeps
        self._kept = MeanLoss()  # of the step at hand
        self._is_rounded = False  # one of them, by the caller's division

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
        if not (self._timers.observers or self._keeps):
            return
        loss = loss.detach() if scale_wrt_gas else loss.detach() * self._tracker.divisor
        self._timers.saw_loss(loss)
        if self._keeps:
            self._kept.add(loss)
            self._is_rounded |= not scale_wrt_gas and self._tracker.divisor > 1

    def forget(self) -> None:
        """Begin a step."""
        self._kept, self._is_rounded = MeanLoss(), False

    def mean_over(self, group: dist.Group) -> tuple[torch.Tensor | None, int]:
        """Mean of this step's losses on all ranks of `group`, fp32, 0-d, in the order of their
        micro-batches, and of how many (see `StepDigests`). Waits for the device.
        """
        if not self._keeps:
            return None, 0
        told: list[Any] = [None] * dist.get_world_size(group=group)
        own = [float(loss) for loss in self._kept.take_each()]
        dist.all_gather_object(told, (own, self._is_rounded), group=group)
        by_number = zip_longest(*(losses for losses, _ in told))
        losses = [loss for of_ranks in by_number for loss in of_ranks if loss is not None]
        if not losses:
            return None, 0
        # The sum that a pipeline's is of.
        mean = torch.tensor(losses, dtype=torch.float32).mean()
        return mean, 0 if any(is_rounded for _, is_rounded in told) else len(losses)

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
        if sequence.needs_scaler():
            # fp32: the scaled loss itself must not overflow in half precision, nor its gradient,
            # which at the cast is the loss scale if the division stands before it, and then a
            # scale of 2^16, the default, is infinite in fp16.
            loss = loss.float() * sequence.loss_scale
        return loss if self._divides_late else self.divided(loss, scale_wrt_gas)

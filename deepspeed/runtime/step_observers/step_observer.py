"""`StepObserver`, the interface through which monitors and profilers attach to the engine.

An observer must not communicate: ranks may have different ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from deepspeed.runtime.utils import see_memory_usage


class StepObserver:
    """Call order, per micro-batch: inputs, forward starts, forward ended, loss, backward starts,
    reduction starts, reduction ended, backward ended; then, at the boundary: step starts, step
    ended, and in pipelines the batch's loss. Pipelines begin and end a reduction after their last
    backward too. Evaluation has only forwards. Every method may be left out.
    """

    def saw_inputs(self, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """See what a forward in training is about to be given; not on a pipeline's later stages."""

    def forward_starts(self, training: bool) -> None:
        """A forward begins."""

    def forward_ended(self) -> None:
        """It ended; not called for one that raised."""

    def saw_loss(self, loss: torch.Tensor) -> None:
        """See a micro-batch's loss, with its graph, before division; not of a plain backward."""

    def backward_starts(self) -> None:
        """A backward begins."""

    def reduction_starts(self) -> None:
        """Autograd is done; what is left of the reductions follows."""

    def reduction_ended(self) -> None:
        """What was left is issued."""

    def backward_ended(self) -> None:
        """It ended, its reductions are issued."""

    def step_starts(self) -> None:
        """An optimizer step begins."""

    def step_ended(self) -> None:
        """It ended, or was skipped; the engine's counters count it already."""

    def saw_batch_loss(self, loss: torch.Tensor) -> None:
        """See that of a pipeline's batch, after its step: mean over micro-batches and ranks."""

    def close(self) -> None:
        """The engine is destroyed."""


class MeanLoss:
    """Keeps losses on their device: reading one would wait for its forward."""

    def __init__(self) -> None:
        self._losses: list[torch.Tensor] = []

    def add(self, loss: torch.Tensor) -> None:
        """The loss of one micro-batch, one element."""
        self._losses.append(loss.detach().float().sum())  # a copy: the script owns the loss

    def take(self) -> torch.Tensor | None:
        """The mean since the last call, 0-d, fp32, by the sum that a pipeline's is of; None of
        nothing.
        """
        losses = self.take_each()
        return torch.stack(losses).mean() if losses else None

    def take_each(self) -> list[torch.Tensor]:
        """Those since the last call, 0-d, fp32."""
        losses, self._losses = self._losses, []
        return losses


class MemoryBreakdown(StepObserver):
    """Prints `see_memory_usage`; peaks are since the line before, so those of its phase."""

    def forward_starts(self, training: bool) -> None:
        see_memory_usage("before forward", force=True)

    def forward_ended(self) -> None:
        see_memory_usage("after forward", force=True)

    def backward_starts(self) -> None:
        see_memory_usage("before backward", force=True)

    def backward_ended(self) -> None:
        see_memory_usage("after backward", force=True)

    def step_starts(self) -> None:
        see_memory_usage("before step", force=True)

    def step_ended(self) -> None:
        see_memory_usage("after step", force=True)

"""`GradientObserver`: how whoever watches a gradient's life attaches to an optimizer.

The engine and the optimizers say what happens to gradients and do not know who listens. Every
`StepSequence` has one observer, which `StepSequence.observe` exchanges; until then it is
`UNOBSERVED`, whose methods do nothing. They are called unconditionally, at most once per backward,
bucket and step and never per parameter, so that nobody pays for an observer that is not there.

[Note: a gradient's life]
The calls of one optimizer step, in their order:

1. For every backward,
   a. `opened`: `engine.backward` or `engine.scale` takes a loss, or the first gradient of a plain
      `loss.backward()` arrives. Under a schedule: `pass_opened`, and `loss_known` on the rank that
      has the loss, before its gradients flow.
   b. `resumed`, before the first gradient, where clients hold the gradients too (stage 0 without
      masters). After `engine.scale` it follows `opened`, otherwise it comes before.
   c. The gradients arrive. There is no call: an observer that wants to see each puts hooks of its
      own on the parameters. Gradients also come without a or b, when a client calls the model past
      the engine.
   d. `sent`, for some parameters at a time, between gradients or after the last one; again for the
      same ones if more came. Not where all leave at once when the backward is over: none is late.
   e. `closed`: the backward is over or failed. Again after a reduction that comes later.
2. `replaced`, for each parameter whose reduced gradient a client sets.
3. `settled`: the gradients are about to be used, or the step about to be skipped. Stage 0 without
   masters: after every reduction, before `closed`, because clients change `param.grad` themselves
   before the step.
4. `cleared`: the step is over. Also at any other time, when a client forgets all gradients.

`skip_window` comes between two backwards, when a checkpoint brings the gradients of a window that
has begun. `detached` comes last of all.

1 and 2 are said on the rank where they happen, and ranks need not agree; there an observer must
neither communicate nor wait for the device. 3 and 4 come on all ranks that train one model, in the
same order, for skipped steps too; in 3 an observer may communicate with all of them, and raise: no
parameter has changed yet. Nothing here depends on how gradients are laid out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn


class GradientObserver:
    """An observer that hears of nothing; the calls, their ranks: [Note: a gradient's life]."""

    def opened(self, loss: torch.Tensor | None, divisor: float) -> None:
        """Hear that a backward begins of the client's unscaled scalar `loss` (None if nobody scales
        it), which has still to be divided by `divisor`.
        """

    def pass_opened(self, micro_batch: int, chunk: int) -> None:
        """Hear that a schedule's backward of `micro_batch` through a chunk on this rank begins."""

    def loss_known(self, micro_batch: int, loss: torch.Tensor) -> None:
        """The loss of a micro-batch of a schedule, scalar, before it is divided and scaled."""

    def resumed(self, is_empty: Callable[[], bool]) -> None:
        """Hear that a backward adds to gradients that the client may have dropped without a word;
        `is_empty` looks through all parameters whether it did.
        """

    def sent(self, params: Iterable[nn.Parameter]) -> None:
        """Hear that what has arrived for `params` is on its way to its reduction."""

    def closed(self) -> None:
        """The backward is over; what comes later belongs to another one."""

    def replaced(self, param: nn.Parameter) -> None:
        """The client sets the reduced gradient of `param`."""

    def settled(self, factor: float) -> None:
        """Hear that the gradients are complete and will be multiplied by `factor` (and clipped)."""

    def cleared(self) -> None:
        """All gradients are forgotten, reduced or not."""

    def skip_window(self) -> None:
        """Hear that some gradients are of backwards that were not seen (a checkpoint's, say): until
        the next `cleared` nothing can be said of them.
        """

    def detached(self) -> None:
        """No further call comes: remove hooks, let go of tensors."""


UNOBSERVED = GradientObserver()
"""Nobody listens."""

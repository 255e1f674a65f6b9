"""Where reduced gradients lie, and whose contributions they are made of.

Optimizers say the first (`StepSequence.gradient_pieces`), engines the second, to whoever observes
gradients (`observer`). A dense parameter is averaged over the ranks that hold it. One that several
parts of the model share (a weight tied over stages) is used by all of them: its right gradient is
the sum over the parts, each averaged over the ranks that hold the part. Other parameters live on
fewer ranks than the loss is averaged over (experts): their contributions are summed over the ranks
that hold them. The divisor is the same for all: the number of ranks whose losses are averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from deepspeed.comm import Group


class GradientPiece(NamedTuple):
    """Consecutive elements of a parameter whose reduced gradient has the same holders."""

    param: nn.Parameter
    start: int  # offset of the first element
    numel: int
    # returns the reduced gradient, 1-D, as the optimizer holds it; None on ranks that do not hold
    # it
    read: Callable[[], torch.Tensor] | None
    # the narrowest dtype that a sum over micro-batches or ranks passes through
    sums_in: torch.dtype


class Passes(NamedTuple):
    """What a schedule runs in every step, whatever the data."""

    micro_batches: int
    chunks: int  # backwards of each, on this rank
    group: Group  # ranks of which one has the loss


@dataclass(frozen=True)
class GradientScope:
    """The ranks whose contributions make the right gradient of each parameter."""

    num_replicas: int  # ranks whose mean losses are averaged; N of the definition
    holders: Callable[[torch.Tensor], Any]  # the group that holds a parameter and sums its gradient
    everyone: Any  # the group that trains one model
    device: torch.device  # of the model, for a rank that has no trainable parameter to ask
    # parameters that other parts of the model use too, each with a group of one rank of each part;
    # in one order on all
    shared: Sequence[tuple[nn.Parameter, Any]] = ()
    passes: Passes | None = None  # what a schedule runs; None where the client calls backward

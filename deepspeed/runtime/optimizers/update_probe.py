"""What an unknown optimizer looks at when it updates an element, found out on small tensors: an
update of each element by itself is right on flat shards, and any other silently wrong.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from enum import Enum
from numbers import Number
from typing import Any

import torch
from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.optimizers.step_outcome import begin_adagrad
from deepspeed.utils.logging import logger

# Some begin with another rule: warmups of variances, preconditioners that come late.
_STEPS = 32
_SHAPES = ((6, 10), (4, 3))
# A warmup may start with 0, with which nothing moves.
_LR = 0.05
# Of the way that a tensor has gone. In double precision, so that short ways count too: some start
# with a rate of a millionth and find their own.
_TOLERANCE = 1e-5


class Update(Enum):
    """What the update of an element depends on."""

    ELEMENTWISE = "that element alone"
    BY_PARAMETER = "the parameter that it is of"
    COUPLED = "other parameters"
    UNKNOWN = "something that small tensors do not show"


def update_of(optimizer: torch.optim.Optimizer) -> Update:
    """Say what the updates of `optimizer`, which stays unchanged, depend on, tried with the options
    of each group. Unknown is what fails on small tensors, or moves none.
    """
    # Gradients that all go one way, and such as do not: some learn their rate from that.
    found = [
        _update_with(optimizer, group, drift)
        for group in optimizer.param_groups
        for drift in (0.0, 1.0)
    ]
    for update in (Update.COUPLED, Update.UNKNOWN, Update.BY_PARAMETER):
        if update in found:
            return update
    return Update.ELEMENTWISE


def _update_with(optimizer: torch.optim.Optimizer, group: dict[str, Any], drift: float) -> Update:
    params = group["params"]
    device = params[0].device if params else torch.device("cpu")
    values, grads = _problem(drift, device)
    try:
        alone = _way(optimizer, group, values[:1], [step[:1] for step in grads])
        beside = _way(optimizer, group, values, grads)
    except Exception as error:  # whatever a client's optimizer raises
        logger.debug("%s could not be tried: %s", type(optimizer).__name__, error)
        return Update.UNKNOWN
    if not alone.any():
        return Update.UNKNOWN
    if not _close(alone, beside):
        return Update.COUPLED
    try:
        flat = _way(optimizer, group, [_flat(values)], [[_flat(step)] for step in grads])
    except Exception as error:  # as above; it wants a matrix, say
        logger.debug("%s fails on vectors: %s", type(optimizer).__name__, error)
        return Update.BY_PARAMETER
    return Update.ELEMENTWISE if _close(alone, flat) else Update.BY_PARAMETER


def _problem(
    drift: float, device: torch.device
) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    """Make two tensors, and their gradients of each step, unlike each other in size and scale, so
    that norms and factors of both differ from those of one.
    """
    generator = torch.Generator().manual_seed(11)

    def drawn(shape: Sequence[int]) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device)

    values = [drawn(shape).mul_(10.0**number) for number, shape in enumerate(_SHAPES)]
    mean = [drawn(shape).mul_(drift) for shape in _SHAPES]
    grads = [[drawn(one.shape).add_(one) for one in mean] for _ in range(_STEPS)]
    # Some look whether a gradient is nearly orthogonal to its weights.
    for grad, value in zip(grads[0], values, strict=True):
        along = (grad * value).sum(1, True) / value.square().sum(1, True)
        grad.sub_(value * along, alpha=0.98)
    return values, grads


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _close(left: torch.Tensor, right: torch.Tensor) -> bool:
    return bool((left - right).norm() <= _TOLERANCE * left.norm())


def _way(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    values: Sequence[torch.Tensor],
    grads: Sequence[Sequence[torch.Tensor]],
) -> torch.Tensor:
    """Measure how far an optimizer like this moves elements of the first shape in `values`."""
    params = [nn.Parameter(value.clone()) for value in values]
    probe = object.__new__(type(optimizer))
    probe.__dict__.update(vars(optimizer))
    options = {**group, "params": params}
    if isinstance(options.get("lr"), Number | torch.Tensor):
        options["lr"] = _LR
    probe.param_groups = [options]
    probe.state = defaultdict(dict)
    accelerator = get_accelerator()
    outer = accelerator.get_rng_state()
    try:
        with torch.random.fork_rng(devices=[]):  # the host's
            torch.manual_seed(7)  # devices too; slow, so it is done once
            seeded = accelerator.get_rng_state(), torch.get_rng_state()
            for step in grads:
                accelerator.set_rng_state(seeded[0])
                torch.set_rng_state(seeded[1])
                for param, grad in zip(params, step, strict=True):
                    param.grad = grad.clone()
                begin_adagrad(probe)
                # The class's: a schedule has put a counter before the instance's.
                type(optimizer).step(probe)
    finally:
        accelerator.set_rng_state(outer)
    moved = (params[0].detach() - values[0]).reshape(-1)
    return moved[: math.prod(_SHAPES[0])]

"""What an optimizer that nobody has named looks at when it updates an element: found out by letting
it update small tensors.

ZeRO gives an optimizer one flat shard per group, in which parts of several parameters lie. That is
right for an update of each element by itself, and silently wrong for any other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from enum import Enum
from numbers import Number
from typing import Any

import torch
from torch import nn

from deepspeed.utils.logging import logger

_STEPS = 3
_SHAPES = ((6, 10), (4, 3))
# Large enough for a difference to show; a warmup may start with 0.
_LR = 0.05


class Update(Enum):
    """What the update of an element depends on."""

    ELEMENTWISE = "that element alone"
    BY_PARAMETER = "the parameter that it is of"
    COUPLED = "other parameters"


def update_of(optimizer: torch.optim.Optimizer) -> Update:
    """What the updates of `optimizer` depend on, tried with the options of each of its groups.

    The optimizer itself is not changed. One that fails on small tensors is taken for one that looks
    at whole parameters: that gives it what it expects.
    """
    found = Update.ELEMENTWISE
    for group in optimizer.param_groups:
        update = _update_with(optimizer, group)
        if update is Update.COUPLED:
            return update
        if update is Update.BY_PARAMETER:
            found = update
    return found


def _update_with(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Update:
    params = group["params"]
    device = params[0].device if params else torch.device("cpu")
    generator = torch.Generator().manual_seed(11)
    # Unlike each other in size and scale, so that norms and factors of both differ from those of
    # one.
    values = [
        torch.randn(shape, generator=generator).mul_(10.0**number).to(device)
        for number, shape in enumerate(_SHAPES)
    ]
    grads = [
        [torch.randn(value.shape, generator=generator).mul_(3.0).to(device) for value in values]
        for _ in range(_STEPS)
    ]
    try:
        alone = _stepped(optimizer, group, values[:1], [step[:1] for step in grads])[0]
        beside = _stepped(optimizer, group, values, grads)[0]
        flat = _stepped(optimizer, group, [_flat(values)], [[_flat(step)] for step in grads])[0]
    except Exception as error:  # whatever a client's optimizer raises
        logger.debug("%s could not be tried: %s", type(optimizer).__name__, error)
        return Update.BY_PARAMETER
    if not _close(alone, beside):
        return Update.COUPLED
    is_elementwise = _close(alone.reshape(-1), flat[: alone.numel()])
    return Update.ELEMENTWISE if is_elementwise else Update.BY_PARAMETER


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _close(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.allclose(left, right, rtol=1e-5, atol=1e-6)


def _stepped(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    values: Sequence[torch.Tensor],
    grads: Sequence[Sequence[torch.Tensor]],
) -> list[torch.Tensor]:
    """Values after steps of an optimizer like this one."""
    params = [nn.Parameter(value.clone()) for value in values]
    probe = object.__new__(type(optimizer))
    probe.__dict__.update(vars(optimizer))
    options = {**group, "params": params}
    if isinstance(options.get("lr"), Number | torch.Tensor):
        options["lr"] = _LR
    probe.param_groups = [options]
    probe.state = defaultdict(dict)
    with torch.random.fork_rng(devices=[]):
        for step in grads:
            torch.manual_seed(7)
            for param, grad in zip(params, step, strict=True):
                param.grad = grad.clone()
            # The class's: a schedule has put a counter before the instance's.
            type(optimizer).step(probe)
    return [param.detach() for param in params]

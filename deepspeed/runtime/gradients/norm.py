"""Global gradient norm, clipping and the non-finite check: one fp32 local pass, one collective of
one small tensor.

It holds one squared sum per parameter group, as many on every rank as the rank with most groups
has. Each logical element counts once: padding is zero, and replicas are left out by the caller's
selection.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import torch

from deepspeed import comm as dist
from deepspeed.comm.watch import lone_waits
from deepspeed.ops.squares import IN_ORDER, Squares

# Added to the norm before it divides, as torch.nn.utils.clip_grad_norm_ does.
CLIP_EPSILON = 1e-6
# Where it is known: on the host or on a device.
Norm = TypeVar("Norm", float, torch.Tensor)


def joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join neighbours of ascending ranges `[start, end)`: one operation for a long slice's norm."""
    found: list[tuple[int, int]] = []
    for start, end in ranges:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return found


def local_squared_norm(
    grads: Iterable[torch.Tensor],
    device: torch.device,
    counted_elsewhere: Iterable[torch.Tensor] = (),
    squares: Squares = IN_ORDER,
) -> torch.Tensor:
    """Sum the squares of all elements of `grads`: a row of `squares.zeros`, on `device`.

    Copies of what another rank counts (`counted_elsewhere`) add nothing, but one that is not finite
    here makes the result NaN: were it only so on this rank, all others would step and this one's
    parameters would be lost.
    """
    total = _squared(grads, device, squares)
    others = list(counted_elsewhere)
    return total + 0.0 * _squared(others, device, squares) if others else total


def _squared(grads: Iterable[torch.Tensor], device: torch.device, squares: Squares) -> torch.Tensor:
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for grad in grads:
        if grad.numel():
            by_device.setdefault(grad.device, []).append(grad)
    total = squares.zeros(1, device)
    for tensors in by_device.values():
        total += squares.of(tensors).to(device, non_blocking=True)
    return total


def reduce_squared_norm(squared: torch.Tensor, group: dist.Group) -> torch.Tensor:
    """Sum over the ranks of `group`, in place: the one small collective of a step."""
    if group is not None and dist.get_world_size(group=group) > 1:
        with lone_waits.watch.waiting(lambda: "the norm of the gradients"):
            dist.all_reduce(squared, op=dist.ReduceOp.SUM, group=group)
    return squared


def clip_factor(norm: Norm, max_norm: float) -> Norm | float:
    """Return by what a gradient of this (unscaled) norm is multiplied so that the norm is at most
    `max_norm`; 0 disables. A norm that is a tensor stays where it is, and so does the factor; NaN
    clips nothing.
    """
    if max_norm <= 0:
        return 1.0
    factor = max_norm / (norm + CLIP_EPSILON)
    if isinstance(factor, torch.Tensor):
        return torch.where(factor < 1.0, factor, 1.0)
    return min(1.0, factor)

"""Whether all ranks say the same: one small collective, and an error on all of them if not."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.failures import reports
from deepspeed.comm.watch import lone_waits
from deepspeed.runtime.zero.parameters.zero_parameter import is_zero_param, record_of


def agree(
    said: object,
    group: dist.Group,
    what: Callable[[], str],
    difference: Callable[[Sequence[Any]], str],
    beside: torch.Tensor | None = None,
    told_too: dist.Group = None,
) -> bool:
    """Compare what the ranks of `group` say. All of them call it.

    Args:
        said: Anything whose `repr` is the same where it is the same.
        what: What this rank waits for while others do not come, in words.
        difference: The error's text, from what all ranks have said, in their order.
        beside: A number, 0-dim int64, that ranks may have otherwise; whether they do not is
            returned.
        told_too: Ranks of several such groups, all of which call it and raise RuntimeError
            together.
    """
    error, is_alike = _compared(said, group, what, difference, beside)
    if told_too is None or dist.get_world_size(group=told_too) == dist.get_world_size(group=group):
        if error is not None:
            raise RuntimeError(error)
        return is_alike
    told = reports(error, told_too, what)
    if told:
        raise RuntimeError(error or told[0][1])
    return is_alike


def _compared(
    said: object,
    group: dist.Group,
    what: Callable[[], str],
    difference: Callable[[Sequence[Any]], str],
    beside: torch.Tensor | None,
) -> tuple[str | None, bool]:
    """The error's text, if ranks differ; and whether they have the same number `beside`."""
    told, is_alike = _told(said, group, what, beside)
    return (None if len(told) == 1 else difference(told)), is_alike


def said_by_all(said: object, group: dist.Group, what: Callable[[], str]) -> list[Any]:
    """Collect what all ranks of `group` say, in their order; once if all say the same."""
    return _told(said, group, what, None)[0]


def _told(
    said: object, group: dist.Group, what: Callable[[], str], beside: torch.Tensor | None
) -> tuple[list[Any], bool]:
    if dist.get_world_size(group=group) == 1:
        return [said], True
    own = int.from_bytes(hashlib.sha256(repr(said).encode()).digest()[:7], "big")
    agreed = torch.tensor([own, -own], device=get_accelerator().current_device_name())
    if beside is not None:
        agreed = torch.cat([agreed, torch.stack([beside, -beside]).to(agreed.device)])
    with lone_waits.watch.waiting(what):
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=group)
        most, least, *others = agreed.tolist()
    if most == -least:
        return [said], not others or others[0] == -others[1]
    told: list[Any] = [None] * dist.get_world_size(group=group)
    dist.all_gather_object(told, said, group=group)
    return told, False


def agree_on_parameters(
    described: Sequence[tuple[str, str]],
    group: dist.Group,
    what: str,
    difference: str,
    beside: torch.Tensor | None = None,
    told_too: dist.Group = None,
) -> bool:
    """Compare names and properties of parameters by `agree`, naming the first that differs: ranks
    would put together nonsense, or wait for ever. `difference` begins the error.
    """

    def told(said: Sequence[Any]) -> str:
        by_rank = [dict(params) for params in said]
        names = dict.fromkeys(name for params in by_rank for name in params)
        first = next(
            (name for name in names if len({params.get(name) for params in by_rank}) > 1), None
        )
        if first is None:
            return f"{difference}: the same parameters in another order; build the model alike"
        return f"{difference}: {first} is " + ", ".join(
            f"{params.get(first, 'not there')} on rank {dist.get_global_rank(group, rank)}"
            for rank, params in enumerate(by_rank)
        )

    return agree(list(described), group, lambda: what, told, beside, told_too)


def described(param: nn.Parameter) -> str:
    """List what ranks have to have in common of a parameter."""
    shape = record_of(param).shape if is_zero_param(param) else param.shape
    return f"{'' if param.requires_grad else 'frozen '}{tuple(shape)} of {param.dtype}"

"""Whether all ranks say the same: one small collective, and an error on all of them if not."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.comm import lone_waits


def agree(
    said: Any,
    group: dist.Group,
    what: Callable[[], str],
    difference: Callable[[Sequence[Any]], str],
) -> None:
    """Compare what the ranks of `group` say. All of them call it.

    Args:
        said: Anything whose `repr` is the same where it is the same.
        group: Who compares.
        what: What this rank waits for while others do not come, in words.
        difference: The error's text, from what all ranks have said, in their order.

    Raises:
        RuntimeError: On all ranks.
    """
    if dist.get_world_size(group=group) == 1:
        return
    own = int.from_bytes(hashlib.sha256(repr(said).encode()).digest()[:7], "big")
    agreed = torch.tensor([own, -own], device=get_accelerator().current_device_name())
    with lone_waits.watch.waiting(what):
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=group)
        most, least = agreed.tolist()
    if most == -least:
        return
    told: list[Any] = [None] * dist.get_world_size(group=group)
    dist.all_gather_object(told, said, group=group)
    raise RuntimeError(difference(told))

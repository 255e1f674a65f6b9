"""Refuses parameters without a gradient (`zero_optimization.ignore_unused_parameters` false)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepspeed import comm as dist
from deepspeed.comm.watch import lone_waits
from deepspeed.runtime.gradients.reduction import GradientContext


def refuse_unused(unused: Sequence[str], context: GradientContext) -> None:
    """Raise if any rank has parameters without a gradient. All ranks call it when they have sent
    the same buckets.

    Args:
        unused: Names of this rank's.
        context: Of the gradients.

    Raises:
        RuntimeError: On all ranks.
    """
    group = context.dp_process_group
    most = torch.tensor(len(unused), device=context.device)
    with lone_waits.watch.waiting(lambda: "what ranks say of parameters without a gradient"):
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    if not most.item():
        return
    told: list[list[str]] = [[] for _ in range(dist.get_world_size(group=group))]
    dist.all_gather_object(told, list(unused), group=group)
    found = "; ".join(
        f"{', '.join(names)} on rank {dist.get_global_rank(group, rank)}"
        for rank, names in enumerate(told)
        if names
    )
    raise RuntimeError(
        f"no gradient reached {found}; zero_optimization.ignore_unused_parameters is false. Set it "
        "to true to count them as zero, or let every trainable parameter take part in the loss"
    )

"""What fails on one rank is told to all, which raise together instead of waiting for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.comm import comm as dist
from deepspeed.comm.watch import lone_waits


def reports(
    own: Any,
    group: dist.Group,
    what: Callable[[], str],
    device: torch.device | str | None = None,
    meeting: int = 0,
) -> list[tuple[int, Any]]:
    """Return what the ranks of `group` report, as (rank, report); None is no report. All of them
    call it: one collective of one number where nobody has anything to report.

    Args:
        what: What this rank waits for while others do not come, in words.
        device: Of the collective's number; None: the current one.
        meeting: Of `lone_waits`, if the others may take long.
    """
    if dist.get_world_size(group=group) == 1:
        return [] if own is None else [(dist.get_rank(), own)]
    device = device or get_accelerator().current_device_name()
    anywhere = torch.tensor([int(own is not None)], dtype=torch.int32, device=device)
    with lone_waits.watch.waiting(what, meeting):
        dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=group)
        if not anywhere.item():
            return []
    told: list[Any] = [None] * dist.get_world_size(group=group)
    dist.all_gather_object(told, own, group=group)
    ranks = dist.get_all_ranks_from_group(group)
    return [(rank, said) for rank, said in zip(ranks, told, strict=True) if said is not None]


def raise_disk_error(own: OSError | None, group: dist.Group) -> None:
    """Raise if a rank of `group` had an error of its disk: on all of them the first such rank's,
    with the file's name and the rank. All of them call it, at the same place in the step.

    Who has met an error takes part in the collectives up to here that others wait for in.
    """
    said = None if own is None else (own.errno, own.strerror or str(own), own.filename)
    found = reports(said, group, lambda: "what the disks of all ranks have done")
    if found:
        rank, (code, reason, name) = found[0]
        others = f", as on {len(found) - 1} other ranks" if len(found) > 1 else ""
        raise OSError(code, f"{reason} (rank {rank}{others})", name) from own

"""Collectives in which the host itself takes part: pickled objects and barriers; see `collectives`.

On a device whose work is deferred they come after everything that was issued.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_dist

from deepspeed.comm.process_groups import Group
from deepspeed.comm.watch import observation
from deepspeed.comm.watch.observation import Handle, observed


def all_gather_object(
    object_list: list[Any],
    obj: Any,
    group: Group = None,
    prof: bool = False,
    log_name: str = "all_gather_object",
    debug: str | None = None,
) -> None:
    """Fill ``object_list`` with every rank's ``obj``, pickled in between."""
    if observation.chain is None:
        torch_dist.all_gather_object(object_list, obj, group)
        return
    args = (object_list, obj, group)
    observed(
        "all_gather_object", torch_dist.all_gather_object, args, group, (), log_name, prof, debug
    )


def broadcast_object_list(
    object_list: list[Any], src: int, group: Group = None, device: torch.device | None = None
) -> None:
    """Replace the entries of ``object_list`` by those of global rank ``src``, pickled in
    between.
    """
    if observation.chain is None:
        torch_dist.broadcast_object_list(object_list, src, group, device)
        return
    args = (object_list, src, group, device)
    observed("broadcast_object_list", torch_dist.broadcast_object_list, args, group)


def barrier(
    group: Group = None,
    async_op: bool = False,
    device_ids: list[int] | None = None,
    prof: bool = False,
    log_name: str = "barrier",
    debug: str | None = None,
) -> Handle:
    """Wait until every rank of the group is here."""
    if observation.chain is None:
        return torch_dist.barrier(group, async_op, device_ids)
    args = (group, async_op, device_ids)
    return observed("barrier", torch_dist.barrier, args, group, (), log_name, prof, debug)


def monitored_barrier(
    group: Group = None,
    timeout: timedelta | None = None,
    wait_all_ranks: bool = False,
    prof: bool = False,
    log_name: str = "monitored_barrier",
    debug: str | None = None,
) -> None:
    """`barrier` that names the ranks that did not come in time (gloo only)."""
    if observation.chain is None:
        torch_dist.monitored_barrier(group, timeout, wait_all_ranks)
        return
    args = (group, timeout, wait_all_ranks)
    observed(
        "monitored_barrier", torch_dist.monitored_barrier, args, group, (), log_name, prof, debug
    )

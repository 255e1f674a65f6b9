"""Operations on tensors and between hosts, with upstream's names and argument order.

Every operation is torch.distributed's own; `issue` sends it past whoever watches. Ranks that name a
source or a destination are global ranks, in every group. Users call these through `deepspeed.comm`.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as torch_dist
from torch.distributed import ReduceOp
from torch.distributed import distributed_c10d as _c10d

from deepspeed.comm.process_groups import Group, get_backend_name
from deepspeed.comm.torch import all_gather_flat, reduce_scatter_flat
from deepspeed.comm.watch.observation import Handle, issue

__all__ = [
    "Handle",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "allgather_fn",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "inference_all_reduce",
    "irecv",
    "isend",
    "monitored_barrier",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_fn",
    "reduce_scatter_tensor",
    "scatter",
    "send",
    "WorkList",
]


def all_reduce(
    tensor: torch.Tensor,
    op: object = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_reduce",
    debug: str | None = None,
) -> Handle:
    """Reduce ``tensor`` over the group, in place, on every rank."""
    args = (tensor, op, group, async_op)
    return issue("all_reduce", torch_dist.all_reduce, args, log_name, prof, debug)


inference_all_reduce = all_reduce


def reduce(
    tensor: torch.Tensor,
    dst: int,
    op: object = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "reduce",
    debug: str | None = None,
) -> Handle:
    """Reduce ``tensor`` onto global rank ``dst``; the others' contents are undefined afterwards."""
    args = (tensor, dst, op, group, async_op)
    return issue("reduce", torch_dist.reduce, args, log_name, prof, debug)


def reduce_scatter_tensor(
    output_tensor: torch.Tensor,
    tensor: torch.Tensor,
    op: object = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "reduce_scatter_tensor",
    debug: str | None = None,
) -> Handle:
    """Reduce ``tensor`` ([world * n]) and leave each rank its slice in ``output_tensor`` ([n])."""
    args = (output_tensor, tensor, op, group, async_op)
    return issue("reduce_scatter_tensor", reduce_scatter_flat, args, log_name, prof, debug)


def reduce_scatter_fn(
    output_tensor: torch.Tensor,
    tensor: torch.Tensor,
    op: object = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    debug: str | None = None,
) -> Handle:
    """`reduce_scatter_tensor` under upstream's older name."""
    return reduce_scatter_tensor(output_tensor, tensor, op, group, async_op, prof, debug=debug)


def reduce_scatter(
    output: torch.Tensor,
    input_list: list[torch.Tensor],
    op: object = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "reduce_scatter",
    debug: str | None = None,
) -> Handle:
    """Reduce the i-th tensor of ``input_list`` onto rank i's ``output``."""
    args = (output, input_list, op, group, async_op)
    return issue("reduce_scatter", torch_dist.reduce_scatter, args, log_name, prof, debug)


def all_gather(
    tensor_list: list[torch.Tensor],
    tensor: torch.Tensor,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_gather",
    debug: str | None = None,
) -> Handle:
    """Fill ``tensor_list`` with every rank's ``tensor``."""
    args = (tensor_list, tensor, group, async_op)
    return issue("all_gather", torch_dist.all_gather, args, log_name, prof, debug)


def all_gather_into_tensor(
    output_tensor: torch.Tensor,
    tensor: torch.Tensor,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_gather_into_tensor",
    debug: str | None = None,
) -> Handle:
    """Fill ``output_tensor`` ([world * n]) with every rank's ``tensor`` ([n])."""
    args = (output_tensor, tensor, group, async_op)
    return issue("all_gather_into_tensor", all_gather_flat, args, log_name, prof, debug)


def allgather_fn(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: Group = None,
    async_op: bool = False,
    debug: str | None = None,
) -> Handle:
    """`all_gather_into_tensor` under upstream's older name."""
    return all_gather_into_tensor(output_tensor, input_tensor, group, async_op, debug=debug)


def gather(
    tensor: torch.Tensor,
    gather_list: list[torch.Tensor] | None = None,
    dst: int = 0,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "gather",
    debug: str | None = None,
) -> Handle:
    """Collect every rank's ``tensor`` in ``gather_list`` of global rank ``dst``, None elsewhere."""
    args = (tensor, gather_list, dst, group, async_op)
    return issue("gather", torch_dist.gather, args, log_name, prof, debug)


def broadcast(
    tensor: torch.Tensor,
    src: int,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "broadcast",
    debug: str | None = None,
) -> Handle:
    """Copy ``tensor`` of global rank ``src`` into that of every rank of the group."""
    args = (tensor, src, group, async_op)
    return issue("broadcast", torch_dist.broadcast, args, log_name, prof, debug)


def scatter(
    tensor: torch.Tensor,
    scatter_list: list[torch.Tensor] | None = None,
    src: int = 0,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "scatter",
    debug: str | None = None,
) -> Handle:
    """Fill rank i's ``tensor`` with the i-th of global rank ``src``'s list, None elsewhere."""
    args = (tensor, scatter_list, src, group, async_op)
    return issue("scatter", torch_dist.scatter, args, log_name, prof, debug)


def all_to_all_single(
    output: torch.Tensor,
    tensor: torch.Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_to_all_single",
    debug: str | None = None,
) -> Handle:
    """Send the i-th split of ``tensor`` to rank i, receive rank i's split into ``output``."""
    args = (output, tensor, output_split_sizes, input_split_sizes, group, async_op)
    return issue("all_to_all_single", torch_dist.all_to_all_single, args, log_name, prof, debug)


def all_to_all(
    output_tensor_list: list[torch.Tensor],
    input_tensor_list: list[torch.Tensor],
    group: Group = None,
    async_op: bool = False,
) -> Handle:
    """Send the i-th input to rank i and receive its tensor for this rank into the i-th output."""
    args = (output_tensor_list, input_tensor_list, group, async_op)
    return issue("all_to_all", torch_dist.all_to_all, args)


def send(
    tensor: torch.Tensor,
    dst: int,
    group: Group = None,
    tag: int = 0,
    prof: bool = False,
    log_name: str = "send",
    debug: str | None = None,
) -> None:
    """Send ``tensor`` to global rank ``dst`` and wait until it may be changed."""
    issue("send", torch_dist.send, (tensor, dst, group, tag), log_name, prof, debug)


def recv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    prof: bool = False,
    log_name: str = "recv",
    debug: str | None = None,
) -> int:
    """Receive ``tensor`` from global rank ``src`` (None: any); returns the sender's global rank."""
    return int(issue("recv", torch_dist.recv, (tensor, src, group, tag), log_name, prof, debug))


def isend(
    tensor: torch.Tensor,
    dst: int,
    group: Group = None,
    tag: int = 0,
    prof: bool = False,
    log_name: str = "isend",
    debug: str | None = None,
) -> Handle:
    """`send` that returns a handle at once; ``tensor`` must not change before it was waited for."""
    return issue("isend", torch_dist.isend, (tensor, dst, group, tag), log_name, prof, debug)


def irecv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    prof: bool = False,
    log_name: str = "irecv",
    debug: str | None = None,
) -> Handle:
    """`recv` that returns a handle at once; ``tensor`` is undefined before it was waited for."""
    return issue("irecv", torch_dist.irecv, (tensor, src, group, tag), log_name, prof, debug)


def all_gather_object(
    object_list: list[Any],
    obj: object,
    group: Group = None,
    prof: bool = False,
    log_name: str = "all_gather_object",
    debug: str | None = None,
) -> None:
    """Fill ``object_list`` with every rank's ``obj``, pickled in between."""
    args = (object_list, obj, group)
    issue("all_gather_object", torch_dist.all_gather_object, args, log_name, prof, debug)


def broadcast_object_list(
    object_list: list[Any], src: int, group: Group = None, device: torch.device | None = None
) -> None:
    """Replace the entries of ``object_list`` by those of global rank ``src``, pickled."""
    args = (object_list, src, group, device)
    issue("broadcast_object_list", torch_dist.broadcast_object_list, args)


def barrier(
    group: Group = None,
    async_op: bool = False,
    device_ids: list[int] | None = None,
    prof: bool = False,
    log_name: str = "barrier",
    debug: str | None = None,
) -> Handle:
    """Wait until every rank of the group is here."""
    args = (group, async_op, device_ids)
    return issue("barrier", torch_dist.barrier, args, log_name, prof, debug)


def monitored_barrier(
    group: Group = None,
    timeout: timedelta | None = None,
    wait_all_ranks: bool = False,
    prof: bool = False,
    log_name: str = "monitored_barrier",
    debug: str | None = None,
) -> None:
    """`barrier` that names the ranks that did not come in time (gloo only)."""
    args = (group, timeout, wait_all_ranks)
    issue("monitored_barrier", torch_dist.monitored_barrier, args, log_name, prof, debug)


class WorkList:
    """One handle for several operations."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = [work for work in works if work is not None]

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all of them."""
        for work in self._works:
            work.wait() if timeout is None else work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        """Whether all of them are complete."""
        return all(work.is_completed() for work in self._works)


def all_reduce_coalesced(
    tensors: list[torch.Tensor],
    op: object = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_reduce_coalesced",
    debug: str | None = None,
) -> Handle:
    """`all_reduce` of each tensor, issued together. Collective in number and order of tensors."""
    args = (tensors, op, group, async_op)
    return issue("all_reduce_coalesced", _all_reduce_each, args, log_name, prof, debug)


def all_gather_coalesced(
    output_tensors: list[torch.Tensor],
    input_tensors: list[torch.Tensor],
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_gather_coalesced",
    debug: str | None = None,
) -> Handle:
    """`all_gather_into_tensor` of each pair, issued together. Collective in number and order."""
    args = (output_tensors, input_tensors, group, async_op)
    return issue("all_gather_coalesced", _all_gather_each, args, log_name, prof, debug)


def _all_reduce_each(
    tensors: list[torch.Tensor], op: object, group: Group, async_op: bool
) -> Handle:
    issues = [partial(torch_dist.all_reduce, one, op, group, True) for one in tensors]
    return _together(issues, group, async_op)


def _all_gather_each(
    output_tensors: list[torch.Tensor],
    input_tensors: list[torch.Tensor],
    group: Group,
    async_op: bool,
) -> Handle:
    pairs = zip(output_tensors, input_tensors, strict=True)
    issues = [partial(all_gather_flat, output, own, group, True) for output, own in pairs]
    return _together(issues, group, async_op)


def _together(issues: Sequence[Callable[[], Any]], group: Group, async_op: bool) -> Handle:
    """Issue operations as one where the backend can, else one after the other without waiting."""
    if not issues:
        return WorkList([]) if async_op else None
    # gloo runs a coalesced block operation by operation and gives a handle for the last one only.
    if get_backend_name(group) == "nccl":
        with _c10d._coalescing_manager(group=group, async_ops=True) as block:
            for one in issues:
                one()
        works = WorkList([block])
    else:
        works = WorkList([one() for one in issues])
    if async_op:
        return works
    works.wait()
    return None

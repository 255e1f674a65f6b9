"""Collectives and process groups, with upstream's names and argument order.

Every operation is torch.distributed's own. When nothing watches (the usual case) a call costs one
comparison more than torch's; otherwise it goes through the observers of
`deepspeed.comm.observation`. World size 1 is no special case.

Users call these through `deepspeed.comm`; `deepspeed.comm.comm` is the module they know. Ranks that
name a source or a destination are global ranks, in every group.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as torch_dist
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed import distributed_c10d as _c10d

from deepspeed.comm.observation import CollectiveCall, CollectiveObserver, ObserverChain
from deepspeed.comm.process_groups import get_backend_name, get_world_size
from deepspeed.comm.torch import all_gather_flat, reduce_scatter_flat
from deepspeed.comm.utils import message_bytes

Group = ProcessGroup | None
Handle = Any  # torch's Work, or None when the operation is complete or this rank takes no part

# None while nobody watches: the operations test this one name and call torch.
_observers: ObserverChain | None = None


def add_observer(observer: CollectiveObserver, innermost: bool = False) -> None:
    """Send every operation from now on through ``observer`` too; nothing happens if it is one
    already.

    Args:
        observer: is called around every operation, in the order of issue.
        innermost: next to torch, inside all others; otherwise outside of all that are there.
    """
    global _observers
    _observers = (_observers or ObserverChain(())).with_observer(observer, innermost)


def remove_observer(observer: CollectiveObserver) -> None:
    """Stop sending operations through ``observer``; nothing happens if it is none."""
    global _observers
    _observers = _observers and _observers.without_observer(observer)


def is_observed_by(observer: CollectiveObserver) -> bool:
    """Whether operations go through ``observer``."""
    return _observers is not None and observer in _observers.observers


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


# -- reductions ------------------------------------------------------------------------------------


def all_reduce(
    tensor: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_reduce",
    debug: str | None = None,
) -> Handle:
    """Reduce ``tensor`` over the group, in place, on every rank."""
    if _observers is None:
        return torch_dist.all_reduce(tensor, op, group, async_op)
    args = (tensor, op, group, async_op)
    return _observers.run(
        CollectiveCall(
            "all_reduce",
            torch_dist.all_reduce,
            args,
            group,
            message_bytes(tensor),
            log_name,
            prof,
            debug,
        )
    )


inference_all_reduce = all_reduce


def reduce(
    tensor: torch.Tensor,
    dst: int,
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "reduce",
    debug: str | None = None,
) -> Handle:
    """Reduce ``tensor`` onto global rank ``dst``; its contents on the others are undefined
    afterwards.
    """
    if _observers is None:
        return torch_dist.reduce(tensor, dst, op, group, async_op)
    args = (tensor, dst, op, group, async_op)
    return _observers.run(
        CollectiveCall(
            "reduce", torch_dist.reduce, args, group, message_bytes(tensor), log_name, prof, debug
        )
    )


def reduce_scatter_tensor(
    output_tensor: torch.Tensor,
    tensor: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "reduce_scatter_tensor",
    debug: str | None = None,
) -> Handle:
    """Reduce ``tensor`` ([world * n]) and leave each rank its slice in ``output_tensor`` ([n])."""
    if _observers is None:
        return reduce_scatter_flat(output_tensor, tensor, op, group, async_op)
    args = (output_tensor, tensor, op, group, async_op)
    name = "reduce_scatter_tensor"
    return _observers.run(
        CollectiveCall(
            name, reduce_scatter_flat, args, group, message_bytes(tensor), log_name, prof, debug
        )
    )


def reduce_scatter_fn(
    output_tensor: torch.Tensor,
    tensor: torch.Tensor,
    op: Any = ReduceOp.SUM,
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
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "reduce_scatter",
    debug: str | None = None,
) -> Handle:
    """Reduce the i-th tensor of ``input_list`` onto rank i's ``output``."""
    if _observers is None:
        return torch_dist.reduce_scatter(output, input_list, op, group, async_op)
    args = (output, input_list, op, group, async_op)
    size = message_bytes(input_list)
    return _observers.run(
        CollectiveCall(
            "reduce_scatter", torch_dist.reduce_scatter, args, group, size, log_name, prof, debug
        )
    )


def all_reduce_coalesced(
    tensors: list[torch.Tensor],
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_reduce_coalesced",
    debug: str | None = None,
) -> Handle:
    """`all_reduce` of each tensor, issued together. Collective in the number and order of the
    tensors.
    """
    if _observers is None:
        return _all_reduce_each(tensors, op, group, async_op)
    args = (tensors, op, group, async_op)
    size = message_bytes(tensors)
    return _observers.run(
        CollectiveCall(
            "all_reduce_coalesced", _all_reduce_each, args, group, size, log_name, prof, debug
        )
    )


def _all_reduce_each(tensors: list[torch.Tensor], op: Any, group: Group, async_op: bool) -> Handle:
    return _together(
        [partial(torch_dist.all_reduce, t, op, group, True) for t in tensors], group, async_op
    )


def _together(issues: Sequence[Callable[[], Any]], group: Group, async_op: bool) -> Handle:
    """Issue operations as one where the backend can, and one after the other without waiting where
    it cannot.
    """
    if not issues:
        return WorkList([]) if async_op else None
    # gloo runs a coalesced block operation by operation and gives a handle for the last one only.
    if get_backend_name(group) == "nccl":
        with _c10d._coalescing_manager(group=group, async_ops=True) as block:
            for issue in issues:
                issue()
        works = WorkList([block])
    else:
        works = WorkList([issue() for issue in issues])
    if async_op:
        return works
    works.wait()
    return None


# -- gathers ---------------------------------------------------------------------------------------


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
    if _observers is None:
        return torch_dist.all_gather(tensor_list, tensor, group, async_op)
    args = (tensor_list, tensor, group, async_op)
    size = message_bytes(tensor_list)
    return _observers.run(
        CollectiveCall(
            "all_gather", torch_dist.all_gather, args, group, size, log_name, prof, debug
        )
    )


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
    if _observers is None:
        return all_gather_flat(output_tensor, tensor, group, async_op)
    args = (output_tensor, tensor, group, async_op)
    size = message_bytes(output_tensor)
    return _observers.run(
        CollectiveCall(
            "all_gather_into_tensor", all_gather_flat, args, group, size, log_name, prof, debug
        )
    )


def allgather_fn(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: Group = None,
    async_op: bool = False,
    debug: str | None = None,
) -> Handle:
    """`all_gather_into_tensor` under upstream's older name."""
    return all_gather_into_tensor(output_tensor, input_tensor, group, async_op, debug=debug)


def all_gather_coalesced(
    output_tensors: list[torch.Tensor],
    input_tensors: list[torch.Tensor],
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_gather_coalesced",
    debug: str | None = None,
) -> Handle:
    """`all_gather_into_tensor` of each pair, issued together. Collective in the number and order of
    the pairs.
    """
    if _observers is None:
        return _all_gather_each(output_tensors, input_tensors, group, async_op)
    args = (output_tensors, input_tensors, group, async_op)
    size = message_bytes(output_tensors)
    return _observers.run(
        CollectiveCall(
            "all_gather_coalesced", _all_gather_each, args, group, size, log_name, prof, debug
        )
    )


def _all_gather_each(
    output_tensors: list[torch.Tensor],
    input_tensors: list[torch.Tensor],
    group: Group,
    async_op: bool,
) -> Handle:
    pairs = zip(output_tensors, input_tensors, strict=True)
    return _together(
        [partial(all_gather_flat, o, i, group, True) for o, i in pairs], group, async_op
    )


def all_gather_object(
    object_list: list[Any],
    obj: Any,
    group: Group = None,
    prof: bool = False,
    log_name: str = "all_gather_object",
    debug: str | None = None,
) -> None:
    """Fill ``object_list`` with every rank's ``obj``, pickled in between."""
    if _observers is None:
        torch_dist.all_gather_object(object_list, obj, group)
        return
    args = (object_list, obj, group)
    _observers.run(
        CollectiveCall(
            "all_gather_object", torch_dist.all_gather_object, args, group, 0, log_name, prof, debug
        )
    )


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
    """Collect every rank's ``tensor`` in ``gather_list`` of global rank ``dst``; it is None on the
    others.
    """
    if _observers is None:
        return torch_dist.gather(tensor, gather_list, dst, group, async_op)
    args = (tensor, gather_list, dst, group, async_op)
    size = message_bytes(tensor) * get_world_size(group)
    return _observers.run(
        CollectiveCall("gather", torch_dist.gather, args, group, size, log_name, prof, debug)
    )


# -- one to many, many to many ---------------------------------------------------------------------


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
    if _observers is None:
        return torch_dist.broadcast(tensor, src, group, async_op)
    args = (tensor, src, group, async_op)
    return _observers.run(
        CollectiveCall(
            "broadcast",
            torch_dist.broadcast,
            args,
            group,
            message_bytes(tensor),
            log_name,
            prof,
            debug,
        )
    )


def broadcast_object_list(
    object_list: list[Any], src: int, group: Group = None, device: torch.device | None = None
) -> None:
    """Replace the entries of ``object_list`` by those of global rank ``src``, pickled in
    between.
    """
    if _observers is None:
        torch_dist.broadcast_object_list(object_list, src, group, device)
        return
    args = (object_list, src, group, device)
    _observers.run(
        CollectiveCall("broadcast_object_list", torch_dist.broadcast_object_list, args, group, 0)
    )


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
    """Fill rank i's ``tensor`` with the i-th of ``scatter_list`` of global rank ``src``; it is None
    on the others.
    """
    if _observers is None:
        return torch_dist.scatter(tensor, scatter_list, src, group, async_op)
    args = (tensor, scatter_list, src, group, async_op)
    size = message_bytes(tensor) * get_world_size(group)
    return _observers.run(
        CollectiveCall("scatter", torch_dist.scatter, args, group, size, log_name, prof, debug)
    )


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
    """Send the i-th split of ``tensor`` to rank i and receive its split for this rank into
    ``output``.
    """
    if _observers is None:
        return torch_dist.all_to_all_single(
            output, tensor, output_split_sizes, input_split_sizes, group, async_op
        )
    args = (output, tensor, output_split_sizes, input_split_sizes, group, async_op)
    name, size = "all_to_all_single", message_bytes(tensor)
    return _observers.run(
        CollectiveCall(name, torch_dist.all_to_all_single, args, group, size, log_name, prof, debug)
    )


def all_to_all(
    output_tensor_list: list[torch.Tensor],
    input_tensor_list: list[torch.Tensor],
    group: Group = None,
    async_op: bool = False,
) -> Handle:
    """Send the i-th input to rank i and receive its tensor for this rank into the i-th output."""
    if _observers is None:
        return torch_dist.all_to_all(output_tensor_list, input_tensor_list, group, async_op)
    args = (output_tensor_list, input_tensor_list, group, async_op)
    return _observers.run(
        CollectiveCall(
            "all_to_all", torch_dist.all_to_all, args, group, message_bytes(input_tensor_list)
        )
    )


# -- point to point, barriers ----------------------------------------------------------------------


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
    if _observers is None:
        torch_dist.send(tensor, dst, group, tag)
        return
    args = (tensor, dst, group, tag)
    _observers.run(
        CollectiveCall(
            "send", torch_dist.send, args, group, message_bytes(tensor), log_name, prof, debug
        )
    )


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
    if _observers is None:
        return torch_dist.recv(tensor, src, group, tag)
    args = (tensor, src, group, tag)
    sender = _observers.run(
        CollectiveCall(
            "recv", torch_dist.recv, args, group, message_bytes(tensor), log_name, prof, debug
        )
    )
    return int(sender)


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
    if _observers is None:
        return torch_dist.isend(tensor, dst, group, tag)
    args = (tensor, dst, group, tag)
    return _observers.run(
        CollectiveCall(
            "isend", torch_dist.isend, args, group, message_bytes(tensor), log_name, prof, debug
        )
    )


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
    if _observers is None:
        return torch_dist.irecv(tensor, src, group, tag)
    args = (tensor, src, group, tag)
    return _observers.run(
        CollectiveCall(
            "irecv", torch_dist.irecv, args, group, message_bytes(tensor), log_name, prof, debug
        )
    )


def barrier(
    group: Group = None,
    async_op: bool = False,
    device_ids: list[int] | None = None,
    prof: bool = False,
    log_name: str = "barrier",
    debug: str | None = None,
) -> Handle:
    """Wait until every rank of the group is here."""
    if _observers is None:
        return torch_dist.barrier(group, async_op, device_ids)
    args = (group, async_op, device_ids)
    return _observers.run(
        CollectiveCall("barrier", torch_dist.barrier, args, group, 0, log_name, prof, debug)
    )


def monitored_barrier(
    group: Group = None,
    timeout: timedelta | None = None,
    wait_all_ranks: bool = False,
    prof: bool = False,
    log_name: str = "monitored_barrier",
    debug: str | None = None,
) -> None:
    """`barrier` that names the ranks that did not come in time (gloo only)."""
    if _observers is None:
        torch_dist.monitored_barrier(group, timeout, wait_all_ranks)
        return
    args = (group, timeout, wait_all_ranks)
    _observers.run(
        CollectiveCall(
            "monitored_barrier", torch_dist.monitored_barrier, args, group, 0, log_name, prof, debug
        )
    )

"""Collectives on tensors, with upstream's names and argument order.

Every operation is torch.distributed's own. When nothing watches (the usual case) a call costs one
comparison more than torch's; otherwise it goes through the observers of
`deepspeed.comm.watch.observation`. World size 1 is no special case.

Users call these through `deepspeed.comm`; `deepspeed.comm.comm` is the module they know. Ranks that
name a source or a destination are global ranks, in every group. Beside these there are operations
between two ranks (`point_to_point`), several collectives issued as one (`coalesced`), and those in
which the host itself takes part (`host_collectives`).
"""

from typing import Any

import torch
import torch.distributed as torch_dist
from torch.distributed import ReduceOp

from deepspeed.comm.process_groups import Group, get_world_size
from deepspeed.comm.torch import all_gather_flat, reduce_scatter_flat
from deepspeed.comm.watch import observation
from deepspeed.comm.watch.observation import Handle, observed


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
    if observation.chain is None:
        return torch_dist.all_reduce(tensor, op, group, async_op)
    args = (tensor, op, group, async_op)
    return observed("all_reduce", torch_dist.all_reduce, args, group, tensor, log_name, prof, debug)


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
    """Reduce ``tensor`` onto global rank ``dst``; the others' contents are undefined afterwards."""
    if observation.chain is None:
        return torch_dist.reduce(tensor, dst, op, group, async_op)
    args = (tensor, dst, op, group, async_op)
    return observed("reduce", torch_dist.reduce, args, group, tensor, log_name, prof, debug)


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
    if observation.chain is None:
        return reduce_scatter_flat(output_tensor, tensor, op, group, async_op)
    args = (output_tensor, tensor, op, group, async_op)
    return observed(
        "reduce_scatter_tensor", reduce_scatter_flat, args, group, tensor, log_name, prof, debug
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
    if observation.chain is None:
        return torch_dist.reduce_scatter(output, input_list, op, group, async_op)
    args = (output, input_list, op, group, async_op)
    return observed(
        "reduce_scatter", torch_dist.reduce_scatter, args, group, input_list, log_name, prof, debug
    )


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
    if observation.chain is None:
        return torch_dist.all_gather(tensor_list, tensor, group, async_op)
    args = (tensor_list, tensor, group, async_op)
    return observed(
        "all_gather", torch_dist.all_gather, args, group, tensor_list, log_name, prof, debug
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
    if observation.chain is None:
        return all_gather_flat(output_tensor, tensor, group, async_op)
    args = (output_tensor, tensor, group, async_op)
    return observed(
        "all_gather_into_tensor", all_gather_flat, args, group, output_tensor, log_name, prof, debug
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
    if observation.chain is None:
        return torch_dist.gather(tensor, gather_list, dst, group, async_op)
    args = (tensor, gather_list, dst, group, async_op)
    copies = [tensor] * get_world_size(group)
    return observed("gather", torch_dist.gather, args, group, copies, log_name, prof, debug)


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
    if observation.chain is None:
        return torch_dist.broadcast(tensor, src, group, async_op)
    args = (tensor, src, group, async_op)
    return observed("broadcast", torch_dist.broadcast, args, group, tensor, log_name, prof, debug)


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
    if observation.chain is None:
        return torch_dist.scatter(tensor, scatter_list, src, group, async_op)
    args = (tensor, scatter_list, src, group, async_op)
    copies = [tensor] * get_world_size(group)
    return observed("scatter", torch_dist.scatter, args, group, copies, log_name, prof, debug)


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
    if observation.chain is None:
        return torch_dist.all_to_all_single(
            output, tensor, output_split_sizes, input_split_sizes, group, async_op
        )
    args = (output, tensor, output_split_sizes, input_split_sizes, group, async_op)
    return observed(
        "all_to_all_single",
        torch_dist.all_to_all_single,
        args,
        group,
        tensor,
        log_name,
        prof,
        debug,
    )


def all_to_all(
    output_tensor_list: list[torch.Tensor],
    input_tensor_list: list[torch.Tensor],
    group: Group = None,
    async_op: bool = False,
) -> Handle:
    """Send the i-th input to rank i and receive its tensor for this rank into the i-th output."""
    if observation.chain is None:
        return torch_dist.all_to_all(output_tensor_list, input_tensor_list, group, async_op)
    args = (output_tensor_list, input_tensor_list, group, async_op)
    return observed("all_to_all", torch_dist.all_to_all, args, group, input_tensor_list)

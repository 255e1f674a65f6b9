"""Several collectives issued as one where the backend can do that."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as torch_dist
from torch.distributed import ReduceOp
from torch.distributed import distributed_c10d as _c10d

from deepspeed.comm.process_groups import Group, get_backend_name
from deepspeed.comm.torch import all_gather_flat
from deepspeed.comm.watch import observation
from deepspeed.comm.watch.observation import Handle, observed


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
    if observation.chain is None:
        return _all_reduce_each(tensors, op, group, async_op)
    args = (tensors, op, group, async_op)
    return observed(
        "all_reduce_coalesced", _all_reduce_each, args, group, tensors, log_name, prof, debug
    )


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
    if observation.chain is None:
        return _all_gather_each(output_tensors, input_tensors, group, async_op)
    args = (output_tensors, input_tensors, group, async_op)
    return observed(
        "all_gather_coalesced", _all_gather_each, args, group, output_tensors, log_name, prof, debug
    )


def _all_reduce_each(tensors: list[torch.Tensor], op: Any, group: Group, async_op: bool) -> Handle:
    return _together(
        [partial(torch_dist.all_reduce, t, op, group, True) for t in tensors], group, async_op
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

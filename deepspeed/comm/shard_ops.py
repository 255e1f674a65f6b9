"""Collectives that sharding needs and no backend offers for uneven shards.

`reduce_to_owners` sums each owner's slice of a bucket onto that owner (a reduce-scatter with uneven
splits); `gather_from_owners` fills every rank's copy of a buffer from the slices' owners (an
all-gather with uneven splits), `gather_slices` the same for slices that are not neighbours in
memory. Device backends run them as their own reduce-scatter and all-gather, or one operation per
owner where the splits are uneven. Host backends (gloo, mpi) exchange the slices pairwise: every
byte crosses once, no rank reduces what it doesn't own, and the owner can sum the pieces in a wider
dtype and in rank order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.comm import comm as dist

HOST_BACKENDS = ("gloo", "mpi")


class PendingShards:
    """Handle of an operation on owned slices; `wait()` is idempotent.

    Attributes:
        pieces: Of a reduction: the tensors whose sum, in rank order, is this rank's reduced slice.
            Complete after `wait()` (on the current stream for stream backends).
    """

    def __init__(self, works: list[Any], pieces: list[torch.Tensor], keep: torch.Tensor) -> None:
        self.pieces = pieces
        self._works = works
        self._keep: torch.Tensor | None = keep

    def sum_over(self, group: dist.Group) -> None:
        """Of a reduction: sum this rank's slice over the ranks of `group` too, which own the same
        slice of other sums.

        Completes what was started (the host waits on backends without streams) and starts one
        all-reduce; `wait()` completes that. Ranks agree on the slice's size, so an empty one is
        left out.
        """
        total, *others = self.wait()
        for piece in others:
            total.add_(piece)
        self.pieces = [total]
        if total.numel():
            self._works = [dist.all_reduce(total, group=group, async_op=True)]

    def wait(self) -> list[torch.Tensor]:
        """Complete the operation; returns `pieces`."""
        for work in self._works:
            work.wait()
        self._works = []
        self._keep = None
        return self.pieces


def _slices(tensor: torch.Tensor, splits: Sequence[int]) -> list[torch.Tensor]:
    return [
        tensor[end - numel : end] for end, numel in zip(accumulate(splits), splits, strict=True)
    ]


def is_pairwise(tensor: torch.Tensor, group: dist.Group) -> bool:
    """Whether slices are exchanged pairwise: on host backends, whose point-to-point operations take
    host tensors only.
    """
    if get_accelerator().defers_collectives:
        return False  # a simulated device: what is checked is the path that devices take
    return tensor.device.type == "cpu" and dist.get_backend_name(group) in HOST_BACKENDS


def _exchange(
    slices: Sequence[torch.Tensor],
    into: Sequence[torch.Tensor],
    sending: Sequence[int],
    rank: int,
    group: dist.Group,
) -> list[Any]:
    """Send `slices[sending[peer]]` to every peer and receive `into[peer]` from it.

    Nearest peer first, so that not every rank talks to rank 0 at once. Ranks agree on emptiness, so
    empty messages are left out.
    """
    works: list[Any] = []
    world = len(slices)
    for step in range(1, world):
        peer = (rank + step) % world
        other = dist.get_global_rank(group, peer)
        if into[peer].numel():
            works.append(dist.irecv(into[peer], src=other, group=group))
        if slices[sending[peer]].numel():
            works.append(dist.isend(slices[sending[peer]], dst=other, group=group))
    return works


def reduce_to_owners(
    bucket: torch.Tensor, splits: Sequence[int], group: dist.Group = None, async_op: bool = False
) -> PendingShards:
    """Sum slice `i` of `bucket` over all ranks onto rank `i` of `group`.

    Args:
        bucket: Contiguous, 1-D, of `sum(splits)` elements. Its content is undefined afterwards.
        splits: Elements owned by each rank of the group, in order; the same on every rank.
        group: Process group; None is the world.
        async_op: Return at once; `wait()` completes it.
    """
    rank, world = dist.get_rank(group=group), dist.get_world_size(group=group)
    slices = _slices(bucket, splits)
    works: list[Any] = []
    pieces = [slices[rank]]
    if world > 1 and is_pairwise(bucket, group):
        pieces = [
            slices[rank] if peer == rank else torch.empty_like(slices[rank])
            for peer in range(world)
        ]
        works = _exchange(slices, pieces, range(world), rank, group)
    elif world > 1 and len(set(splits)) == 1:
        pieces = [torch.empty_like(slices[rank])]
        works = [dist.reduce_scatter_tensor(pieces[0], bucket, group=group, async_op=True)]
    elif world > 1:
        works = [
            dist.reduce(piece, dst=dist.get_global_rank(group, owner), group=group, async_op=True)
            for owner, piece in enumerate(slices)
            if piece.numel()
        ]
    return _started(PendingShards(works, pieces, keep=bucket), async_op)


def gather_from_owners(
    flat: torch.Tensor,
    splits: Sequence[int],
    group: dist.Group = None,
    by_broadcast: bool = False,
    async_op: bool = False,
) -> PendingShards:
    """Fill `flat` on every rank: slice `i` comes from rank `i` of `group`.

    Args:
        flat: Contiguous, 1-D, of `sum(splits)` elements; this rank's own slice is already right.
        splits: Elements of each rank's slice, the same on every rank.
        group: Process group; None is the world.
        by_broadcast: One broadcast per owner instead of an all-gather (`allgather_partitions:
            false`).
        async_op: Return at once; `wait()` completes it.
    """
    rank, world = dist.get_rank(group=group), dist.get_world_size(group=group)
    slices = _slices(flat, splits)
    evenly = world > 1 and len(set(splits)) == 1
    if evenly and not by_broadcast and not is_pairwise(flat, group):
        works = [dist.all_gather_into_tensor(flat, slices[rank], group=group, async_op=True)]
        return _started(PendingShards(works, [], keep=flat), async_op)
    return gather_slices(slices, group, by_broadcast, async_op)


def gather_slices(
    slices: Sequence[torch.Tensor],
    group: dist.Group = None,
    by_broadcast: bool = False,
    async_op: bool = False,
) -> PendingShards:
    """Fill `slices` on every rank: slice `i` comes from rank `i` of `group`. Devices need a buffer
    for it, host backends none.

    Args:
        slices: Contiguous, 1-D, as long on every rank; this rank's own is already right.
        group: Process group; None is the world.
        by_broadcast: One broadcast per owner instead of an all-gather.
        async_op: Return at once; `wait()` completes it.
    """
    rank, world = dist.get_rank(group=group), dist.get_world_size(group=group)
    works: list[Any] = []
    if world > 1 and by_broadcast:
        works = [
            dist.broadcast(
                piece, src=dist.get_global_rank(group, owner), group=group, async_op=True
            )
            for owner, piece in enumerate(slices)
            if piece.numel()
        ]
    elif world > 1 and is_pairwise(slices[rank], group):
        works = _exchange(slices, slices, [rank] * world, rank, group)
    elif world > 1:
        works = [dist.all_gather(list(slices), slices[rank], group=group, async_op=True)]
    return _started(PendingShards(works, [], keep=slices[rank]), async_op)


def _started(pending: PendingShards, async_op: bool) -> PendingShards:
    if not async_op:
        pending.wait()
    return pending

"""Collectives on buffers of which every rank owns an equal part.

Device backends run reductions and gathers as one operation of their own. Host backends (gloo, mpi)
exchange the slices pairwise: every byte crosses once, no rank reduces what it doesn't own, and the
owner can sum the pieces in a wider dtype and in rank order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from deepspeed.accelerator import get_accelerator
from deepspeed.comm import comm as dist

HOST_BACKENDS = ("gloo", "mpi")


class PendingShards:
    """Handle of an operation on owned slices. After `wait()`, the sum of `pieces` in rank order is
    this rank's reduced slice (on the current stream for stream backends).
    """

    def __init__(self, works: list[Any], pieces: list[torch.Tensor], keep: torch.Tensor) -> None:
        self.pieces = pieces
        self._works = works
        self._keep: torch.Tensor | None = keep

    def sum_over(self, group: dist.Group) -> None:
        """Sum this rank's reduced slice over the ranks of `group` too, which own the same slice of
        other sums.

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

    def gather_over(self, group: dist.Group) -> None:
        """Add the pieces of the ranks of `group`, which own the same slice, in their order."""
        own = torch.cat(self.wait())
        if own.numel():
            whole = own.new_empty(own.numel() * dist.get_world_size(group=group))
            self.pieces = list(torch.split(whole, self.pieces[0].numel()))
            self._works = [dist.all_gather_into_tensor(whole, own, group=group, async_op=True)]

    def wait(self) -> list[torch.Tensor]:
        for work in self._works:
            work.wait()
        self._works = []
        self._keep = None
        return self.pieces


def _parts(tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
    return list(tensor.split(_part_numel(tensor, count))) if tensor.numel() else [tensor] * count


def _part(tensor: torch.Tensor, rank: int, count: int) -> torch.Tensor:
    numel = _part_numel(tensor, count)
    return tensor[rank * numel : (rank + 1) * numel]


def _part_numel(tensor: torch.Tensor, count: int) -> int:
    numel, rest = divmod(tensor.numel(), count)
    assert not rest, f"{tensor.numel()} elements are no equal parts for {count} ranks"
    return numel


def is_pairwise(tensor: torch.Tensor, group: dist.Group) -> bool:
    """Whether slices are exchanged pairwise: on host backends, whose messages are the host's."""
    if get_accelerator().defers_collectives:
        return False  # a simulated device: what is checked is the path that devices take
    return tensor.device.type == "cpu" and dist.get_backend_name(group) in HOST_BACKENDS


def _exchange(
    slices: Sequence[torch.Tensor],
    into: Sequence[torch.Tensor],
    sending: Sequence[int],
    rank: int,
    group: dist.Group,
    tag: int = 0,
) -> list[Any]:
    """Send `slices[sending[peer]]` to every peer and receive `into[peer]` from it: nearest peer
    first, so that not every rank talks to rank 0 at once. Ranks agree on emptiness, so empty
    messages are left out.

    The send goes first. While gloo sends what the peer waits for it holds the connection; if more
    came in meanwhile, its own thread would ask for that without end.
    """
    works: list[Any] = []
    world = len(slices)
    for step in range(1, world):
        peer = (rank + step) % world
        other = dist.get_global_rank(group, peer)
        if slices[sending[peer]].numel():
            works.append(dist.isend(slices[sending[peer]], dst=other, group=group, tag=tag))
        if into[peer].numel():
            works.append(dist.irecv(into[peer], src=other, group=group, tag=tag))
    return works


def reduce_to_owners(
    bucket: torch.Tensor, group: dist.Group = None, async_op: bool = False, apart: bool = False
) -> PendingShards:
    """Sum the `i`-th of as many equal parts of `bucket` (contiguous, 1-D, undefined afterwards) as
    there are ranks onto rank `i` of `group`; with `async_op`, `wait()` completes it. With `apart`
    they are brought there and not summed: as many pieces as ranks, in their order.
    """
    rank, world = dist.get_rank(group=group), dist.get_world_size(group=group)
    works: list[Any] = []
    pieces = [_part(bucket, rank, world)]
    if world > 1 and is_pairwise(bucket, group):
        parts = _parts(bucket, world)
        own = parts[rank]
        pieces = [own if peer == rank else torch.empty_like(own) for peer in range(world)]
        works = _exchange(parts, pieces, range(world), rank, group)
    elif world > 1 and apart:
        found = torch.empty_like(bucket)
        pieces = _parts(found, world)
        works = [dist.all_to_all_single(found, bucket, group=group, async_op=True)]
    elif world > 1:
        pieces = [torch.empty_like(pieces[0])]
        works = [dist.reduce_scatter_tensor(pieces[0], bucket, group=group, async_op=True)]
    return _started(PendingShards(works, pieces, keep=bucket), async_op)


def gather_from_owners(
    flat: torch.Tensor,
    group: dist.Group = None,
    by_broadcast: bool = False,
    async_op: bool = False,
    tag: int = 0,
) -> PendingShards:
    """Fill `flat` (contiguous, 1-D) on every rank: the `i`-th of as many equal parts as there are
    ranks comes from rank `i` of `group`, whose own part is already right.

    `by_broadcast` is one broadcast per owner instead of an all-gather (`allgather_partitions:
    false`); messages of another `tag` are never taken for this gather's.
    """
    rank, world = dist.get_rank(group=group), dist.get_world_size(group=group)
    if world > 1 and (by_broadcast or is_pairwise(flat, group)):
        return gather_slices(_parts(flat, world), group, by_broadcast, async_op, tag)
    works: list[Any] = []
    if world > 1:
        own = _part(flat, rank, world)
        works = [dist.all_gather_into_tensor(flat, own, group=group, async_op=True)]
    return _started(PendingShards(works, [], keep=flat), async_op)


def gather_slices(
    slices: Sequence[torch.Tensor],
    group: dist.Group = None,
    by_broadcast: bool = False,
    async_op: bool = False,
    tag: int = 0,
) -> PendingShards:
    """Fill `slices` (contiguous, 1-D, as long on every rank): slice `i` comes from rank `i` of
    `group`. Devices need a buffer for it, host backends none. See `gather_from_owners`.
    """
    rank, world = dist.get_rank(group=group), dist.get_world_size(group=group)
    works: list[Any] = []
    if world > 1 and by_broadcast:
        for owner, piece in enumerate(slices):
            if piece.numel():
                src = dist.get_global_rank(group, owner)
                works.append(dist.broadcast(piece, src=src, group=group, async_op=True))
    elif world > 1 and is_pairwise(slices[rank], group):
        works = _exchange(slices, slices, [rank] * world, rank, group, tag)
    elif world > 1:
        works = [dist.all_gather(list(slices), slices[rank], group=group, async_op=True)]
    return _started(PendingShards(works, [], keep=slices[rank]), async_op)


def gather_shapes(
    own: torch.Tensor, shapes: Sequence[torch.Size], group: dist.Group = None
) -> list[torch.Tensor]:
    """Gather what each rank of `group` has, of `shapes` (the same list on all); they may differ."""
    numels = [shape.numel() for shape in shapes]
    sent = own.reshape(-1)
    if own.numel() < max(numels):  # backends gather what is of one size only
        sent = F.pad(sent, (0, max(numels) - own.numel()))
    parts = [torch.empty_like(sent) for _ in shapes]
    dist.all_gather(parts, sent, group=group)
    found = zip(parts, numels, shapes, strict=True)
    return [part[:numel].view(shape) for part, numel, shape in found]


def scatter_from_first(flat: torch.Tensor, own: torch.Tensor, group: dist.Group = None) -> None:
    """Fill `own` (1-D) with this rank's of as many equal parts of the first rank's `flat` as there
    are ranks; on other ranks the content of `flat` is undefined before and afterwards.

    Devices send all of it to everybody: it takes the first rank as long as sending every part to
    its owner, and no list with a part for each rank, which for one layer on thousands of ranks
    takes the host longer than the layer.
    """
    rank, world = dist.get_rank(group=group), dist.get_world_size(group=group)
    if world > 1 and own.numel():
        first = dist.get_global_rank(group, 0)
        if is_pairwise(flat, group):
            parts = _parts(flat, world) if rank == 0 else None
            dist.scatter(own, parts, src=first, group=group)
            return
        dist.broadcast(flat, src=first, group=group)
    own.copy_(_part(flat, rank, world))


def _started(pending: PendingShards, async_op: bool) -> PendingShards:
    if not async_op:
        pending.wait()
    return pending

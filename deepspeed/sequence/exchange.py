"""The exchange under Ulysses attention: every rank's pieces along one dimension for all ranks'
pieces along another, in one collective for several tensors. Its gradient is the exchange back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepspeed import comm as dist
from deepspeed.accelerator import Stream, get_accelerator


class Cut(NamedTuple):
    """How one tensor travels: the dimension that is cut, that along which pieces are joined in the
    order of ranks, and the sizes of the pieces that leave and arrive.
    """

    scatter: int
    gather: int
    scatter_sizes: tuple[int, ...]
    gather_sizes: tuple[int, ...]

    def back(self) -> Cut:
        return Cut(self.gather, self.scatter, self.gather_sizes, self.scatter_sizes)

    def check(self, tensor: Tensor, rank: int) -> None:
        if (
            tensor.shape[self.scatter] != sum(self.scatter_sizes)
            or tensor.shape[self.gather] != self.gather_sizes[rank]
        ):
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} cannot be cut along dimension "
                f"{self.scatter} into {self.scatter_sizes} and hold piece {rank} of "
                f"{self.gather_sizes} along dimension {self.gather}"
            )


class Pending:
    """An exchange of tensors of one dtype. `wait` ends it; the buffers live until then."""

    def __init__(
        self, tensors: Sequence[Tensor], cuts: Sequence[Cut], group: dist.Group, async_op: bool
    ) -> None:
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        self._outgoing, sent = _pack(tensors, cuts, world)
        self._shapes = [
            _arriving_shapes(t.shape, cut, rank) for t, cut in zip(tensors, cuts, strict=True)
        ]
        self._cuts = cuts
        self._received = [
            sum(math.prod(shapes[source]) for shapes in self._shapes) for source in range(world)
        ]
        self._incoming = self._outgoing.new_empty(sum(self._received))
        self._work = dist.all_to_all_single(
            self._incoming, self._outgoing, self._received, sent, group=group, async_op=async_op
        )

    def wait(self) -> list[Tensor]:
        """Return what arrived, contiguous, in the order of the tensors."""
        if self._work is not None:
            self._work.wait()
        pieces: list[list[Tensor]] = [[] for _ in self._cuts]
        for source, message in enumerate(self._incoming.split(self._received)):
            sizes = [math.prod(shapes[source]) for shapes in self._shapes]
            for index, part in enumerate(message.split(sizes)):
                pieces[index].append(part.view(self._shapes[index][source]))
        return [torch.cat(own, dim=cut.gather) for own, cut in zip(pieces, self._cuts, strict=True)]


def _pack(tensors: Sequence[Tensor], cuts: Sequence[Cut], world: int) -> tuple[Tensor, list[int]]:
    """Put all pieces in one buffer, those for one rank together, and count the elements for each
    rank. They are copied straight from the strided tensors: nothing is permuted before.
    """
    outgoing = tensors[0].new_empty(sum(tensor.numel() for tensor in tensors))
    sizes = list(zip(*(cut.scatter_sizes for cut in cuts), strict=True))
    around = [
        tensor.numel() // tensor.shape[cut.scatter]
        for tensor, cut in zip(tensors, cuts, strict=True)
    ]
    sent = [sum(size * numel for size, numel in zip(of, around, strict=True)) for of in sizes]
    if get_accelerator().is_synchronized_device():
        _pack_by_rank(outgoing, tensors, cuts, world)
    else:
        _pack_by_run(outgoing, tensors, cuts, sizes)
    return outgoing, sent


def _pack_by_rank(
    outgoing: Tensor, tensors: Sequence[Tensor], cuts: Sequence[Cut], world: int
) -> None:
    """Copy once per tensor and rank: the host copies fewer dimensions faster."""
    parts = [
        tensor.split(cut.scatter_sizes, dim=cut.scatter)
        for tensor, cut in zip(tensors, cuts, strict=True)
    ]
    end = 0
    for destination in range(world):
        for pieces in parts:
            piece = pieces[destination]
            outgoing[end : end + piece.numel()].view(piece.shape).copy_(piece)
            end += piece.numel()


def _pack_by_run(
    outgoing: Tensor,
    tensors: Sequence[Tensor],
    cuts: Sequence[Cut],
    sizes: Sequence[tuple[int, ...]],
) -> None:
    """Copy once per tensor and run of neighbouring ranks with equal sizes."""
    begin, starts = 0, [0] * len(cuts)
    for piece_sizes, alike in groupby(sizes):
        run = len(list(alike))
        pieces = [
            tensor.narrow(cut.scatter, start, run * size)
            .unflatten(cut.scatter, (run, size))
            .movedim(cut.scatter, 0)
            for tensor, cut, start, size in zip(tensors, cuts, starts, piece_sizes, strict=True)
        ]
        numels = [piece.numel() // run for piece in pieces]
        rows = outgoing[begin : begin + run * sum(numels)].view(run, -1)
        for piece, target in zip(pieces, rows.split(numels, dim=1), strict=True):
            target.view(piece.shape).copy_(piece)
        begin += run * sum(numels)
        starts = [start + run * size for start, size in zip(starts, piece_sizes, strict=True)]


def _arriving_shapes(shape: Sequence[int], cut: Cut, rank: int) -> list[tuple[int, ...]]:
    shapes = []
    for size in cut.gather_sizes:
        arriving = list(shape)
        arriving[cut.scatter] = cut.scatter_sizes[rank]
        arriving[cut.gather] = size
        shapes.append(tuple(arriving))
    return shapes


def exchange(
    tensors: Sequence[Tensor], cuts: Sequence[Cut], group: dist.Group, stream: Stream | None = None
) -> list[Tensor]:
    """Exchange tensors of one dtype in one collective, each cut in its way, without autograd; on
    `stream`, for which the current one waits before this returns.
    """
    rank = dist.get_rank(group)
    for tensor, cut in zip(tensors, cuts, strict=True):
        cut.check(tensor, rank)
    if dist.get_world_size(group) == 1:
        return [tensor.contiguous() for tensor in tensors]
    if stream is None:
        return Pending(tensors, cuts, group, async_op=False).wait()
    return _on_stream(tensors, cuts, group, stream)


def _on_stream(
    tensors: Sequence[Tensor], cuts: Sequence[Cut], group: dist.Group, stream: Stream
) -> list[Tensor]:
    current = get_accelerator().current_stream()
    # Both waits are needed: the tensors are written on the current stream, and their memory, as
    # well as that of the results, may be given to others by either stream's allocator as soon as
    # Python drops them.
    stream.wait_stream(current)
    with get_accelerator().stream(stream):
        arrived = Pending(tensors, cuts, group, async_op=False).wait()
    current.wait_stream(stream)
    return arrived


class Exchange(torch.autograd.Function):
    """`exchange` with its gradient."""

    @staticmethod
    def forward(
        ctx: Any, group: dist.Group, cuts: Sequence[Cut], stream: Stream | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.cuts, ctx.stream = group, cuts, stream
        return tuple(exchange(tensors, cuts, group, stream))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Exchange all gradients back, zeros too: every rank has to send the same messages."""
        back = [cut.back() for cut in ctx.cuts]
        return (None, None, None, *exchange(grads, back, ctx.group, ctx.stream))

"""Which pieces have the same contributors on all ranks (`gradients.scope` says whose they are), and
how their fingerprints are added up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.runtime.gradients.scope import GradientPiece, GradientScope
from deepspeed.utils.tensor_fragment import logical_shape


def with_common_cuts(
    pieces: Sequence[GradientPiece], scope: GradientScope, names: Callable[[nn.Parameter], str]
) -> list[GradientPiece]:
    """The pieces, with those of a shared parameter cut where any part of the model cuts it.
    Collective over the parts; ValueError if only some of them train it.
    """
    cuts: dict[nn.Parameter, list[int]] = {}
    for param, group in scope.shared:
        own = sorted(
            {one.start + end for one in pieces if one.param is param for end in (0, one.numel)}
        )
        everywhere: list[Any] = [None] * dist.get_world_size(group=group)
        dist.all_gather_object(everywhere, own, group=group)
        if logical_shape(param).numel() and not all(everywhere):
            raise ValueError(
                f"{names(param)} is shared by several parts of the model, but only some of them "
                "train it: give all of them, or none, to the optimizer (model_parameters)"
            )
        cuts[param] = sorted({cut for of_rank in everywhere for cut in of_rank})
    cut = [_cut(piece, cuts[piece.param]) if piece.param in cuts else [piece] for piece in pieces]
    return [part for parts in cut for part in parts]


def _cut(piece: GradientPiece, cuts: Sequence[int]) -> list[GradientPiece]:
    end = piece.start + piece.numel
    inside = [piece.start, *(at for at in cuts if piece.start < at < end), end]
    return [
        piece._replace(
            start=start,
            numel=end - start,
            read=_part_of(piece, start - piece.start, end - piece.start),
        )
        for start, end in zip(inside, inside[1:], strict=False)
    ]


def _part_of(piece: GradientPiece, start: int, end: int) -> Callable[[], torch.Tensor] | None:
    read = piece.read
    return None if read is None else lambda: read()[start:end]


class ContributorSum:
    """Adds up rows of pieces over all contributors; `holders`, `sharers` are as in `RankReport`."""

    def __init__(self, pieces: Sequence[GradientPiece], scope: GradientScope) -> None:
        self._sums: list[tuple[Any, list[int]]] = []
        self.sharers: list[tuple[int, ...]] = [()] * len(pieces)
        # In the order of `shared`, the same on all ranks, so that parts which share several
        # parameters never wait in a circle.
        for param, group in scope.shared:
            own = (i for i, piece in enumerate(pieces) if piece.param is param)
            rows = sorted(own, key=lambda i: pieces[i].start)
            self._sums.append((group, rows))
            for row in rows:
                self.sharers[row] = _ranks(group)
        self.holders = []
        by_group: dict[dist.Group, list[int]] = {}
        for index, piece in enumerate(pieces):
            group = scope.holders(piece.param)
            self.holders.append(_ranks(group))
            by_group.setdefault(group, []).append(index)
        self._sums += by_group.items()

    def add_up(self, rows: torch.Tensor) -> None:
        """Sum in place; `[pieces, ...]`. All ranks of all groups call it alike."""
        for group, indices in self._sums:
            if not indices or dist.get_world_size(group=group) == 1:
                continue
            # One call: where ranks compare what they are about to do, they compare the line too.
            part = rows if len(indices) == len(rows) else rows[indices]
            dist.all_reduce(part, group=group)
            if part is not rows:
                rows[indices] = part

    @property
    def speaks(self) -> bool:
        return bool(self.holders) and dist.get_rank() == min(self.holders[0])

    @property
    def num_parts(self) -> list[int]:
        return [max(1, len(ranks)) for ranks in self.sharers]


def _ranks(group: dist.Group) -> tuple[int, ...]:
    return tuple(dist.get_all_ranks_from_group(group))

"""What lies where in the shards of ZeRO stage 3: every rank has an equal part of each parameter,
and the last ones end in padding. Experts are cut over the ranks that hold the same ones.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from deepspeed.checkpoint.experts import experts_per_rank, renumbered
from deepspeed.utils.zero_to_fp32 import zero3_partitioned_param_info


class Run(NamedTuple):
    """A parameter's elements from `start`, lying at `at` of a tensor that the optimizer updated."""

    name: str
    start: int
    at: int
    numel: int


class GroupCut(NamedTuple):
    """How the parameters of one group are cut, as one rank sees it.

    Attributes:
        shapes: Name and shape of each; experts are numbered over all ranks.
        ranks: Over how many.
        place: Which of them the rank is.
    """

    shapes: Mapping[str, torch.Size]
    ranks: int
    place: int


def cuts_of(
    groups: Sequence[Mapping[str, torch.Size]],
    counts: int | Sequence[int],
    rank: int,
    ranks: int,
    data_first: bool,
) -> list[GroupCut] | None:
    """How each group is cut; None if that does not fit the number of files.

    Args:
        groups: Name and shape of the parameters of each, as the rank has them.
        counts: Over how many ranks they are cut, for each group if it is not one number.
        rank: Whose shards they are, of
        ranks: those that have files.
        data_first: See `experts.expert_rank`.
    """
    if isinstance(counts, int):
        return [GroupCut(shapes, counts, rank) for shapes in groups] if counts == ranks else None
    if len(counts) != len(groups) or any(ranks % count for count in counts):
        return None
    per_rank = experts_per_rank(name for shapes in groups for name in shapes)
    cuts = []
    for shapes, count in zip(groups, counts, strict=True):
        share, place = divmod(rank, count) if data_first else _by_turns(rank, ranks // count)
        offsets = {prefix: held * share for prefix, held in per_rank.items()}
        named = {renumbered(name, offsets): shape for name, shape in shapes.items()}
        cuts.append(GroupCut(named, count, place))
    return cuts


def _by_turns(rank: int, shares: int) -> tuple[int, int]:
    """Share and place where neighbouring ranks have different shares."""
    place, share = divmod(rank, shares)
    return share, place


def cut_runs(cuts: Sequence[GroupCut], starts: Sequence[int]) -> tuple[list[list[Run]], int]:
    """What lies in each of a rank's buffers, which begin at `starts` of all of them; and how many
    elements the cuts of all parameters have.
    """
    runs: list[list[Run]] = [[] for _ in starts[1:]]
    at = 0
    for shapes, ranks, place in cuts:
        for name, shape in shapes.items():
            cut, _ = zero3_partitioned_param_info(shape.numel(), ranks)
            first = place * cut
            done, own = 0, max(0, min(cut, shape.numel() - first))
            while done < own and at + done < starts[-1]:
                index = bisect_right(starts, at + done) - 1
                numel = min(own - done, starts[index + 1] - at - done)
                runs[index].append(Run(name, first + done, at + done - starts[index], numel))
                done += numel
            at += cut
    return runs, at

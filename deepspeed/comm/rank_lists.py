"""How ranks divide into groups: pure arithmetic, alike on all ranks, so that they can make the same
groups in the same order. Lists returned hold every rank of the input once (but `holding`'s).
"""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

Ranks = tuple[int, ...]
"""Global ranks of one group, in group order."""


class RankLists(NamedTuple):
    """Two ways in which the same ranks divide; a group of one and of the other share one rank."""

    rows: list[list[int]]
    columns: list[list[int]]


def holding(rank: int, rank_lists: Iterable[list[int]]) -> list[int]:
    """The list in which `rank` occurs."""
    return next(ranks for ranks in rank_lists if rank in ranks)


def partition_of(everywhere: Iterable[Collection[int]]) -> list[Ranks]:
    """The different groups of which each rank has told its own, in an order that all share."""
    return sorted({tuple(ranks) for ranks in everywhere})


def beside_sequences(sequences: Sequence[Ranks]) -> list[list[int]]:
    """The data-parallel groups, of ranks at one place of their sequences; ValueError if these are
    shared by different numbers of ranks.
    """
    sizes = {len(ranks) for ranks in sequences}
    if len(sizes) != 1:
        raise ValueError(
            f"the mpu's sequence-parallel groups have different sizes, {sorted(sizes)}; give them "
            "all the same size"
        )
    return [list(ranks) for ranks in zip(*sequences, strict=True)]


def optimizer_instances(replicas: Iterable[Ranks], count: int) -> RankLists:
    """Split each group of replicas into `count` instances of consecutive ranks (rows), and those
    with the same place in all instances (columns).
    """
    inside: list[list[int]] = []
    across: list[list[int]] = []
    for ranks in replicas:
        size = len(ranks) // count
        inside += [list(ranks[start : start + size]) for start in range(0, len(ranks), size)]
        across += [list(ranks[position::size]) for position in range(size)]
    return RankLists(inside, across)


def expert_blocks(everywhere: Sequence[tuple[Ranks, Ranks]], sharded: bool) -> list[Ranks]:
    """The sets of ranks that can share one set of experts, of which each rank tells who holds the
    same dense parameters and who the other slices of its layers; `sharded`: experts are tensor
    parallel.
    """
    if sharded:
        return partition_of(replicas for replicas, _ in everywhere)
    # Tensor ranks see the same tokens and each sends its part of them, so their experts' gradients
    # are parts of one sum.
    return partition_of(
        sorted(rank for slice_ in slices for rank in everywhere[slice_][0])
        for _, slices in everywhere
    )


def expert_groups(blocks: Iterable[Ranks], ep_size: int, data_first: bool) -> RankLists:
    """The ranks that hold different experts (rows, `ep_size` each), and those that hold the same
    (columns); `data_first`: neighbours hold the same. ValueError if ``ep_size`` does not divide a
    block.
    """
    runs: list[list[int]] = []
    strides: list[list[int]] = []
    for block in blocks:
        if ep_size < 1 or len(block) % ep_size:
            raise ValueError(
                f"ep_size={ep_size} does not divide the {len(block)} ranks that can share experts; "
                "choose a divisor"
            )
        step = len(block) // ep_size if data_first else ep_size
        runs += [list(block[start : start + step]) for start in range(0, len(block), step)]
        strides += [list(block[start::step]) for start in range(step)]
    return RankLists(strides, runs) if data_first else RankLists(runs, strides)

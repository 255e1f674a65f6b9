"""The fragment table: which shard owns which elements of which parameter.

Pure integers, no torch. A parameter group is laid out as one flat range, parameter after parameter,
padded at the end and cut into `num_shards` equal shards. A *fragment* is one parameter's part of
one shard. Reduction, norm, master weights, gathering, checkpoints and `safe_get_full_*` all read
this table, so "who owns what" has one answer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

NumEl = int
ParamIndex = int
ShardRank = int


class Fragment(NamedTuple):
    """`numel` elements of parameter `param`, from `param_start`, lying at `shard_start` of shard
    `shard`.
    """

    param: ParamIndex
    param_start: NumEl
    shard: ShardRank
    shard_start: NumEl
    numel: NumEl


@dataclass(frozen=True)
class FragmentTable:
    """Layout of one parameter group.

    Args:
        numels: Number of elements of each parameter, in flat order. Zero is allowed.
        num_shards: Number of owners; 1 means that every rank holds everything.
        alignment: Every shard holds a multiple of this many elements.

    Raises:
        ValueError: If a size is negative or a count is below one.
    """

    numels: tuple[NumEl, ...]
    num_shards: int = 1
    alignment: int = 1

    def __post_init__(self) -> None:
        if self.num_shards < 1 or self.alignment < 1:
            raise ValueError(
                f"num_shards and alignment must be positive, got {self.num_shards} and "
                f"{self.alignment}"
            )
        if any(numel < 0 for numel in self.numels):
            raise ValueError(f"element counts must not be negative, got {self.numels}")

    @classmethod
    def build(cls, numels: Sequence[NumEl], num_shards: int, alignment: int = 1) -> FragmentTable:
        """The table of parameters with these element counts."""
        return cls(tuple(numels), num_shards, alignment)

    @cached_property
    def offsets(self) -> tuple[NumEl, ...]:
        """Where each parameter starts in the flat range; one entry more than parameters, the last
        is `numel`.
        """
        return (0, *accumulate(self.numels))

    @property
    def numel(self) -> NumEl:
        """Elements that belong to parameters."""
        return self.offsets[-1]

    @cached_property
    def padded_numel(self) -> NumEl:
        """Elements of the flat range, padding included."""
        unit = self.num_shards * self.alignment
        return -(-self.numel // unit) * unit

    @property
    def shard_numel(self) -> NumEl:
        """Elements of each shard, padding included."""
        return self.padded_numel // self.num_shards

    def shard_range(self, shard: ShardRank) -> tuple[NumEl, NumEl]:
        """The flat range `[start, end)` of `shard`."""
        return shard * self.shard_numel, (shard + 1) * self.shard_numel

    def shard_padding(self, shard: ShardRank) -> NumEl:
        """How many of the shard's last elements belong to no parameter."""
        start, end = self.shard_range(shard)
        return min(max(end - self.numel, 0), end - start)

    @cached_property
    def _by_param(self) -> tuple[tuple[Fragment, ...], ...]:
        return tuple(tuple(self._split(param)) for param in range(len(self.numels)))

    def _split(self, param: ParamIndex) -> list[Fragment]:
        fragments = []
        start, end = self.offsets[param], self.offsets[param + 1]
        position = start
        while position < end:
            shard, shard_start = divmod(position, self.shard_numel)
            numel = min(end, (shard + 1) * self.shard_numel) - position
            fragments.append(Fragment(param, position - start, shard, shard_start, numel))
            position += numel
        return fragments

    def of_param(self, param: ParamIndex) -> tuple[Fragment, ...]:
        """The fragments of one parameter, in element order; none if it has no elements."""
        return self._by_param[param]

    @cached_property
    def _by_shard(self) -> tuple[tuple[Fragment, ...], ...]:
        shards: list[list[Fragment]] = [[] for _ in range(self.num_shards)]
        for fragments in self._by_param:
            for fragment in fragments:
                shards[fragment.shard].append(fragment)
        return tuple(tuple(fragments) for fragments in shards)

    def of_shard(self, shard: ShardRank) -> tuple[Fragment, ...]:
        """The fragments that `shard` owns, in shard order."""
        return self._by_shard[shard]

    def param_at(self, position: NumEl) -> ParamIndex:
        """The parameter that holds flat element `position`.

        Raises:
            IndexError: If the position is in the padding or outside.
        """
        if not 0 <= position < self.numel:
            raise IndexError(
                f"flat element {position} belongs to no parameter (there are {self.numel})"
            )
        return bisect_right(self.offsets, position) - 1


def round_robin_order(count: int, num_shards: int) -> list[int]:
    """Parameter order that deals consecutive parameters to different shards.

    Gradients become ready in roughly reverse registration order, so with this order every rank owns
    part of each bucket (`round_robin_gradients`).
    """
    return [index for first in range(num_shards) for index in range(first, count, num_shards)]

"""The layout of stage 3: every parameter is a section of its own.

Of a parameter with n elements rank r of N owns `[r*c, (r+1)*c)`, c = ceil(n/N); the last cuts end
in padding where N does not divide n. A shard holds the cuts of several parameters one behind the
other, so the shards of all ranks are the rows of a matrix `[N, shard_numel]` in which each
parameter has c columns. A parameter can be cut the moment it is made, whatever others there will
be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from deepspeed.runtime.sharding.fragments import (
    Fragment,
    FragmentTable,
    NumEl,
    ParamIndex,
    ShardRank,
)


@dataclass(frozen=True)
class ParameterCutTable(FragmentTable):
    """The fragment table of this layout; `cut` makes it."""

    @classmethod
    def cut(cls, numels: Sequence[NumEl], num_shards: int) -> ParameterCutTable:
        """The table of parameters with these element counts."""
        sections = tuple((param,) for param, numel in enumerate(numels) if numel)
        return cls(tuple(numels), num_shards, 1, sections)

    @cached_property
    def cuts(self) -> tuple[NumEl, ...]:
        """Elements of each parameter in every shard, padding included."""
        return tuple(-(-numel // self.num_shards) for numel in self.numels)

    @cached_property
    def cut_starts(self) -> tuple[NumEl, ...]:
        """Where each parameter's cut starts in every shard; the last entry is the shard's size."""
        return (0, *accumulate(self.cuts))

    def fragment(self, param: ParamIndex, shard: ShardRank) -> Fragment:
        """What `shard` owns of a parameter; may have no elements."""
        start = shard * self.cuts[param]
        numel = max(0, min(self.cuts[param], self.numels[param] - start))
        return Fragment(param, start, shard, self.cut_starts[param], numel)

    def row(self, shard: ShardRank) -> slice:
        """The elements of the flattened rows that are those of `shard`."""
        return slice(shard * self.shard_numel, (shard + 1) * self.shard_numel)

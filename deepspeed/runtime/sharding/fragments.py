"""The fragment table: which shard owns which elements of which parameter.

Pure integers, no torch. A parameter group is laid out as one flat range, which is a sequence of
*sections*: each holds some of the parameters, one behind the other, is padded at its end, and is
cut into `num_shards` equal parts. Shard r is the r-th part of the first section, behind it the r-th
of the second, and so on. So whatever is done section by section (the reduction of a bucket, a
gather) is one even collective. With one section the shards are consecutive ranges of the flat one.

    flat    | a a a b | b b b . | c c d d | d d . . |    two sections, of a and b and of c and d,
    owner   | shard 0 | shard 1 | shard 0 | shard 1 |    between two shards; dots are padding

A *fragment* is one parameter's part of one shard. Reduction, norm, master weights, gathering,
checkpoints and `safe_get_full_*` all read this table, so "who owns what" has one answer. Nothing
here takes longer with more shards, but what lists all fragments of a parameter.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

# Device collectives copy fastest from multiples of it.
ROW_BYTES = 16

NumEl = int
ParamIndex = int
ShardRank = int


class Fragment(NamedTuple):
    """`numel` elements of `param`, from `param_start`, that lie at `shard_start` of `shard`."""

    param: ParamIndex
    param_start: NumEl
    shard: ShardRank
    shard_start: NumEl
    numel: NumEl

    @property
    def in_shard(self) -> slice:
        return slice(self.shard_start, self.shard_start + self.numel)

    @property
    def in_param(self) -> slice:
        return slice(self.param_start, self.param_start + self.numel)


class Section(NamedTuple):
    """A range of the flat range of which each shard owns an equal part, `part_numel` with padding,
    from `shard_start`; its `params` are in flat order, each with elements.
    """

    params: tuple[ParamIndex, ...]
    start: NumEl
    numel: NumEl
    shard_start: NumEl
    part_numel: NumEl
    padded_numel: NumEl

    def part_start(self, shard: ShardRank) -> NumEl:
        return self.start + shard * self.part_numel


@dataclass(frozen=True)
class FragmentTable:
    """Layout of one parameter group: elements of each parameter (may be 0), parts per section, of
    which each is a multiple of `alignment`, and the parameters of each section, in flat order; one
    without elements may lie nowhere. Raises ValueError for what is no such layout.
    """

    numels: tuple[NumEl, ...]
    num_shards: int
    alignment: int
    section_params: tuple[tuple[ParamIndex, ...], ...]

    def __post_init__(self) -> None:
        if self.num_shards < 1 or self.alignment < 1:
            raise ValueError(
                f"num_shards and alignment must be positive, got {self.num_shards} and "
                f"{self.alignment}"
            )
        if any(numel < 0 for numel in self.numels):
            raise ValueError(f"element counts must not be negative, got {self.numels}")
        listed = sorted(param for section in self.section_params for param in section)
        if listed != [param for param, numel in enumerate(self.numels) if numel]:
            raise ValueError(
                f"sections must hold every parameter with elements once, got {self.section_params} "
                f"for {self.numels}"
            )

    @classmethod
    def build(
        cls,
        numels: Sequence[NumEl],
        num_shards: int,
        alignment: int = 1,
        sections: Sequence[Sequence[ParamIndex]] | None = None,
    ) -> FragmentTable:
        """Lay out parameters of these element counts; None: they are one section."""
        given: Sequence[Sequence[int]] = [range(len(numels))] if sections is None else sections
        filled = ([param for param in section if numels[param]] for section in given)
        kept = tuple(tuple(section) for section in filled if section)
        return cls(tuple(numels), num_shards, alignment, kept)

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        unit = self.num_shards * self.alignment
        found: list[Section] = []
        start = shard_start = 0
        for params in self.section_params:
            numel = sum(self.numels[param] for param in params)
            padded = -(-numel // unit) * unit
            part = padded // self.num_shards
            found.append(Section(params, start, numel, shard_start, part, padded))
            start += padded
            shard_start += part
        return tuple(found)

    @cached_property
    def _starts(self) -> tuple[tuple[NumEl, ...], ...]:
        return tuple(
            (0, *accumulate(self.numels[param] for param in section.params[:-1]))
            for section in self.sections
        )

    @cached_property
    def _places(self) -> dict[ParamIndex, tuple[Section, NumEl]]:
        return {
            param: (section, start)
            for section, starts in zip(self.sections, self._starts, strict=True)
            for param, start in zip(section.params, starts, strict=True)
        }

    def section_of(self, param: ParamIndex) -> Section:
        return self._places[param][0]

    @cached_property
    def offsets(self) -> tuple[NumEl, ...]:
        """The place of each parameter in the flat range; 0 for one without elements."""
        offsets = [0] * len(self.numels)
        for param, (section, start) in self._places.items():
            offsets[param] = section.start + start
        return tuple(offsets)

    @cached_property
    def numel(self) -> NumEl:
        return sum(self.numels)

    @cached_property
    def padded_numel(self) -> NumEl:
        return sum(section.padded_numel for section in self.sections)

    @property
    def shard_numel(self) -> NumEl:
        """Elements of each shard, padding included."""
        return self.padded_numel // self.num_shards

    def shard_padding(self, shard: ShardRank) -> NumEl:
        """Count the shard's elements that belong to no parameter."""
        return sum(
            section.part_numel
            - min(max(section.numel - shard * section.part_numel, 0), section.part_numel)
            for section in self.sections
        )

    def is_laid_out_as(self, other: FragmentTable) -> bool:
        """Whether every element has the same place in both."""
        mine = (self.numels, self.num_shards, self.sections)
        return mine == (other.numels, other.num_shards, other.sections)

    def of_param(self, param: ParamIndex) -> tuple[Fragment, ...]:
        return tuple(self.of_range(param, 0, self.numels[param]))

    def of_range(self, param: ParamIndex, start: NumEl, end: NumEl) -> Iterator[Fragment]:
        """Yield fragments of elements `start` to `end` of one parameter, in element order."""
        if start >= end:
            return
        section, first = self._places[param]
        while start < end:
            shard, in_part = divmod(first + start, section.part_numel)
            numel = min(end - start, section.part_numel - in_part)
            yield Fragment(param, start, shard, section.shard_start + in_part, numel)
            start += numel

    def owned(self, param: ParamIndex, shard: ShardRank) -> Fragment | None:
        if not self.numels[param]:
            return None
        section, first = self._places[param]
        part = shard * section.part_numel
        start = max(part - first, 0)
        end = min(part + section.part_numel - first, self.numels[param])
        return next(self.of_range(param, start, end), None)

    def of_shard(self, shard: ShardRank) -> tuple[Fragment, ...]:
        return tuple(
            fragment
            for section, starts in zip(self.sections, self._starts, strict=True)
            for fragment in self._of_part(section, starts, shard)
        )

    def _of_part(
        self, section: Section, starts: Sequence[NumEl], shard: ShardRank
    ) -> Iterator[Fragment]:
        part = shard * section.part_numel
        position = max(bisect_right(starts, part) - 1, 0)
        for param in section.params[position:]:
            fragment = self.owned(param, shard)
            if fragment is None:
                return
            yield fragment


def round_robin_order(count: int, num_shards: int) -> list[int]:
    """Deal consecutive parameters to different shards: the layout of files
    (`round_robin_gradients`), where shards are consecutive ranges, which so have parameters from
    all over.
    """
    return [index for first in range(num_shards) for index in range(first, count, num_shards)]


@dataclass(frozen=True)
class ParameterCutTable(FragmentTable):
    """The layout of stage 3: every parameter is a section of its own.

    Of a parameter with n elements rank r of N owns `[r*c, (r+1)*c)`, c = ceil(n/N); the last cuts
    end in padding where N does not divide n. A shard holds the cuts of several parameters one
    behind the other, so the shards of all ranks are the rows of a matrix `[N, shard_numel]` in
    which each parameter has c columns. A parameter can be cut the moment it is made, whatever
    others there will be. `cut` makes the table.
    """

    @classmethod
    def cut(cls, numels: Sequence[NumEl], num_shards: int) -> ParameterCutTable:
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
        """Find what `shard` owns of a parameter; it may have no elements."""
        start = shard * self.cuts[param]
        numel = max(0, min(self.cuts[param], self.numels[param] - start))
        return Fragment(param, start, shard, self.cut_starts[param], numel)

    def row_numel(self, itemsize: int) -> NumEl:
        """Elements from one row in memory to the next: rows start at multiples of `ROW_BYTES`."""
        unit = max(1, ROW_BYTES // itemsize)
        return -(-self.shard_numel // unit) * unit

    def rows_numel(self, itemsize: int) -> NumEl:
        """Count the elements of all rows."""
        return self.num_shards * self.row_numel(itemsize)

    def row(self, shard: ShardRank, itemsize: int) -> slice:
        """Slice rows in memory, flattened, where the shard of that rank is."""
        start = shard * self.row_numel(itemsize)
        return slice(start, start + self.shard_numel)

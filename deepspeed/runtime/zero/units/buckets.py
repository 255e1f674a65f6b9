"""Buckets of a gather unit: the rows of its parameters that are reduced together, of which every
rank gets its own. A row may belong to several optimizer groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from deepspeed.runtime.gradients.buckets import Segment
from deepspeed.runtime.gradients.reduction import ReductionSettings
from deepspeed.runtime.gradients.sequence_parts import has_parts
from deepspeed.runtime.optimizers.master_weights import Place
from deepspeed.runtime.sharding.fragments import ParameterCutTable
from deepspeed.runtime.sharding.group import ShardedGroup
from deepspeed.runtime.zero.gathering.gather_unit import GatherUnit
from deepspeed.runtime.zero.parameters.zero_parameter import record_of

Groups = Sequence[ShardedGroup]


class ShardPart(NamedTuple):
    """The part of a bucket's row that belongs to one optimizer group."""

    group: int  # number of the group
    start: int  # first element in the row
    numel: int
    segments: tuple[Segment, ...]  # where they lie in the group's shard


@dataclass(frozen=True)
class UnitBucket:
    """The trainable parameters of a unit that travel in one dtype."""

    table: ParameterCutTable  # how they are cut; the payload is its rows
    params: tuple[tuple[int, int], ...]  # group and index of each
    parts: tuple[ShardPart, ...]  # what of a row belongs to whom
    kind: torch.dtype

    @property
    def numel(self) -> int:
        return self.table.rows_numel(self.kind.itemsize)

    @property
    def used(self) -> int:
        """The same: whoever fills the payload fills the padding."""
        return self.numel

    @property
    def group(self) -> int:
        """A group whose ranks are those of all."""
        return self.params[0][0]


def buckets_of(
    unit: GatherUnit,
    groups: Groups,
    places: Mapping[nn.Parameter, Place],
    settings: ReductionSettings,
) -> Iterator[UnitBucket]:
    """Make the buckets of a unit: one for each dtype of its trained parameters, and others for
    those whose gradients are complete only right before a reduction, for which the rest need not
    wait. What persists may be many parameters: a bucket's elements at a time.
    """
    kinds: dict[tuple[torch.dtype, bool], list[tuple[int, int]]] = {}
    for param in unit.params:
        place = places.get(param)
        if place is not None and record_of(param).numel:
            kind = settings.travels_in(param), has_parts(param)
            kinds.setdefault(kind, []).append(place)
    limit = settings.reduce_bucket_size if unit.persists else None
    for (dtype, _), at in kinds.items():
        for chunk in _chunks(sorted(at), groups, limit):
            numels = tuple(groups[group].table.numels[index] for group, index in chunk)
            table = ParameterCutTable.cut(numels, unit.table.num_shards)
            yield UnitBucket(table, tuple(chunk), _parts(chunk, table, groups), dtype)


def _chunks(
    params: list[tuple[int, int]], groups: Groups, limit: int | None
) -> Iterator[list[tuple[int, int]]]:
    chunk: list[tuple[int, int]] = []
    numel = 0
    for group, index in params:
        added = groups[group].table.numels[index]
        if chunk and limit is not None and numel + added > limit:
            yield chunk
            chunk, numel = [], 0
        chunk.append((group, index))
        numel += added
    yield chunk


def _parts(
    params: Sequence[tuple[int, int]], table: ParameterCutTable, groups: Groups
) -> tuple[ShardPart, ...]:
    parts: list[ShardPart] = []
    for number, (group, index) in enumerate(params):
        theirs: Any = groups[group].table
        at = theirs.cut_starts[index]
        start, numel = table.cut_starts[number], table.cuts[number]
        if parts and parts[-1].group == group:
            last = parts[-1]
            segments = _with(last.segments, Segment(start, at, numel))
            parts[-1] = ShardPart(group, last.start, last.numel + numel, segments)
        else:
            parts.append(ShardPart(group, start, numel, (Segment(start, at, numel),)))
    return tuple(parts)


def _with(segments: tuple[Segment, ...], added: Segment) -> tuple[Segment, ...]:
    """`segments` and one more, joined with the last where both sides are contiguous."""
    last = segments[-1]
    if last.shard_start + last.numel == added.shard_start:
        return (*segments[:-1], last._replace(numel=last.numel + added.numel))
    return (*segments, added)

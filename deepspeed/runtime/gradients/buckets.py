"""Bucket plans: which parameters share one collective, and where its elements lie in the shards.

Pure integers, computed once. Plans are static and launched in one order on every rank, whatever
gradients it has and when they became ready. A bucket that is reduced onto several shards is a
section of its group's `FragmentTable`, padding included, of which every shard owns an equal part; a
plan says nothing of the others' parts, so it does not grow with their number.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any, NamedTuple

from deepspeed.runtime.sharding.fragments import FragmentTable, NumEl, ParamIndex, ShardRank

# Elements: the 16 bytes of two-byte dtypes that a device's kernels read at once.
ALIGNED_NUMEL = 8

GroupIndex = int
BucketParams = tuple[ParamIndex, ...]


class Segment(NamedTuple):
    """`numel` elements at `bucket_start` of a bucket and at `shard_start` of the owner's shard."""

    bucket_start: NumEl
    shard_start: NumEl
    numel: NumEl


@dataclass(frozen=True)
class BucketPlan:
    """One collective's payload, as one rank sees it."""

    group: GroupIndex  # parameter group of all its parameters
    params: BucketParams  # indices in the group, in flat order
    starts: tuple[NumEl, ...]  # where each parameter starts in the bucket
    numel: NumEl  # elements in the bucket, padding included
    used: NumEl  # elements of parameters; what follows is padding
    own_start: NumEl  # where the elements that this rank owns start in the bucket
    own_numel: NumEl  # how many they are; as many on each rank
    segments: tuple[Segment, ...]  # where they lie in this rank's shard
    kind: Any = None  # parameters with different kinds (dtypes) never share a bucket


def plan_bucket(
    group: GroupIndex,
    table: FragmentTable,
    params: BucketParams,
    shard: ShardRank,
    kind: Hashable = None,
) -> BucketPlan:
    """Plan a bucket of just `params`, of a section of `table`, as the owner of `shard` sees it."""
    starts, position = [], 0
    for param in params:
        starts.append(position)
        position += table.numels[param]
    used = position
    if table.num_shards == 1:
        numel, own_start, own_numel = used, 0, used
        segments = _segments(table, params)
    else:
        section = table.section_of(params[0])
        assert section.params == params, f"bucket {params} is not section {section.params}"
        numel, own_numel = section.padded_numel, section.part_numel
        own_start = shard * own_numel
        segments = (Segment(own_start, section.shard_start, own_numel),)
    return BucketPlan(
        group, params, tuple(starts), numel, used, own_start, own_numel, segments, kind
    )


def _segments(table: FragmentTable, params: BucketParams) -> tuple[Segment, ...]:
    """Where the elements of parameters lie that one shard has whole."""
    owned: list[Segment] = []
    position = 0
    for param in params:
        _append(owned, Segment(position, table.offsets[param], table.numels[param]))
        position += table.numels[param]
    return tuple(owned)


def _append(owned: list[Segment], segment: Segment) -> None:
    """Append, joined with the last one where both sides are contiguous."""
    if owned:
        last = owned[-1]
        if (
            last.bucket_start + last.numel == segment.bucket_start
            and last.shard_start + last.numel == segment.shard_start
        ):
            owned[-1] = last._replace(numel=last.numel + segment.numel)
            return
    owned.append(segment)


def fill_buckets(
    numels: Sequence[NumEl],
    registration: Sequence[int],
    bucket_numel: NumEl,
    kinds: Sequence[Hashable] | None = None,
) -> list[BucketParams]:
    """Choose the parameters of each bucket of one group, the one that is complete first at the
    front.

    Args:
        numels: Elements of each parameter; those without any are in no bucket.
        registration: Position of each parameter in the model. Gradients become ready in about the
            reverse order.
        bucket_numel: A bucket takes parameters until one more would exceed this. A parameter at or
            above it has its own bucket.
        kinds: For each parameter, what must be equal within a bucket (the communication dtype).
    """
    by_kind: dict[Hashable, list[ParamIndex]] = {}
    for param in sorted(range(len(numels)), key=lambda index: -registration[index]):
        kind = kinds[param] if kinds is not None else None
        by_kind.setdefault(kind, []).append(param)
    filled = (_fill(params, numels, bucket_numel) for params in by_kind.values())
    chunks = [in_flat_order(chunk, numels) for several in filled for chunk in several]
    return sorted(chunks, key=lambda chunk: -_completed_by(chunk, registration))


def in_flat_order(params: Iterable[ParamIndex], numels: Sequence[NumEl]) -> BucketParams:
    """Put parameters behind one another so that each starts at a multiple of the power of two, up
    to `ALIGNED_NUMEL`, that divides its size: one of odd size, such as a temperature, comes last
    and does not move all others to where kernels cannot read them as wide as they like.
    """
    return tuple(sorted(params, key=lambda param: (-gcd(numels[param], ALIGNED_NUMEL), param)))


def _completed_by(params: BucketParams, registration: Sequence[int]) -> int:
    """The position in the model of the parameter whose gradient completes the bucket."""
    return min(registration[param] for param in params)


def plan_buckets(
    tables: Sequence[FragmentTable],
    buckets: Sequence[Sequence[BucketParams]],
    shards: Sequence[ShardRank],
    registration: Sequence[Sequence[int]],
    kinds: Sequence[Sequence[Hashable]] | None = None,
) -> list[BucketPlan]:
    """Plan the buckets of all groups, in launch order: the bucket whose first parameter comes last
    in `registration` is complete first. `shards` says which shard of each group this rank owns.
    """
    plans = [
        (
            _completed_by(params, registration[group]),
            plan_bucket(
                group, table, params, shards[group], kinds[group][params[0]] if kinds else None
            ),
        )
        for group, table in enumerate(tables)
        for params in buckets[group]
    ]
    plans.sort(key=lambda plan: -plan[0])
    return [plan for _, plan in plans]


def _fill(
    params: Sequence[ParamIndex], numels: Sequence[NumEl], bucket_numel: NumEl
) -> list[list[ParamIndex]]:
    chunks: list[list[ParamIndex]] = []
    filled = 0
    for param in params:
        if numels[param] == 0:
            continue
        if not chunks or filled + numels[param] > bucket_numel:
            chunks.append([])
            filled = 0
        chunks[-1].append(param)
        filled += numels[param]
    return chunks

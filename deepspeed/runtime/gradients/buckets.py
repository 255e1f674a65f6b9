"""Bucket plans: which parameters share one collective, and which of its elements each shard owns.

Pure integers, computed once. Plans are static and launched in one order on every rank: the
collectives that a rank issues never depend on which gradients it has or when they became ready.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from deepspeed.runtime.sharding.fragments import FragmentTable, NumEl, ParamIndex

GroupIndex = int


class Segment(NamedTuple):
    """`numel` elements at `bucket_start` of a bucket that lie at `shard_start` of the owner's
    shard.
    """

    bucket_start: NumEl
    shard_start: NumEl
    numel: NumEl


@dataclass(frozen=True)
class BucketPlan:
    """One collective's payload.

    Attributes:
        group: Parameter group of all its parameters.
        params: Indices in the group, in flat order, so that each owner's elements are contiguous in
            the bucket.
        starts: Where each parameter starts in the bucket.
        numel: Elements in the bucket.
        splits: Elements that each shard owns, in bucket order.
        segments: For each shard, where its elements lie.
        kind: Parameters with different kinds (dtypes) never share a bucket.
    """

    group: GroupIndex
    params: tuple[ParamIndex, ...]
    starts: tuple[NumEl, ...]
    numel: NumEl
    splits: tuple[NumEl, ...]
    segments: tuple[tuple[Segment, ...], ...]
    kind: Any = None

    def owned_start(self, shard: int) -> NumEl:
        """Where the elements of `shard` start in the bucket."""
        return sum(self.splits[:shard])


def plan_bucket(
    group: GroupIndex, table: FragmentTable, params: Sequence[ParamIndex], kind: Hashable = None
) -> BucketPlan:
    """The plan of a bucket that holds exactly `params`."""
    ordered = tuple(sorted(params))
    starts = []
    segments: list[list[Segment]] = [[] for _ in range(table.num_shards)]
    position = 0
    for param in ordered:
        starts.append(position)
        for fragment in table.of_param(param):
            _append(
                segments[fragment.shard], Segment(position, fragment.shard_start, fragment.numel)
            )
            position += fragment.numel
    splits = tuple(sum(segment.numel for segment in owned) for owned in segments)
    return BucketPlan(
        group, ordered, tuple(starts), position, splits, tuple(map(tuple, segments)), kind
    )


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


def plan_buckets(
    tables: Sequence[FragmentTable],
    registration: Sequence[Sequence[int]],
    bucket_numel: NumEl,
    kinds: Sequence[Sequence[Hashable]] | None = None,
) -> list[BucketPlan]:
    """Plans for all groups, in launch order.

    Args:
        tables: Layout of each group.
        registration: For each group and parameter, its position in the model. Gradients become
            ready in about the reverse order.
        bucket_numel: A bucket takes parameters until one more would exceed this. A parameter at or
            above it has its own bucket.
        kinds: For each group and parameter, what must be equal within a bucket (the communication
            dtype).
    """
    plans: list[tuple[int, BucketPlan]] = []
    for group, table in enumerate(tables):
        order = registration[group]
        by_kind: dict[Hashable, list[ParamIndex]] = {}
        for param in sorted(range(len(table.numels)), key=lambda index: -order[index]):
            kind = kinds[group][param] if kinds is not None else None
            by_kind.setdefault(kind, []).append(param)
        for kind, params in by_kind.items():
            for chunk in _fill(params, table.numels, bucket_numel):
                plans.append(
                    (min(order[param] for param in chunk), plan_bucket(group, table, chunk, kind))
                )
    # The bucket whose earliest-registered parameter comes last in the model is complete first.
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

"""Bucket plans as integers: membership, splits and segments against the fragment table, and the
launch order.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

from deepspeed.runtime.gradients.buckets import BucketPlan, plan_bucket, plan_buckets
from deepspeed.runtime.sharding.fragments import FragmentTable


def cases(
    seed: int = 1,
) -> Iterator[tuple[list[FragmentTable], list[list[int]], int, list[list[str]]]]:
    """Groups of odd and zero-size parameters in a shuffled registration order, with two kinds, for
    several worlds and sizes.
    """
    generator = random.Random(seed)
    for world, bucket in itertools.product(range(1, 6), (1, 7, 16, 10**9)):
        sizes = [
            [generator.choice((0, 1, 3, 7, 8, 16, 40)) for _ in range(generator.randrange(8))]
            for _ in range(3)
        ]
        names = list(range(sum(map(len, sizes))))
        generator.shuffle(names)
        registration = [[names.pop() for _ in group] for group in sizes]
        kinds = [[generator.choice("ab") for _ in group] for group in sizes]
        yield [FragmentTable.build(group, world, 2) for group in sizes], registration, bucket, kinds


def test_every_parameter_with_elements_is_in_exactly_one_bucket():
    # Kills: a parameter lost at a bucket's end or repeated in the next, and an empty bucket made
    # for a zero-size one.
    for tables, registration, bucket, kinds in cases():
        plans = plan_buckets(tables, registration, bucket, kinds)
        carried = sorted((plan.group, param) for plan in plans for param in plan.params)
        expected = [
            (g, p)
            for g, table in enumerate(tables)
            for p, numel in enumerate(table.numels)
            if numel
        ]
        assert carried == expected
        assert all(plan.numel > 0 for plan in plans)


def test_buckets_are_filled_up_to_their_size():
    # Kills: `>=` for `>` (an exactly full bucket is allowed), and a bucket that overflows with more
    # than one parameter.
    for tables, registration, bucket, kinds in cases():
        for plan in plan_buckets(tables, registration, bucket, kinds):
            assert plan.numel <= bucket or len(plan.params) == 1
    table = FragmentTable.build([4, 4, 4, 4], 2)
    assert [plan.params for plan in plan_buckets([table], [[0, 1, 2, 3]], 8)] == [(2, 3), (0, 1)]
    assert [plan.params for plan in plan_buckets([table], [[0, 1, 2, 3]], 7)] == [
        (3,),
        (2,),
        (1,),
        (0,),
    ]


def test_an_oversized_parameter_has_a_bucket_of_its_own():
    # Kills: an oversized parameter that is dropped, cut, or joined by the next small one.
    table = FragmentTable.build([3, 100, 3], 2)
    assert [plan.params for plan in plan_buckets([table], [[0, 1, 2]], 10)] == [(2,), (1,), (0,)]


def test_kinds_and_groups_never_share_a_bucket():
    # Kills: a bucket that would carry one dtype as another, or one group's elements into another
    # group's shard.
    for tables, registration, bucket, kinds in cases():
        for plan in plan_buckets(tables, registration, bucket, kinds):
            assert {kinds[plan.group][param] for param in plan.params} == {plan.kind}


def elements(plan: BucketPlan, table: FragmentTable) -> list[Any]:
    """For each bucket element the place (shard, position) that its parameter's fragment gives
    it.
    """
    places: list[Any] = [None] * plan.numel
    for param, start in zip(plan.params, plan.starts, strict=True):
        for fragment in table.of_param(param):
            for i in range(fragment.numel):
                places[start + fragment.param_start + i] = (
                    fragment.shard,
                    fragment.shard_start + i,
                )
    return places


def test_splits_and_segments_agree_with_the_table():
    # Kills: segments that are joined across a gap in the shard or the bucket, splits in another
    # order than the bucket, a start that is off after an odd-sized parameter.
    for tables, registration, bucket, kinds in cases():
        for plan in plan_buckets(tables, registration, bucket, kinds):
            table = tables[plan.group]
            places = elements(plan, table)
            assert None not in places
            # Each owner's elements are contiguous, in rank order: what a reduce-scatter with these
            # splits delivers.
            assert [place[0] for place in places] == [
                rank for rank, numel in enumerate(plan.splits) for _ in range(numel)
            ]
            for rank, segments in enumerate(plan.segments):
                assert plan.owned_start(rank) == sum(plan.splits[:rank])
                position = plan.owned_start(rank)
                for segment in segments:
                    assert segment.bucket_start == position
                    expected = [(rank, segment.shard_start + i) for i in range(segment.numel)]
                    assert places[position : position + segment.numel] == expected
                    position += segment.numel
                assert position == plan.owned_start(rank) + plan.splits[rank]


def test_neighbours_are_one_segment():
    # Kills: no joining at all, which would cost one small addition per parameter and step.
    plan = plan_bucket(0, FragmentTable.build([2, 2, 2, 2], 2), [0, 1, 2, 3])
    assert [len(segments) for segments in plan.segments] == [1, 1]


def test_the_bucket_that_is_complete_first_goes_first():
    # Kills: registration order instead of its reverse, which delays every launch to the end of
    # backward.
    for tables, registration, bucket, kinds in cases():
        plans = plan_buckets(tables, registration, bucket, kinds)
        completed = [
            min(registration[plan.group][param] for param in plan.params) for plan in plans
        ]
        assert completed == sorted(completed, reverse=True)


def test_plans_do_not_depend_on_anything_but_the_arguments():
    # Kills: an order by hash or identity: two ranks would then issue different collectives.
    first = [plan_buckets(*case) for case in cases()]
    assert first == [plan_buckets(*case) for case in cases()]

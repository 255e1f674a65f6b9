"""Bucket plans as integers: membership, places against the fragment table, and the launch order."""

import itertools
import random
from collections.abc import Iterator
from math import gcd
from typing import NamedTuple

from deepspeed.runtime.gradients.buckets import (
    ALIGNED_NUMEL,
    BucketPlan,
    fill_buckets,
    plan_bucket,
    plan_buckets,
)
from deepspeed.runtime.sharding.fragments import FragmentTable


class Case(NamedTuple):
    """Groups whose buckets are sections; a shard of each world."""

    tables: list[FragmentTable]
    bucket: int
    registration: list[list[int]]
    kinds: list[list[str]]
    plans: list[BucketPlan]
    shard: int


def cases(seed: int = 1) -> Iterator[Case]:
    """Groups of odd and zero-size parameters in a shuffled order, of two kinds, several worlds."""
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
        groups = list(zip(sizes, registration, kinds, strict=True))
        buckets = [fill_buckets(numels, order, bucket, of) for numels, order, of in groups]
        tables = [
            FragmentTable.build(group, world, 2, own[::-1] if world > 1 else None)
            for group, own in zip(sizes, buckets, strict=True)
        ]
        for shard in range(world):
            plans = plan_buckets(tables, buckets, [shard] * len(tables), registration, kinds)
            yield Case(tables, bucket, registration, kinds, plans, shard)


def planned(numels: list[int], bucket: int) -> list[tuple[int, ...]]:
    """The buckets of parameters in the model's order."""
    return fill_buckets(numels, range(len(numels)), bucket)


def test_every_parameter_with_elements_is_in_exactly_one_bucket():
    # Kills: a parameter lost at a bucket's end or repeated in the next, an empty bucket for a
    # zero-size one; a bucket of two dtypes, or of two groups, whose shards are others.
    for case in cases():
        carried = [(plan.group, param) for plan in case.plans for param in plan.params]
        whole = [(g, p) for g, table in enumerate(case.tables) for p in range(len(table.numels))]
        assert sorted(carried) == [(g, p) for g, p in whole if case.tables[g].numels[p]]
        for plan in case.plans:
            assert plan.numel > 0
            assert {case.kinds[plan.group][param] for param in plan.params} == {plan.kind}


def test_buckets_are_filled_up_to_their_size():
    # Kills: `>=` for `>` (an exactly full bucket is allowed), a bucket that overflows with several
    # parameters; an oversized one that is dropped, cut, or joined by the next small one.
    for case in cases():
        for plan in case.plans:
            assert plan.used <= case.bucket or len(plan.params) == 1
    assert planned([4, 4, 4, 4], 8) == [(2, 3), (0, 1)]
    assert planned([4, 4, 4, 4], 7) == [(3,), (2,), (1,), (0,)]
    assert planned([3, 100, 3], 10) == [(2,), (1,), (0,)]


def test_each_parameter_starts_where_its_size_lets_it():
    # Kills: the order of the model or of files, in which a temperature (1 element) or a table of
    # odd size moves all that follow to where a device's kernels read element by element.
    for case in cases():
        for plan in case.plans:
            for param, start in zip(plan.params, plan.starts, strict=True):
                assert start % gcd(case.tables[plan.group].numels[param], ALIGNED_NUMEL) == 0
    assert planned([1, 64, 507, 128, 8], 10**9) == [(1, 3, 4, 0, 2)]


def test_a_bucket_is_cut_as_the_table_says():
    # Kills: parts that are not equal, segments of another shard or another section, a start that is
    # off after an odd-sized parameter, padding that is counted as elements.
    for case in cases():
        for plan in case.plans:
            table = case.tables[plan.group]
            assert plan.used <= plan.numel == plan.own_numel * table.num_shards
            held = {
                segment.bucket_start + i: segment.shard_start + i
                for segment in plan.segments
                for i in range(segment.numel)
            }
            own = range(plan.own_start, plan.own_start + plan.own_numel)
            assert list(held) == list(own)
            for param, start in zip(plan.params, plan.starts, strict=True):
                for fragment in table.of_param(param):
                    is_own = fragment.shard == case.shard
                    for i in range(fragment.numel):
                        place = start + fragment.param_start + i
                        assert place < plan.used and (place in own) == is_own
                        assert not is_own or held[place] == fragment.shard_start + i


def test_a_plan_costs_no_more_with_more_shards():
    # Kills: lists over all shards, which thousands of ranks would pay for at every start.
    numels = [1000] * 20
    buckets = planned(numels, 4000)
    table = FragmentTable.build(numels, 10**9, 8, buckets[::-1])
    plans = plan_buckets([table], [buckets], [10**8], [range(20)])
    assert [len(plan.segments) for plan in plans] == [1] * 5
    assert all(plan.numel == 8 * 10**9 and plan.used == 4000 for plan in plans)
    # Kills: no joining at all, which would cost one small addition per parameter and step.
    neighbours = plan_bucket(0, FragmentTable.build([2, 2, 2, 2], 1), (0, 1, 2, 3), 0)
    assert len(neighbours.segments) == 1


def test_the_bucket_that_is_complete_first_goes_first():
    # Kills: registration order instead of its reverse, which delays each launch to backward's end.
    for case in cases():
        orders = [[case.registration[plan.group][p] for p in plan.params] for plan in case.plans]
        completed = [min(order) for order in orders]
        assert completed == sorted(completed, reverse=True)


def test_a_held_parameter_delays_its_bucket_and_moves_nothing():
    # Kills: buckets that are filled anew when a parameter is held: no sections of the layout then.
    numels = [4] * 6
    buckets = planned(numels, 8)
    table = FragmentTable.build(numels, 2, 2, buckets[::-1])
    order = [0, 1, 2, 3, -1, 5]
    plans = plan_buckets([table], [buckets], [0], [order])
    assert [plan.params for plan in plans] == [(2, 3), (0, 1), (4, 5)]


def test_plans_do_not_depend_on_anything_but_the_arguments():
    # Kills: an order by hash or identity: two ranks would then issue different collectives.
    assert [case.plans for case in cases()] == [case.plans for case in cases()]

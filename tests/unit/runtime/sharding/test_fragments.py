"""The fragment table as integers: every element once, in order, padding only at the end."""

from __future__ import annotations

import itertools
import random

import pytest

from deepspeed.runtime.sharding.fragments import FragmentTable, round_robin_order

WORLDS = range(1, 6)


def layouts(seed: int = 0, count: int = 60) -> list[tuple[int, ...]]:
    """Random parameter sizes with many zeros and odd numbers, and the corner cases by hand."""
    generator = random.Random(seed)
    drawn = [
        tuple(
            generator.choice((0, 0, 1, 2, 3, 5, 7, 64, 129)) for _ in range(generator.randrange(9))
        )
        for _ in range(count)
    ]
    return [(), (0,), (0, 0), (1,), (1, 0), (0, 1), (4, 4), *drawn]


CASES = list(itertools.product(layouts(), WORLDS, (1, 2, 8)))


def flat_owner_map(table: FragmentTable) -> dict[tuple[int, int], tuple[int, int]]:
    """(shard, position in it) -> (parameter, element), refusing a place that is used twice."""
    owners: dict[tuple[int, int], tuple[int, int]] = {}
    for param in range(len(table.numels)):
        for fragment in table.of_param(param):
            for i in range(fragment.numel):
                place = (fragment.shard, fragment.shard_start + i)
                assert place not in owners, f"{place} holds two elements"
                owners[place] = (fragment.param, fragment.param_start + i)
    return owners


def test_every_element_lies_in_exactly_one_place():
    # Kills: a fragment that is cut short at a shard's end, starts one off, or is listed twice.
    for numels, world, alignment in CASES:
        table = FragmentTable.build(numels, world, alignment)
        owners = flat_owner_map(table)
        elements = [(param, i) for param, numel in enumerate(numels) for i in range(numel)]
        assert sorted(owners.values()) == elements, (numels, world, alignment)


def test_places_follow_the_flat_order_and_padding_is_last():
    # Kills: padding between parameters or shards (as per-parameter padding would make), and a wrong
    # order of parameters.
    for numels, world, alignment in CASES:
        table = FragmentTable.build(numels, world, alignment)
        owners = flat_owner_map(table)
        places = (
            [divmod(position, table.shard_numel) for position in range(table.numel)]
            if table.numel
            else []
        )
        assert [owners[place] for place in places] == sorted(owners.values())
        assert (
            sum(table.shard_padding(shard) for shard in range(world))
            == table.padded_numel - table.numel
        )
        assert table.padded_numel - table.numel < world * alignment
        for shard in range(world):
            used = sum(fragment.numel for fragment in table.of_shard(shard))
            assert used + table.shard_padding(shard) == table.shard_numel
            padded_places = range(table.shard_numel - table.shard_padding(shard), table.shard_numel)
            assert not any((shard, place) in owners for place in padded_places)


def test_shards_are_equal_aligned_and_cover_the_range():
    # Kills: shards of uneven size (collectives need equal ones) and alignment applied to the whole
    # instead of each shard.
    for numels, world, alignment in CASES:
        table = FragmentTable.build(numels, world, alignment)
        ranges = [table.shard_range(shard) for shard in range(world)]
        assert ranges[0][0] == 0 and ranges[-1][1] == table.padded_numel
        assert all(left[1] == right[0] for left, right in itertools.pairwise(ranges))
        assert {end - start for start, end in ranges} == {table.shard_numel}
        assert table.shard_numel % alignment == 0


def test_both_views_list_the_same_fragments():
    # Kills: a per-shard view that drops or reorders fragments, so that norm and gather would
    # disagree with reduction.
    for numels, world, alignment in CASES:
        table = FragmentTable.build(numels, world, alignment)
        by_param = [fragment for param in range(len(numels)) for fragment in table.of_param(param)]
        by_shard = [fragment for shard in range(world) for fragment in table.of_shard(shard)]
        assert sorted(by_param) == sorted(by_shard)
        for shard in range(world):
            starts = [fragment.shard_start for fragment in table.of_shard(shard)]
            assert starts == sorted(starts)
            assert all(
                fragment.shard == shard and fragment.numel > 0 for fragment in table.of_shard(shard)
            )


def test_param_at_inverts_the_offsets_and_refuses_padding():
    # Kills: bisect on the wrong side, which gives a zero-size parameter the element of its
    # neighbour.
    for numels, world, _ in CASES:
        table = FragmentTable.build(numels, world, 2)
        for param, numel in enumerate(numels):
            assert all(table.param_at(table.offsets[param] + i) == param for i in range(numel))
        for outside in (-1, table.numel, table.padded_numel):
            with pytest.raises(IndexError, match=f"element {outside} "):
                table.param_at(outside)


@pytest.mark.parametrize("numels, world, alignment", [((3, -1), 1, 1), ((3,), 0, 1), ((3,), 1, 0)])
def test_impossible_layouts_are_refused(numels, world, alignment):
    # Kills: a missing check that would give a negative or a zero-length shard later on.
    with pytest.raises(ValueError):
        FragmentTable.build(numels, world, alignment)


def test_round_robin_deals_each_parameter_once():
    # Kills: an order that loses parameters when the count is no multiple of the shards, or that
    # deals nothing.
    for count, world in itertools.product(range(12), WORLDS):
        order = round_robin_order(count, world)
        assert sorted(order) == list(range(count))
    assert round_robin_order(7, 3) == [0, 3, 6, 1, 4, 2, 5]
    # Consecutive parameters end up on different shards when all are of one size.
    table = FragmentTable.build([4] * 6, 3)
    shard_of = {
        param: table.of_param(place)[0].shard for place, param in enumerate(round_robin_order(6, 3))
    }
    assert all(shard_of[i] != shard_of[i + 1] for i in range(5))

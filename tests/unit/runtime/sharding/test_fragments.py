"""The fragment table as integers: every element once, in order, padding at the end of parts."""

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


def cut(numels: tuple[int, ...], generator: random.Random) -> list[list[int]] | None:
    """Random sections of these parameters, in any order, some without elements; None: one."""
    if generator.random() < 0.3:
        return None
    params = list(range(len(numels)))
    generator.shuffle(params)
    sections: list[list[int]] = [[]]
    for param in params:
        if generator.random() < 0.4:
            sections.append([])
        sections[-1].append(param)
    return [sorted(section) for section in sections]


def tables(seed: int = 3) -> list[FragmentTable]:
    generator = random.Random(seed)
    return [
        FragmentTable.build(numels, world, alignment, cut(numels, generator))
        for numels, world, alignment in itertools.product(layouts(), (*WORLDS, 37), (1, 2, 8))
    ]


TABLES = tables()


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
    for table in TABLES:
        owners = flat_owner_map(table)
        elements = [(param, i) for param, numel in enumerate(table.numels) for i in range(numel)]
        assert sorted(owners.values()) == elements, table


def test_places_follow_the_order_of_a_section_and_padding_is_last():
    # Kills: padding between parameters or shards (as per-parameter padding would make), a wrong
    # order of parameters, and parts that a section's reduce-scatter would not deliver.
    for table in TABLES:
        owners = flat_owner_map(table)
        for section in table.sections:
            elements = [(param, i) for param in section.params for i in range(table.numels[param])]
            places = [divmod(position, section.part_numel) for position in range(section.numel)]
            assert elements == [
                owners[shard, section.shard_start + place] for shard, place in places
            ]
            assert len(elements) == section.numel
            assert 0 <= section.padded_numel - section.numel < table.num_shards * table.alignment
        for shard in range(table.num_shards):
            used = sum(fragment.numel for fragment in table.of_shard(shard))
            assert used + table.shard_padding(shard) == table.shard_numel


def test_one_section_is_consecutive_ranges():
    # Kills: another layout than that of upstream's files.
    table = FragmentTable.build([3, 0, 5, 1], 2, 2)
    assert table.padded_numel == 12 and table.offsets == (0, 0, 3, 8)
    assert [tuple(fragment) for fragment in table.of_shard(0)] == [(0, 0, 0, 0, 3), (2, 0, 0, 3, 3)]
    assert [tuple(fragment) for fragment in table.of_shard(1)] == [(2, 3, 1, 0, 2), (3, 0, 1, 2, 1)]
    assert [table.shard_padding(shard) for shard in (0, 1)] == [0, 3]


def test_sections_and_their_parts_are_equal_aligned_and_cover_the_range():
    # Kills: parts of uneven size (collectives need equal ones), alignment applied to the whole
    # instead of each part, sections that overlap.
    for table in TABLES:
        start = shard_start = 0
        for section in table.sections:
            assert (section.start, section.shard_start) == (start, shard_start)
            assert section.part_numel * table.num_shards == section.padded_numel
            assert section.part_numel % table.alignment == 0
            start, shard_start = start + section.padded_numel, shard_start + section.part_numel
            assert section.part_start(table.num_shards - 1) + section.part_numel == start
        assert (start, shard_start) == (table.padded_numel, table.shard_numel)


def test_offsets_are_where_parameters_lie_in_the_flat_range():
    # Kills: offsets that ignore the padding of sections before, or the order of sections.
    for table in TABLES:
        owners = flat_owner_map(table)
        for param, numel in enumerate(table.numels):
            for i in range(numel):
                section = table.section_of(param)
                shard, place = divmod(table.offsets[param] + i - section.start, section.part_numel)
                assert owners[shard, section.shard_start + place] == (param, i)


def test_all_views_list_the_same_fragments():
    # Kills: a per-shard view that drops or reorders fragments, so that norm and gather would
    # disagree with reduction; one parameter's own fragment that is another shard's.
    for table in TABLES:
        params, shards = range(len(table.numels)), range(table.num_shards)
        by_param = [fragment for param in params for fragment in table.of_param(param)]
        by_shard = [fragment for shard in shards for fragment in table.of_shard(shard)]
        owned = [table.owned(param, shard) for param in params for shard in shards]
        assert sorted(by_param) == sorted(by_shard)
        assert sorted(by_param) == sorted(fragment for fragment in owned if fragment is not None)
        for shard in shards:
            starts = [fragment.shard_start for fragment in table.of_shard(shard)]
            assert starts == sorted(starts)
            assert all(
                fragment.shard == shard and fragment.numel > 0 for fragment in table.of_shard(shard)
            )


def test_a_range_of_a_parameter_is_cut_as_the_whole_is():
    # Kills: fragments that start at the parameter's beginning whatever was asked for.
    generator = random.Random(0)
    for table in TABLES:
        for param, numel in enumerate(table.numels):
            start, end = sorted(generator.choices(range(numel + 1), k=2))
            places = [
                (fragment.shard, fragment.shard_start + i - fragment.param_start)
                for fragment in table.of_param(param)
                for i in range(fragment.param_start, fragment.param_start + fragment.numel)
            ]
            assert [
                (fragment.shard, place)
                for fragment in table.of_range(param, start, end)
                for place in range(fragment.shard_start, fragment.shard_start + fragment.numel)
            ] == places[start:end]


def test_layouts_are_compared_by_places():
    # Kills: an exchange where both layouts are the same, and none where they differ.
    one = FragmentTable.build([8, 0, 8], 2, 2)
    assert one.is_laid_out_as(FragmentTable.build([8, 0, 8], 2, 8, [[0, 2]]))
    assert one.is_laid_out_as(FragmentTable.build([8, 0, 8], 2, 2, [[1], [0, 1, 2]][1:]))
    assert not one.is_laid_out_as(FragmentTable.build([8, 0, 8], 2, 2, [[0], [2]]))
    assert not one.is_laid_out_as(FragmentTable.build([8, 0, 8], 2, 16))
    assert not one.is_laid_out_as(FragmentTable.build([8, 0, 8], 4, 2))


def test_a_table_costs_no_more_with_more_shards():
    # Kills: lists over all shards on the way to one shard's fragments, which thousands of ranks
    # would pay for at every start.
    table = FragmentTable.build([10**6 + 1] * 40, 10**9, 8, [[i, i + 1] for i in range(0, 40, 2)])
    assert len(table.of_shard(10**5)) == 20 and table.shard_padding(10**8) == 20 * 8
    assert table.owned(39, 10**5) is None or table.owned(39, 10**5).shard == 10**5


@pytest.mark.parametrize("sections", [[[0]], [[0, 1], [1]], [[0, 1], [2, 2]]])
def test_sections_hold_every_parameter_once(sections):
    # Kills: a parameter that lies nowhere, or in two places.
    with pytest.raises(ValueError, match="every parameter with elements once"):
        FragmentTable.build([1, 2, 3], 2, 1, sections)


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

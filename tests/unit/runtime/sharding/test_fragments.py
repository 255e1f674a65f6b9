"""Cuts of parameters: every element once, in order; rows, the flat buffer, exchanges of layouts."""

import itertools
import random
from collections.abc import Iterable

import pytest
import torch
from torch import nn
from unit.operators import Operators

from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.sim_accelerator import Sim_Accelerator, simulate
from deepspeed.runtime.sharding import flattening
from deepspeed.runtime.sharding.cut_rows import RowFiller, WholeViews
from deepspeed.runtime.sharding.exchange import Run, in_rounds, kept, overlaps
from deepspeed.runtime.sharding.flattening import flatten, write_master
from deepspeed.runtime.sharding.fragments import (
    Fragment,
    FragmentTable,
    ParameterCutTable,
    round_robin_order,
)

WORLDS = range(1, 6)


def layouts(seed: int = 0, count: int = 60) -> list[tuple[int, ...]]:
    """Random parameter sizes with many zeros and odd numbers, and the corner cases by hand."""
    generator = random.Random(seed)
    sizes = (0, 0, 1, 2, 3, 5, 7, 64, 129)
    drawn = [tuple(generator.choices(sizes, k=generator.randrange(9))) for _ in range(count)]
    return [(), (0,), (0, 0), (1,), (1, 0), (0, 1), (4, 4), *drawn]


def cut(numels: tuple[int, ...], generator: random.Random) -> list[list[int]] | None:
    """Random sections of these parameters, in any order, some without elements; None: one."""
    if generator.random() < 0.3:
        return None
    sections: list[list[int]] = [[]]
    for param in generator.sample(range(len(numels)), len(numels)):
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
        # Kills: offsets that ignore the padding of sections before, or the order of sections.
        for param, i in elements:
            section = table.section_of(param)
            shard, place = divmod(table.offsets[param] + i - section.start, section.part_numel)
            assert owners[shard, section.shard_start + place] == (param, i)


def test_places_follow_the_order_of_a_section_and_padding_is_last():
    # Kills: padding between parameters or shards (as per-parameter padding would make), a wrong
    # order of parameters, and parts that a section's reduce-scatter would not deliver.
    for table in TABLES:
        owners = flat_owner_map(table)
        for section in table.sections:
            elements = [(param, i) for param in section.params for i in range(table.numels[param])]
            places = [divmod(position, section.part_numel) for position in range(section.numel)]
            shifted = [(shard, section.shard_start + place) for shard, place in places]
            assert elements == [owners[place] for place in shifted]
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
            fragments = table.of_shard(shard)
            starts = [fragment.shard_start for fragment in fragments]
            assert starts == sorted(starts)
            assert all(part.shard == shard and part.numel > 0 for part in fragments)


def test_a_range_of_a_parameter_is_cut_as_the_whole_is():
    # Kills: fragments that start at the parameter's beginning whatever was asked for.
    generator = random.Random(0)
    for table in TABLES:
        for param, numel in enumerate(table.numels):
            start, end = sorted(generator.choices(range(numel + 1), k=2))
            whole = places_of(table.of_param(param))
            assert places_of(table.of_range(param, start, end)) == whole[start:end]


def places_of(fragments: Iterable[Fragment]) -> list[tuple[int, int]]:
    """The shard and the position in it of each element."""
    return [(part.shard, part.shard_start + i) for part in fragments for i in range(part.numel)]


def test_layouts_are_compared_by_places():
    # Kills: an exchange where both layouts are the same, and none where they differ.
    one = FragmentTable.build([8, 0, 8], 2, 2)
    assert one.is_laid_out_as(FragmentTable.build([8, 0, 8], 2, 8, [[0, 2]]))
    assert one.is_laid_out_as(FragmentTable.build([8, 0, 8], 2, 2, [[1], [0, 1, 2]][1:]))
    assert not one.is_laid_out_as(FragmentTable.build([8, 0, 8], 2, 2, [[0], [2]]))
    assert not one.is_laid_out_as(FragmentTable.build([8, 0, 8], 2, 16))
    assert not one.is_laid_out_as(FragmentTable.build([8, 0, 8], 4, 2))


def test_a_table_costs_no_more_with_more_shards():
    # Kills: lists over all shards for one shard's fragments: thousands of ranks would pay for it.
    table = FragmentTable.build([10**6 + 1] * 40, 10**9, 8, [[i, i + 1] for i in range(0, 40, 2)])
    assert len(table.of_shard(10**5)) == 20 and table.shard_padding(10**8) == 20 * 8
    assert table.owned(39, 10**5) is None or table.owned(39, 10**5).shard == 10**5


def test_impossible_layouts_are_refused():
    # Kills: a parameter that lies nowhere, or in two places; a shard of no or negative length.
    for sections in ([[0]], [[0, 1], [1]], [[0, 1], [2, 2]]):
        with pytest.raises(ValueError, match="every parameter with elements once"):
            FragmentTable.build([1, 2, 3], 2, 1, sections)
    for numels, world, alignment in (((3, -1), 1, 1), ((3,), 0, 1), ((3,), 1, 0)):
        with pytest.raises(ValueError):
            FragmentTable.build(numels, world, alignment)


def test_round_robin_deals_each_parameter_once():
    # Kills: an order that deals nothing, or loses parameters where shards do not divide the count.
    for count, world in itertools.product(range(12), WORLDS):
        assert sorted(round_robin_order(count, world)) == list(range(count))
    order = round_robin_order(6, 3)
    assert round_robin_order(7, 3) == [0, 3, 6, 1, 4, 2, 5]
    # Consecutive parameters end up on different shards when all are of one size.
    table = FragmentTable.build([4] * 6, 3)
    shard_of = {param: table.of_param(place)[0].shard for place, param in enumerate(order)}
    assert all(shard_of[i] != shard_of[i + 1] for i in range(5))


SHAPES = [(), (0,), (1,), (7,), (3, 5), (2, 3, 4), (16,)]
CUT_WORLDS = (1, 2, 3, 5, 20)


def table_of(shapes: list[tuple[int, ...]], world: int) -> ParameterCutTable:
    return ParameterCutTable.cut(tuple(torch.Size(shape).numel() for shape in shapes), world)


@pytest.mark.parametrize("world", CUT_WORLDS)
def test_every_element_has_one_owner(world: int) -> None:
    # Kills: a cut of the wrong length, padding taken for elements, a fragment left out.
    table = table_of(SHAPES, world)
    by_param = [part for param in range(len(SHAPES)) for part in table.of_param(param)]
    by_shard = [part for shard in range(world) for part in table.of_shard(shard)]
    assert sorted(by_param) == sorted(by_shard)
    for part in by_shard:
        assert 0 < part.numel <= table.cuts[part.param]
        assert part.shard_start + part.numel <= table.shard_numel
    owned = [(part.param, part.param_start + i) for part in by_shard for i in range(part.numel)]
    assert sorted(owned) == [(p, i) for p, numel in enumerate(table.numels) for i in range(numel)]
    assert len(set(places_of(by_shard))) == table.numel


def test_cut_is_upstreams() -> None:
    # Kills: another division than rank r of N owning [r*c, (r+1)*c), c = ceil(n/N); a table that
    # walks over all ranks to say what one of them owns.
    table = ParameterCutTable.cut((10, 4), 4)
    assert table.cuts == (3, 1)
    assert [table.fragment(0, rank)[1::3] for rank in range(4)] == [(0, 3), (3, 3), (6, 3), (9, 1)]
    assert table.padded_numel == 16
    # Kills: rows that start at odd addresses; padding that is taken for the shard.
    assert (table.row_numel(2), table.row(3, 2)) == (8, slice(24, 28))
    assert len(ParameterCutTable.cut((1_000_003,) * 50, 1 << 40).of_shard(0)) == 50


@pytest.mark.parametrize("world", CUT_WORLDS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_rows_and_back(world: int, dtype: torch.dtype) -> None:
    # Kills: padding that keeps what was in memory, a last cut that is not whole, a lost parameter.
    table = table_of(SHAPES, world)
    tensors = [torch.randn(shape).to(dtype) for shape in SHAPES]
    rows = torch.full((world * table.row_numel(dtype.itemsize),), float("nan"), dtype=dtype)
    filler = RowFiller(table, rows)
    for _ in range(2):
        filler.fill(tensors)
        assert torch.isfinite(rows).all()
        assert rows.count_nonzero() == sum(tensor.count_nonzero() for tensor in tensors)
    sizes = [torch.Size(shape) for shape in SHAPES]
    memory = torch.full((WholeViews.numel_of(table, dtype),), float("nan"), dtype=dtype)
    whole = WholeViews(table, sizes, memory)
    whole.copy_out(rows)
    for tensor, found in zip(tensors, whole.params, strict=True):
        assert torch.equal(tensor, found)
    # Kills: what an earlier backward left in the rows is summed again where a gradient is absent.
    filler.fill([None] * len(SHAPES))
    assert not rows.any()


@pytest.mark.parametrize("world", CUT_WORLDS)
def test_a_device_fills_rows_by_one_kernel(world: int) -> None:
    # Kills: a strided copy for each parameter; padding that keeps what was in memory.
    shapes = [shape for shape in SHAPES if shape != (0,)]
    table = table_of(shapes, world)
    tensors = [torch.randn(shape) for shape in shapes]
    wanted = torch.empty(table.padded_numel)
    RowFiller(table, wanted).fill(tensors)
    with simulate():
        rows = torch.empty(table.padded_numel)
        filler = RowFiller(table, rows)
        own = [tensor + 0 for tensor in tensors]
        with Operators() as seen:
            filler.fill(own)
        found = rows.tolist()
        assert "_chunk_cat.out" in seen.names
        assert not any("copy" in name or "zero" in name for name in seen.names), seen.names
        # Kills: that kernel for parameters that are still on the host, which a device refuses.
        own[0] = get_accelerator().pin_memory(tensors[0].clone())
        rows.fill_(float("nan"))
        filler.fill(own)
        assert rows.tolist() == found
    assert found == wanted.tolist()


def test_parameters_do_not_overlap_in_memory() -> None:
    # Kills: a parameter's padding that is written into the next one.
    table = ParameterCutTable.cut((3, 3), 2)
    memory = torch.zeros(WholeViews.numel_of(table, torch.float32))
    whole = WholeViews(table, [torch.Size((3,))] * 2, memory)
    whole.copy_out(torch.arange(8.0))
    assert whole.params[0].tolist() == [0.0, 1.0, 4.0]
    assert whole.params[1].tolist() == [2.0, 3.0, 6.0]
    assert whole.params[1].data_ptr() % 64 == whole.params[0].data_ptr() % 64


LAYERS, NUMEL = 16, 1 << 16


def make_params() -> list[nn.Parameter]:
    params = [nn.Parameter(torch.randn(NUMEL // 64, 64)) for _ in range(LAYERS)]
    params[3] = nn.Parameter(torch.randn(64, NUMEL // 64).t())
    params[5] = nn.Parameter(torch.zeros(0, 3))
    return params


def places_in(params: list[nn.Parameter]) -> tuple[list[int], int]:
    """Where each begins when they lie one behind another, and the length of all."""
    *starts, numel = itertools.accumulate((param.numel() for param in params), initial=0)
    return starts, numel


@pytest.mark.parametrize("short", [False, True])
def test_values_and_memory(short: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # Kills: the buffer beside all parameters on a device that has no room for both; a way through
    # the host where there is; parameters that do not lie in the order of their elements.
    with simulate() as device:
        params = make_params()
        tied = nn.ModuleDict({"left": nn.Linear(1, 1), "right": nn.Linear(1, 1)})
        tied["left"].weight = tied["right"].weight = params[0]
        offsets, numel = places_in(params)
        expected = torch.cat([param.detach().reshape(-1) for param in params])
        device.synchronize()
        weights = 4 * numel
        if short:
            room = weights - 1
            monkeypatch.setattr(Sim_Accelerator, "available_memory", lambda self, index=None: room)
        before = device.memory_allocated()
        device.reset_peak_memory_stats()
        flat = flatten(params, offsets, numel + 10)
        beside = device.max_memory_allocated() - before
        assert torch.equal(flat[:numel], expected) and not flat[numel:].any()
        for param, start in zip(params, offsets, strict=True):
            assert param.data_ptr() == flat[start:].data_ptr() or not param.numel()
            assert param.shape[1:] in ((64,), (3,))
        assert tied["left"].weight is tied["right"].weight is params[0]
    largest = 4 * NUMEL
    if short:
        assert beside <= largest + (1 << 14), beside / largest
    else:
        assert weights <= beside < weights + largest


def test_the_host_has_no_other_place(monkeypatch: pytest.MonkeyPatch) -> None:
    # Kills: a copy of host memory in host memory.
    monkeypatch.setattr(flattening, "_to_host", lambda param: pytest.fail("copied"))
    params = make_params()
    flatten(params, *places_in(params))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_masters(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Kills: a piece that is left out, or written to the wrong place.
    monkeypatch.setattr(flattening, "CONVERTED_NUMEL", 7)
    shard = torch.randn(24).bfloat16()
    master = torch.empty(24, device=device)
    write_master(master, shard)
    if device == "cpu":
        assert torch.equal(master, shard.float())


def pairs_of_layouts(seed: int = 5) -> list[tuple[FragmentTable, FragmentTable]]:
    generator = random.Random(seed)
    found = []
    for world in (1, 2, 3, 5, 37) * 6:
        numels = generator.choices((0, 1, 3, 7, 16, 129), k=generator.randrange(1, 9))
        params = generator.sample(range(len(numels)), len(numels))
        first = generator.randrange(len(params) + 1)
        sections = [sorted(params[:first]), sorted(params[first:])]
        memory = FragmentTable.build(numels, world, 8, sections)
        found.append((FragmentTable.build(numels, world, 2), memory))
    return found


def values(table: FragmentTable) -> list[list[int]]:
    """Each shard with a number for each element of each parameter; padding is 0."""
    first = [1 + sum(table.numels[:param]) for param in range(len(table.numels))]
    shards = [[0] * table.shard_numel for _ in range(table.num_shards)]
    for shard, content in enumerate(shards):
        for fragment in table.of_shard(shard):
            start = first[fragment.param] + fragment.param_start
            content[fragment.in_shard] = range(start, start + fragment.numel)
    return shards


def moved(source: FragmentTable, target: FragmentTable, limit: int) -> list[list[int]]:
    """Move shards from `source` to `target` by messages of at most `limit` elements."""
    count, there = source.num_shards, values(source)
    result = [[0] * target.shard_numel for _ in range(count)]
    rounds = -(-max(source.shard_numel, 1) // limit)
    sent = [in_rounds(overlaps(source, target, rank), limit, rounds) for rank in range(count)]
    received = [in_rounds(overlaps(target, source, rank), limit, rounds) for rank in range(count)]
    for number in range(rounds):
        messages = {
            (rank, peer): [
                value
                for run in sent[rank][number]
                if run.peer == peer
                for value in there[rank][run.start : run.start + run.numel]
            ]
            for rank, peer in itertools.product(range(count), repeat=2)
        }
        assert all(len(message) <= limit for message in messages.values())
        for rank in range(count):
            for run in received[rank][number]:
                message = messages[run.peer, rank]
                result[rank][run.start : run.start + run.numel] = message[: run.numel]
                messages[run.peer, rank] = message[run.numel :]
        assert not any(messages.values()), "a message is longer than its receiver knows"
    return result


def test_every_element_arrives_at_its_place_in_both_directions():
    # Kills: an element that is sent twice or not at all, ends of a message that disagree in length
    # or order, rounds that cut the two ends differently.
    for files, memory in pairs_of_layouts():
        for limit in (1, 5, 1000):
            assert moved(memory, files, limit) == values(files)
            assert moved(files, memory, limit) == values(memory)


def test_what_a_rank_has_in_both_layouts_is_copied_to_its_place():
    # Kills: runs that each side has cut otherwise paired off as they are, an element left out.
    generator = random.Random(3)
    for files, memory in pairs_of_layouts():
        for rank in range(files.num_shards):
            ends = [
                [run for run in overlaps(*tables, rank) if run.peer == rank]
                for tables in ((memory, files), (files, memory))
            ]
            own, there = values(memory)[rank], values(files)[rank]
            copied = list(kept(*ends))
            assert sum(numel for _, _, numel in copied) == sum(run.numel for run in ends[1])
            for source, target, numel in copied:
                assert own[source : source + numel] == there[target : target + numel]
    # The same elements, cut elsewhere on either side.
    for _ in range(20):
        cuts = [sorted({0, 30, *generator.sample(range(31), 4)}) for _ in range(2)]
        sides = [
            [Run(0, 100 * side + start, end - start) for start, end in itertools.pairwise(points)]
            for side, points in enumerate(cuts)
        ]
        found = [
            (source + at, target + at)
            for source, target, numel in kept(*sides)
            for at in range(numel)
        ]
        assert found == [(at, 100 + at) for at in range(30)]


def test_neighbours_travel_as_one_run():
    # Kills: a copy for each parameter where the layouts agree: most of a large model's do.
    table = FragmentTable.build([4] * 10, 2, 2)
    assert overlaps(table, table, 1) == [Run(1, 0, 20)]


def test_what_a_shard_sends_costs_no_more_with_more_shards():
    # Kills: a loop over all shards for each fragment.
    numels = [10**6] * 40
    files = FragmentTable.build(numels, 10**6, 2)
    memory = FragmentTable.build(numels, 10**6, 8, [[i, i + 1] for i in range(0, 40, 2)])
    assert sum(run.numel for run in overlaps(files, memory, 10**5)) == files.shard_numel

"""The layout of stage 3, and the copies between whole parameters and its rows."""

import itertools

import pytest
import torch

from deepspeed.runtime.sharding.cut_rows import RowFiller, WholeViews
from deepspeed.runtime.sharding.fragments import ParameterCutTable

SHAPES = [(), (0,), (1,), (7,), (3, 5), (2, 3, 4), (16,)]
WORLDS = (1, 2, 3, 5, 20)


def table_of(shapes: list[tuple[int, ...]], world: int) -> ParameterCutTable:
    return ParameterCutTable.cut(tuple(torch.Size(shape).numel() for shape in shapes), world)


@pytest.mark.parametrize("world", WORLDS)
def test_every_element_has_one_owner(world: int) -> None:
    # Kills: a cut of the wrong length, padding taken for elements, a fragment left out.
    table = table_of(SHAPES, world)
    owners = [[0] * numel for numel in table.numels]
    places: set[tuple[int, int]] = set()
    for shard in range(world):
        for part in table.of_shard(shard):
            assert 0 < part.numel <= table.cuts[part.param]
            assert part.shard_start + part.numel <= table.shard_numel
            for step in range(part.numel):
                owners[part.param][part.param_start + step] += 1
                places.add((shard, part.shard_start + step))
    assert all(count == 1 for counts in owners for count in counts)
    assert len(places) == table.numel
    by_param = [part for param in range(len(SHAPES)) for part in table.of_param(param)]
    by_shard = [part for shard in range(world) for part in table.of_shard(shard)]
    assert sorted(by_param) == sorted(by_shard)


def test_cut_is_upstreams() -> None:
    # Kills: another division than rank r of N owning [r*c, (r+1)*c), c = ceil(n/N).
    table = ParameterCutTable.cut((10, 4), 4)
    assert table.cuts == (3, 1)
    assert [table.fragment(0, rank)[1::3] for rank in range(4)] == [(0, 3), (3, 3), (6, 3), (9, 1)]
    assert table.padded_numel == 16


def test_layout_takes_no_time_per_rank() -> None:
    # Kills: a table that walks over all ranks to say what one of them owns.
    table = ParameterCutTable.cut((1_000_003,) * 50, 1 << 40)
    assert len(table.of_shard(0)) == 50


@pytest.mark.parametrize(
    ("world", "dtype"), itertools.product(WORLDS, (torch.float32, torch.bfloat16))
)
def test_rows_and_back(world: int, dtype: torch.dtype) -> None:
    # Kills: padding that keeps what was in memory, a last cut that is not whole, a lost parameter.
    table = table_of(SHAPES, world)
    tensors = [torch.randn(shape).to(dtype) for shape in SHAPES]
    rows = torch.full((table.padded_numel,), float("nan"), dtype=dtype)
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


def test_absent_gradients_are_zero() -> None:
    # Kills: what an earlier backward left in the rows is summed again.
    table = table_of(SHAPES, 3)
    rows = torch.full((table.padded_numel,), float("nan"))
    filler = RowFiller(table, rows)
    filler.fill([torch.ones(shape) for shape in SHAPES])
    filler.fill([None] * len(SHAPES))
    assert not rows.any()


def test_parameters_do_not_overlap_in_memory() -> None:
    # Kills: a parameter's padding that is written into the next one.
    table = ParameterCutTable.cut((3, 3), 2)
    memory = torch.zeros(WholeViews.numel_of(table, torch.float32))
    whole = WholeViews(table, [torch.Size((3,))] * 2, memory)
    whole.copy_out(torch.arange(8.0))
    assert whole.params[0].tolist() == [0.0, 1.0, 4.0]
    assert whole.params[1].tolist() == [2.0, 3.0, 6.0]
    assert whole.params[1].data_ptr() % 64 == whole.params[0].data_ptr() % 64

"""Coordinates of ranks, against tables written by hand and against their own inverse."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.runtime.pipe.topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
    _default_topology,
)


def test_pipe_and_data() -> None:
    # Kills: the wrong axis varying fastest, which exchanges the data and pipeline groups.
    topology = PipeDataParallelTopology(num_pp=2, num_dp=3)
    assert topology.get_axis_names() == ["pipe", "data"]
    assert topology.world_size() == 6
    assert [tuple(topology.get_coord(rank)) for rank in range(6)] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 1),
        (1, 2),
    ]
    assert topology.get_axis_comm_lists("pipe") == [[0, 3], [1, 4], [2, 5]]
    assert topology.get_axis_comm_lists("data") == [[0, 1, 2], [3, 4, 5]]
    assert topology.get_axis_list("data", 1) == [1, 4]
    assert topology.get_rank(pipe=1, data=2) == 5


def test_pipe_data_and_model() -> None:
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert topology.get_axis_names() == ["pipe", "data", "model"]
    assert topology.get_axis_comm_lists("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert topology.get_axis_comm_lists("data") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert topology.get_axis_comm_lists("model") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert topology.filter_match(pipe=0, data=1) == [2, 3]
    assert topology.get_coord(3) == topology.ProcessCoord(pipe=0, data=1, model=1)
    assert topology.mapping[topology.ProcessCoord(1, 0, 1)] == 5


def test_names_of_checkpoint_files() -> None:
    # Kills: another spelling of ranks, with which upstream's files are not found.
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert [topology.get_rank_repr(rank) for rank in range(4)] == ["model_00", "model_01"] * 2
    assert topology.get_rank_repr(5, omit_axes=["data"]) == "pipe_01-model_01"
    assert (
        topology.get_rank_repr(5, omit_axes=[], inner_sep="", outer_sep="/")
        == "pipe01/data00/model01"
    )
    assert PipeDataParallelTopology(2, 2).get_rank_repr(3) == ""


def test_what_does_not_exist() -> None:
    topology = PipeDataParallelTopology(2, 2)
    assert topology.get_dim("model") == 0
    assert topology.get_axis_comm_lists("model") == []
    with pytest.raises(ValueError, match="exactly the axes"):
        topology.get_rank(pipe=0)
    with pytest.raises(ValueError, match="lies outside pipe 2 x data 2"):
        topology.get_rank(pipe=2, data=0)
    with pytest.raises(ValueError, match="rank 4 not found"):
        topology.get_coord(4)
    with pytest.raises(ValueError, match="no axis model"):
        topology.filter_match(model=0)
    with pytest.raises(ValueError, match="at least 1"):
        PipeDataParallelTopology(0, 2)
    with pytest.raises(ValueError, match="distinct names"):
        ProcessTopology(["pipe", "pipe"], [1, 2])


def test_the_map_is_printable() -> None:
    topology = PipeDataParallelTopology(2, 2)
    assert str(topology).splitlines()[3] == "rank 3: pipe 1 of 2, data 1 of 2"
    assert len(str(topology).splitlines()) == 4


@pytest.mark.parametrize(
    ("world", "dims"),
    [(1, [1, 1]), (4, [2, 2]), (6, [2, 3]), (7, [7, 1]), (8, [4, 2]), (12, [6, 2])],
)
def test_the_world_as_a_grid_without_a_topology(world: int, dims: list[int]) -> None:
    assert _default_topology(world).dims == dims


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_coordinates_and_ranks_are_inverse(dims: list[int]) -> None:
    axes = ["a", "b", "c", "d"][: len(dims)]
    topology = ProcessTopology(axes, dims)
    ranks = list(range(math.prod(dims)))
    assert [topology.get_rank(**topology.get_coord(rank)._asdict()) for rank in ranks] == ranks
    for axis, size in zip(axes, dims, strict=True):
        lines = topology.get_axis_comm_lists(axis)
        # Kills: a rank in two lines or in none, which hangs the collectives of both.
        assert sorted(rank for line in lines for rank in line) == ranks
        assert all(len(line) == size for line in lines)
        for line in lines:
            assert [getattr(topology.get_coord(rank), axis) for rank in line] == list(range(size))
            others = {
                tuple(v for k, v in topology.get_coord(rank)._asdict().items() if k != axis)
                for rank in line
            }
            assert len(others) == 1

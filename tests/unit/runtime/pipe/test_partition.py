"""Where layers are cut (upstream's answers, which old checkpoints need) and where ranks stand."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from deepspeed.runtime.pipe.layer_spec import (
    Layer,
    LayerSpec,
    PipelineError,
    TiedLayerSpec,
    checked_layers,
    layer_name,
    partition_layers,
    trainable_numel,
)
from deepspeed.runtime.pipe.topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
    _default_topology,
)
from deepspeed.runtime.utils import partition_balanced, partition_uniform, prefix_sum_inc

BALANCED: list[tuple[list[float], int, list[int]]] = [
    ([1, 1, 1, 1], 4, [0, 1, 2, 3, 4]),
    ([1, 1, 1, 1, 1], 3, [0, 2, 4, 5]),
    ([1, 1, 1, 4, 1, 1], 3, [0, 3, 4, 6]),
    ([0, 9, 0, 0, 3, 3, 3], 3, [0, 4, 6, 7]),
    ([4, 0, 4, 0, 4, 0], 2, [0, 4, 6]),
    ([10, 1, 1, 1, 1, 1, 1], 3, [0, 1, 4, 7]),
    ([1, 1, 1, 1, 1, 1, 10], 3, [0, 3, 6, 7]),
    ([5, 1, 1, 5, 1, 1, 5], 4, [0, 2, 4, 6, 7]),
    ([1, 1, 1, 100, 5, 0, 0], 6, [0, 1, 2, 3, 4, 6, 7]),
    ([3, 1, 3, 1, 3, 3, 2, 2], 3, [0, 3, 6, 8]),
    ([100, 2, 100, 1, 0, 2, 0, 0, 0, 100], 3, [0, 2, 5, 10]),
    ([0, 0, 0], 2, [0, 2, 3]),
    ([3, 3], 4, [0, 1, 2, 2, 2]),
    ([5], 1, [0, 1]),
]


@pytest.mark.parametrize(("weights", "parts", "bounds"), BALANCED)
def test_balanced(weights: list[float], parts: int, bounds: list[int]) -> None:
    # Kills: another of equally good cuts, which moves layers of a resumed run to another rank.
    assert partition_balanced(weights, parts) == bounds


def test_uniform_and_prefix_sum() -> None:
    assert partition_uniform(10, 1) == [0, 10]
    assert partition_uniform(10, 4) == [0, 3, 6, 8, 10]
    assert partition_uniform(7, 3) == [0, 3, 5, 7]
    assert partition_uniform(3, 4) == [0, 1, 2, 3, 3]
    assert partition_uniform(0, 2) == [0, 0, 0]
    assert prefix_sum_inc([3, 4, 5]) == [3, 7, 12]


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=2, max_size=8), st.integers(1, 4))
def test_balanced_leaves_no_part_empty_and_covers_all(weights: list[int], parts: int) -> None:
    bounds = partition_balanced(weights, parts)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, len(weights), parts + 1)
    assert bounds == sorted(bounds)
    if len(weights) >= parts:
        assert all(start < stop for start, stop in itertools.pairwise(bounds))


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=3, max_size=9))
def test_balanced_in_two_is_the_best_cut(weights: list[int]) -> None:
    # With two parts the rule leaves one choice to make, so the best can be searched.
    cut = partition_balanced(weights, 2)[1]
    differences = [abs(sum(weights[:at]) - sum(weights[at:])) for at in range(1, len(weights))]
    assert differences[cut - 1] == min(differences)


class ReadsValues(nn.Module):
    """Cannot be built without memory: its constructor branches on a value."""

    def __init__(self, size: int) -> None:
        super().__init__()
        weight = torch.randn(size)
        self.weight = nn.Parameter(weight * float(weight.sum() > -1e9))


def double(value: torch.Tensor) -> torch.Tensor:
    return value * 2


LAYERS: list[Layer] = [
    LayerSpec(nn.Embedding, 100, 8),
    double,
    LayerSpec(nn.Linear, 8, 8),
    nn.Linear(8, 8),
    nn.ReLU(),
    TiedLayerSpec("head", nn.Linear, 8, 100),
]


def test_layers_have_names_and_are_counted_without_a_trace() -> None:
    # Kills: counting that draws random numbers, so that the weights depend on the partition method.
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert counts() == [800, 0, 72, 72, 0, 900]
    assert trainable_numel(LayerSpec(ReadsValues, 5)) == 5
    assert torch.equal(torch.get_rng_state(), before)
    assert trainable_numel(nn.Linear(8, 8).requires_grad_(False)) == 0
    wanted = ["Embedding", "double", "Linear", "Linear", "ReLU", "Linear"]
    assert [layer_name(layer) for layer in LAYERS] == wanted
    assert repr(LayerSpec(nn.Linear, 4, 2, bias=False)) == "Linear(4, 2, bias=False)"


def counts() -> list[int]:
    return [trainable_numel(layer) for layer in LAYERS]


def test_methods() -> None:
    assert partition_layers(LAYERS, 2, "uniform", counts) == [0, 3, 6]
    assert partition_layers(LAYERS, 2, "UNIFORM", counts) == [0, 3, 6]
    assert partition_layers(LAYERS, 2, "parameters", counts) == [0, 5, 6]  # 944 and 900
    assert partition_layers(LAYERS, 3, "type:linear", counts) == [0, 3, 5, 6]
    assert partition_layers(LAYERS, 2, "Type:embed|RELU", counts) == [0, 4, 6]
    assert partition_layers(LAYERS, 2, [0, 1, 6], counts) == [0, 1, 6]
    assert partition_layers(LAYERS, 2, (0, 6, 6), counts) == [0, 6, 6]


CLASSES = r"no layer matches; the classes are \['Embedding', 'Linear', 'ReLU', 'double'\]"


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("profile", "measure the layers"),
        ("best", "'parameters', 'uniform', 'type:REGEX'"),
        ("type:conv", CLASSES),
        ([0, 6], "6 layers in 2 parts need 3 boundaries"),
        ([0, 4, 5], "from 0 to 6"),
        ([0, 7, 6], "ascend"),
    ],
)
def test_methods_that_do_not_fit(method: str | list[int], message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        partition_layers(LAYERS, 2, method, counts)


def test_layers_that_cannot_be_called() -> None:
    with pytest.raises(PipelineError, match="at least one layer"):
        checked_layers([])
    with pytest.raises(PipelineError, match=r"layers\[1\] is the class ReLU"):
        checked_layers([nn.Linear(1, 1), nn.ReLU])
    with pytest.raises(PipelineError, match=r"layers\[0\] is 3"):
        checked_layers([3])  # type: ignore[list-item]  # what is tested
    with pytest.raises(PipelineError, match="typename"):
        LayerSpec(double)  # type: ignore[arg-type]  # what is tested


def test_pipe_and_data() -> None:
    # Kills: the wrong axis varying fastest, which exchanges the data and pipeline groups.
    topology = PipeDataParallelTopology(num_pp=2, num_dp=3)
    assert topology.get_axis_names() == ["pipe", "data"]
    assert topology.world_size() == 6
    coordinates = [tuple(topology.get_coord(rank)) for rank in range(6)]
    assert coordinates == list(itertools.product(range(2), range(3)))
    assert topology.get_axis_comm_lists("pipe") == [[0, 3], [1, 4], [2, 5]]
    assert topology.get_axis_comm_lists("data") == [[0, 1, 2], [3, 4, 5]]
    assert topology.get_axis_list("data", 1) == [1, 4]
    assert topology.get_rank(pipe=1, data=2) == 5
    topology = PipeDataParallelTopology(2, 2)
    assert str(topology).splitlines()[3] == "rank 3: pipe 1 of 2, data 1 of 2"
    assert len(str(topology).splitlines()) == 4


def test_pipe_data_and_model() -> None:
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert topology.get_axis_names() == ["pipe", "data", "model"]
    assert topology.get_axis_comm_lists("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert topology.get_axis_comm_lists("data") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert topology.get_axis_comm_lists("model") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert topology.filter_match(pipe=0, data=1) == [2, 3]
    assert topology.get_coord(3) == topology.ProcessCoord(pipe=0, data=1, model=1)
    assert topology.mapping[topology.ProcessCoord(1, 0, 1)] == 5
    # Kills: another spelling of ranks, with which upstream's files are not found.
    assert [topology.get_rank_repr(rank) for rank in range(4)] == ["model_00", "model_01"] * 2
    assert topology.get_rank_repr(5, omit_axes=["data"]) == "pipe_01-model_01"
    spelled = topology.get_rank_repr(5, omit_axes=[], inner_sep="", outer_sep="/")
    assert spelled == "pipe01/data00/model01"
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


@pytest.mark.parametrize(
    ("world", "dims"),
    [(1, [1, 1]), (4, [2, 2]), (6, [2, 3]), (7, [7, 1]), (8, [4, 2]), (12, [6, 2])],
)
def test_the_world_as_a_grid_without_a_topology(world: int, dims: list[int]) -> None:
    assert _default_topology(world).dims == dims


@settings(deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_coordinates_and_ranks_are_inverse(dims: list[int]) -> None:
    axes = ["a", "b", "c", "d"][: len(dims)]
    topology = ProcessTopology(axes, dims)
    ranks = list(range(math.prod(dims)))
    assert [topology.get_rank(**topology.get_coord(rank)._asdict()) for rank in ranks] == ranks
    for axis, size in zip(axes, dims, strict=True):
        lines = topology.get_axis_comm_lists(axis)
        # Kills: a rank in two lines or in none, which hangs the collectives of both.
        # Kills: a rank in two lines or in none, which hangs the collectives of both.
        assert sorted(rank for line in lines for rank in line) == ranks
        assert all(len(line) == size for line in lines)
        for line in lines:
            coordinates = [topology.get_coord(rank)._asdict() for rank in line]
            assert [each.pop(axis) for each in coordinates] == list(range(size))
            assert len({tuple(each.values()) for each in coordinates}) == 1

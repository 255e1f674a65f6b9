"""Where a list of layers is cut; tables are upstream's answers, on which old checkpoints depend."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
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
    # Kills: another choice among equally good cuts, which moves layers of a resumed run to another
    # rank.
    assert partition_balanced(weights, parts) == bounds


@pytest.mark.parametrize(
    ("items", "parts", "bounds"),
    [
        (10, 1, [0, 10]),
        (10, 4, [0, 3, 6, 8, 10]),
        (7, 3, [0, 3, 5, 7]),
        (3, 4, [0, 1, 2, 3, 3]),
        (0, 2, [0, 0, 0]),
    ],
)
def test_uniform(items: int, parts: int, bounds: list[int]) -> None:
    assert partition_uniform(items, parts) == bounds


def test_prefix_sum() -> None:
    assert prefix_sum_inc([3, 4, 5]) == [3, 7, 12]


@given(st.lists(st.integers(0, 9), min_size=2, max_size=8), st.integers(1, 4))
def test_balanced_leaves_no_part_empty_and_covers_all(weights: list[int], parts: int) -> None:
    bounds = partition_balanced(weights, parts)
    assert bounds[0] == 0
    assert bounds[-1] == len(weights)
    assert len(bounds) == parts + 1
    assert bounds == sorted(bounds)
    if len(weights) >= parts:
        assert all(start < stop for start, stop in itertools.pairwise(bounds))


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


def test_parameters_are_counted_without_a_trace() -> None:
    # Kills: counting that draws random numbers, so that the weights depend on the partition method.
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert [trainable_numel(layer) for layer in LAYERS] == [800, 0, 72, 72, 0, 900]
    assert trainable_numel(LayerSpec(ReadsValues, 5)) == 5
    assert torch.equal(torch.get_rng_state(), before)


def test_frozen_parameters_weigh_nothing() -> None:
    frozen = nn.Linear(8, 8).requires_grad_(False)
    assert trainable_numel(frozen) == 0


def test_names() -> None:
    assert [layer_name(layer) for layer in LAYERS] == [
        "Embedding",
        "double",
        "Linear",
        "Linear",
        "ReLU",
        "Linear",
    ]
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


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("profile", "measure the layers"),
        ("best", "'parameters', 'uniform', 'type:REGEX'"),
        (
            "type:conv",
            r"no layer matches; the classes are \['Embedding', 'Linear', 'ReLU', 'double'\]",
        ),
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

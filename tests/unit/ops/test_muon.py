"""Newton-Schulz against its polynomial in double precision, and what Muon refuses."""

import copy
from typing import Any, cast

import pytest
import torch
from torch import nn

from deepspeed.ops.muon import MuonWithAuxAdam
from deepspeed.ops.muon.newton_schulz import orthogonalize
from deepspeed.runtime.config_models.training import SchedulerConfig
from deepspeed.runtime.config_utils import DeepSpeedConfigError
from deepspeed.runtime.optimizers.muon_groups import check_whole_parameters, one_rate_for_both
from deepspeed.runtime.sharding.model_ranks import ModelRanks

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def by_singular_values(matrix: torch.Tensor) -> torch.Tensor:
    """Five steps of the polynomial, in double precision."""
    a, b, c = COEFFICIENTS
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.square().sum().sqrt()
    for _ in range(5):
        values = a * values + b * values**3 + c * values**5
    return (left * values) @ right


@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("shape", [(24, 90), (90, 24), (32, 32), (3, 20, 90), (2, 90, 20)])
def test_the_polynomial_of_singular_values(shape: tuple[int, ...], method: str) -> None:
    # Kills: one step more or less, a product in the other order, a stack as one matrix, one norm
    # for all of a stack.
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    if len(shape) == 3:
        tensor[0] *= 100
    found = orthogonalize(tensor, method)
    assert (found.dtype, found.shape) == (torch.bfloat16, tensor.shape)
    for own, matrix in zip(
        found if len(shape) == 3 else [found], tensor if len(shape) == 3 else [tensor], strict=True
    ):
        wanted = by_singular_values(matrix)
        assert (own.double() - wanted).norm() < 0.05 * wanted.norm()


def test_filters_and_nothing() -> None:
    # Kills: filters as stacks of small matrices; a matrix without elements that divides by zero.
    filters = torch.randn(6, 3, 3, 3)
    wanted = orthogonalize(filters.view(6, 27))
    assert torch.equal(orthogonalize(filters), wanted.view(6, 3, 3, 3))
    assert orthogonalize(torch.empty(3, 0)).shape == (3, 0)
    assert torch.equal(orthogonalize(torch.zeros(3, 4)), torch.zeros(3, 4, dtype=torch.bfloat16))


def test_marks_and_groups_that_disagree_are_refused() -> None:
    # Kills: either of them wins without a word.
    matrix, vector = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3))
    matrix.use_muon = True  # type: ignore[attr-defined]  # a mark
    with pytest.raises(ValueError, match=r"shape \(3, 4\), has param\.use_muon = True, its group"):
        MuonWithAuxAdam([{"params": [matrix], "use_muon": False}])
    with pytest.raises(ValueError, match=r"parameter 1 of group 0.*has use_muon, but Muon updates"):
        MuonWithAuxAdam([{"params": [matrix, vector], "use_muon": True}])


def test_state_of_other_groups_is_refused() -> None:
    # Kills: a group that AdamW updates after a load.
    matrix, other = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3, 4))
    groups: list[dict[str, Any]] = [
        {"params": [matrix], "use_muon": True},
        {"params": [other], "use_muon": False},
    ]
    optimizer = MuonWithAuxAdam(groups)
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)
    state["param_groups"].reverse()
    with pytest.raises(ValueError, match="parameter group 0 has use_muon=True, in the state"):
        optimizer.load_state_dict(state)


def test_a_schedule_that_sets_one_rate_is_told_of() -> None:
    # Kills: rates of their own that a schedule overwrites without a word; a warning for nothing.
    rates = {"muon_lr": 0.02, "adam_lr": 3e-4}

    def told(kind: str, params: dict[str, Any]) -> str | None:
        return one_rate_for_both(rates, SchedulerConfig(type=kind, params=params))

    assert "scheduler.params.warmup_max_lr: 0.1" in (told("WarmupLR", {"warmup_max_lr": 0.1}) or "")
    assert "scheduler.params.warmup_max_lr: 0.001" in (told("WarmupDecayLR", {}) or "")
    assert told("WarmupLR", {}) is None
    assert told("WarmupLR", {"warmup_max_lr": [0.02, 3e-4]}) is None
    assert told("WarmupCosineLR", {"total_num_steps": 9}) is None
    one = SchedulerConfig(type="WarmupLR", params={"warmup_max_lr": 0.1})
    assert one_rate_for_both({"lr": 0.1}, one) is None
    assert one_rate_for_both(rates, None) is None


def test_a_slice_of_a_matrix_is_refused() -> None:
    # Kills: a tensor-parallel rank's slice, made orthogonal by itself.
    matrix = nn.Parameter(torch.randn(3, 4))
    matrix.tensor_model_parallel = True  # type: ignore[attr-defined]  # a mark
    ranks = ModelRanks(cast(Any, None), None, 1, tensor_group=object(), has_parts=True)
    with pytest.raises(DeepSpeedConfigError, match="updates weight from the whole of it, and tens"):
        check_whole_parameters(MuonWithAuxAdam([matrix]), False, False, {matrix: "weight"}, ranks)

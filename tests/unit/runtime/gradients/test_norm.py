"""Norm, clipping and the non-finite check: fp32 whatever comes in; non-finite stays so."""

import math

import pytest
import torch

from deepspeed.runtime.gradients.norm import (
    CLIP_EPSILON,
    clip_factor,
    joined,
    local_squared_norm,
    reduce_squared_norm,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_squares_are_summed_in_fp32(dtype):
    # Kills: summing in the inputs' dtype; 70000 ones are 256 in bf16 additions and inf as an fp16
    # square sum.
    ones = torch.ones(70_000, dtype=dtype)
    total = local_squared_norm([ones], CPU)
    assert total.dtype == torch.float32 and total.shape == (1,)
    assert total.item() == pytest.approx(70_000, rel=1e-6)


def test_tensors_add_up_and_empty_ones_add_nothing():
    # Kills: a norm of norms without squaring, and a failure on groups without elements.
    grads = [torch.full((3,), 2.0), torch.empty(0), torch.full((2, 2), 3.0, dtype=torch.float16)]
    assert local_squared_norm(grads, CPU).item() == pytest.approx(12 + 36)
    assert local_squared_norm([], CPU).item() == 0.0
    assert local_squared_norm([torch.empty(0)], CPU).item() == 0.0


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_bad_element_makes_it_not_finite(bad, dtype):
    # Kills: a nan-ignoring reduction or a -1 sentinel, after which the step would not be skipped.
    grad = torch.ones(1000, dtype=dtype)
    grad[517] = bad
    assert not torch.isfinite(local_squared_norm([torch.ones(5), grad], CPU)).item()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_copies_that_another_rank_counts_add_nothing_unless_they_are_bad(bad):
    # Kills: counting copies, and a rank alone with a bad copy that steps because the one that
    # counts is good.
    grad, copy = torch.full((4,), 2.0), torch.full((9,), 3.0, dtype=torch.bfloat16)
    assert local_squared_norm([grad], CPU, [copy, torch.empty(0)]).item() == 16.0
    copy[7] = bad
    assert not torch.isfinite(local_squared_norm([grad], CPU, [copy])).item()
    assert not torch.isfinite(local_squared_norm([], CPU, [copy])).item()


def test_neighbouring_ranges_become_one():
    # Kills: joining over a gap (what another rank counts would count here, too), or losing the last
    # range.
    assert joined([(0, 3), (3, 5), (7, 8), (8, 8), (8, 9)]) == [(0, 5), (7, 9)]
    assert joined([(2, 4)]) == [(2, 4)] and joined([]) == []


def test_without_a_group_nothing_is_reduced():
    # Kills: a collective on one rank only (there is no process group here, so it would raise).
    squared = torch.tensor([4.0])
    assert reduce_squared_norm(squared, None) is squared and squared.item() == 4.0


def test_clipping_is_torchs():
    # Kills: a missing epsilon, scaling up small gradients, and clipping when it is off.
    for norm, limit in [(0.5, 1.0), (1.0, 1.0), (3.7, 1.0), (1e-8, 1e-9), (0.0, 1.0)]:
        param = torch.nn.Parameter(torch.zeros(1))
        param.grad = torch.tensor([norm])
        torch.nn.utils.clip_grad_norm_([param], limit)
        assert norm * clip_factor(norm, limit) == pytest.approx(param.grad.item(), rel=1e-6)
    assert clip_factor(100.0, 0.0) == 1.0
    assert clip_factor(100.0, 10.0) == 10.0 / (100.0 + CLIP_EPSILON)

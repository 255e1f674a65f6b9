"""Gradients between backward and step: the boundary, the norm, two dtypes in one memory."""

import math

import pytest
import torch
from unit.models import drawn

from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.ops import squares
from deepspeed.runtime.gradients.accumulation import AccumulationTracker, BackwardState
from deepspeed.runtime.gradients.norm import (
    CLIP_EPSILON,
    clip_factor,
    joined,
    local_squared_norm,
    reduce_squared_norm,
)
from deepspeed.runtime.gradients.overlay import TAIL_NUMEL, Overlay


def boundaries(tracker: AccumulationTracker, count: int) -> list[bool]:
    seen = []
    for _ in range(count):
        seen.append(tracker.is_boundary)
        tracker.advance()
    return seen


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_the_last_of_each_window_is_the_boundary(steps):
    # Kills: an off-by-one that steps after the first micro-batch instead of the last.
    expected = [(i + 1) % steps == 0 for i in range(3 * steps)]
    assert boundaries(AccumulationTracker(steps), 3 * steps) == expected
    # Kills: a modulo by zero far away from its cause.
    with pytest.raises(ValueError, match="gradient_accumulation_steps must be at least 1, got 0"):
        AccumulationTracker(0)


def test_what_is_said_from_outside_holds_until_said_again():
    # Kills: a forced answer that is forgotten at the next micro-batch (accelerate says it once).
    tracker = AccumulationTracker(2)
    tracker.set_boundary(False)
    assert boundaries(tracker, 3) == [False, False, False]
    tracker.set_boundary(True)
    assert boundaries(tracker, 2) == [True, True]


def test_unmanaged_accumulation_leaves_counting_to_the_caller():
    # Kills: dividing or counting by `steps` although the caller does both.
    tracker = AccumulationTracker(4, managed=False)
    assert boundaries(tracker, 3) == [True, True, True]
    assert tracker.divisor == 1
    assert AccumulationTracker(4).divisor == 4


def test_no_sync_nests_and_ends_on_error():
    # Kills: a flag instead of a depth, and a block that stays open after an exception.
    tracker = AccumulationTracker(1)
    # Nothing runs at the start. Kills: a first plain backward that is taken for a managed one.
    assert tracker.state is BackwardState.IDLE and tracker.micro_steps == 0
    with pytest.raises(KeyError), tracker.no_sync():
        with tracker.no_sync():
            assert tracker.in_no_sync
        assert tracker.in_no_sync
        raise KeyError("x")
    assert not tracker.in_no_sync
    assert tracker.is_boundary  # no_sync says nothing about the boundary


CPU = torch.device("cpu")
of_each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
of_each_kind = pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])


@of_each_dtype
def test_squares_are_summed_in_fp32(dtype):
    # Kills: summing in the inputs' dtype: 70000 ones are 256 in bf16, and inf as a square in fp16.
    total = local_squared_norm([torch.ones(70_000, dtype=dtype)], CPU)
    assert total.dtype == torch.float32 and total.shape == (1,)
    assert total.item() == pytest.approx(70_000, rel=1e-6)


def test_the_norm_of_a_long_slice_is_right_on_the_host():
    # Kills: one norm of all, off by 9e-5 here and by 0.5 % at 2**26 elements, so that clipping
    # differs with how the host cuts its slices.
    grad = torch.randn((1 << 22) + 5, generator=torch.Generator().manual_seed(0))
    right = sum(piece.double().square().sum() for piece in grad.split(1 << 14))
    assert local_squared_norm([grad], CPU).item() == pytest.approx(right.item(), rel=1e-6)


def test_the_norm_of_a_long_slice_makes_no_fp32_copy_of_it(monkeypatch):
    # Kills: twice the memory of all gradients while their norm is taken, or another sum of pieces.
    grad = torch.randn((1 << 18) + 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    wanted, norm, seen = local_squared_norm([grad], CPU), squares._norm, []
    monkeypatch.setattr(squares, "HOST_NORMED", 1 << 16)
    monkeypatch.setattr(squares, "_norm", lambda t, *a, **k: seen.append(t) or norm(t, *a, **k))
    assert torch.equal(local_squared_norm([grad], CPU), wanted)
    assert [part.numel() for part in seen] == 4 * [1 << 16] + [5]


def test_tensors_add_up_and_empty_ones_add_nothing():
    # Kills: a norm of norms without squaring, and a failure on groups without elements.
    grads = [torch.full((3,), 2.0), torch.empty(0), torch.full((2, 2), 3.0, dtype=torch.float16)]
    assert local_squared_norm(grads, CPU).item() == pytest.approx(12 + 36)
    assert local_squared_norm([], CPU).item() == 0.0
    assert local_squared_norm([torch.empty(0)], CPU).item() == 0.0
    # Kills: a collective on one rank only (there is no process group here, so it would raise).
    squared = torch.tensor([4.0])
    assert reduce_squared_norm(squared, None) is squared and squared.item() == 4.0


@of_each_kind
@of_each_dtype
def test_one_bad_element_makes_it_not_finite(bad, dtype):
    # Kills: a nan-ignoring reduction or a -1 sentinel, after which the step would not be skipped.
    grad = torch.ones(1000, dtype=dtype)
    grad[517] = bad
    assert not torch.isfinite(local_squared_norm([torch.ones(5), grad], CPU)).item()


@of_each_kind
def test_copies_that_another_rank_counts_add_nothing_unless_they_are_bad(bad):
    # Kills: counting copies; a rank alone with a bad copy that steps because the counted is good.
    grad, copy = torch.full((4,), 2.0), torch.full((9,), 3.0, dtype=torch.bfloat16)
    assert local_squared_norm([grad], CPU, [copy, torch.empty(0)]).item() == 16.0
    copy[7] = bad
    assert not torch.isfinite(local_squared_norm([grad], CPU, [copy])).item()
    assert not torch.isfinite(local_squared_norm([], CPU, [copy])).item()


def test_neighbouring_ranges_become_one():
    # Kills: joining over a gap (what another rank counts would count here), losing the last range.
    assert joined([(0, 3), (3, 5), (7, 8), (8, 8), (8, 9)]) == [(0, 5), (7, 9)]
    assert joined([(2, 4)]) == [(2, 4)] and joined([]) == []


def test_clipping_is_torchs():
    # Kills: a missing epsilon, scaling up small gradients, and clipping when it is off.
    for norm, limit in [(0.5, 1.0), (1.0, 1.0), (3.7, 1.0), (1e-8, 1e-9), (0.0, 1.0)]:
        param = torch.nn.Parameter(torch.zeros(1))
        param.grad = torch.tensor([norm])
        torch.nn.utils.clip_grad_norm_([param], limit)
        assert norm * clip_factor(norm, limit) == pytest.approx(param.grad.item(), rel=1e-6)
    assert clip_factor(100.0, 0.0) == 1.0
    assert clip_factor(100.0, 10.0) == 10.0 / (100.0 + CLIP_EPSILON)


SIZES = [0, 1, 7, TAIL_NUMEL - 1, TAIL_NUMEL, TAIL_NUMEL + 1, 5 * TAIL_NUMEL + 3, 17 * TAIL_NUMEL]


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_there_and_back(numel: int, narrow: torch.dtype, wide: torch.dtype) -> None:
    # Kills: a piece that writes over elements not read yet, in either direction; a lost tail.
    overlay = Overlay(numel, narrow, wide, CPU)
    values = drawn(0, numel).to(narrow)
    assert not overlay.narrow.any() and overlay.narrow.shape == overlay.wide.shape == (numel,)
    overlay.narrow.copy_(values)
    overlay.widen()
    assert torch.equal(overlay.wide, values.to(wide))
    overlay.wide.mul_(2)
    overlay.narrow_again()
    assert torch.equal(overlay.narrow, values * 2)


def test_memory_of_one() -> None:
    # Kills: a narrow buffer behind an odd number of bytes; buffers apart; a whole copy on the way.
    for numel in (1, 3, 1000, 1001):
        overlay = Overlay(numel, torch.bfloat16, torch.float32, CPU)
        assert (overlay.narrow.data_ptr() - overlay.wide.data_ptr()) % 16 == 0
    numel = 64 * TAIL_NUMEL
    with simulate() as device:
        overlay = Overlay(numel, torch.bfloat16, torch.float32, CPU)
        overlay.widen()
        overlay.narrow_again()
        assert 4 * numel <= device.max_memory_allocated() < 4.2 * numel
    # One dtype is one buffer.
    overlay = Overlay(9, torch.float32, torch.float32, CPU)
    overlay.narrow.fill_(3)
    overlay.widen()
    assert torch.equal(overlay.wide, torch.full((9,), 3.0))
    overlay.narrow_again()
    assert torch.equal(overlay.narrow, torch.full((9,), 3.0))

"""What rounding leaves of a sum that is taken back, and what it cannot have left."""

import math

import pytest
import torch

from deepspeed.runtime.zero.gathering import undone_edits
from deepspeed.runtime.zero.gathering.undone_edits import is_undone

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return 0.02 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-3, 0.1, 1.0, 3.0])
def test_a_sum_that_is_taken_back(dtype: torch.dtype, size: float) -> None:
    # Kills: a bound by the units of the element itself, which a larger delta leaves far behind.
    for seed, shape in enumerate([(1,), (4, 4), (33, 65)]):
        before = drawn(*shape, seed=seed).to(dtype)
        after, delta = before.clone(), size * drawn(*shape, seed=seed + 9)
        for kind in (dtype, torch.float32):  # adapters are kept in fp32 beside a base in bf16
            after += delta.to(kind)
            after -= delta.to(kind)
            assert is_undone(before, after), (shape, kind)


def test_a_norm_of_columns_that_is_taken_back() -> None:
    # DoRA scales the sum too.
    before = drawn(64, 64).to(torch.bfloat16)
    delta, factor = 0.3 * drawn(64, 64, seed=1).to(torch.bfloat16), 1 + drawn(64, 1, seed=2).abs()
    merged = (factor * (before + delta)).to(torch.bfloat16)
    assert is_undone(before, (merged / factor).to(torch.bfloat16) - delta)


@pytest.mark.parametrize(
    "dtype, least",
    [(torch.bfloat16, 0.02), (torch.float16, 0.005), (torch.float32, 3e-6)],
)
def test_a_small_change(dtype: torch.dtype, least: float) -> None:
    # Kills: a bound by the largest element alone, which hides what changes all of them a little.
    before = drawn(64, 64).to(dtype)
    for after in (
        before.double() * (1 + least),
        before.double() * (1 - least),
        before.double() + 2 * least * 0.02,
        before.double() + 2 * least * drawn(64, 64, seed=3),
        before * 0,
    ):
        assert not is_undone(before, after.to(dtype))
    one = before.clone()
    one[3, 5] += 10 * least * 0.02
    assert not is_undone(before, one)


def test_special_values() -> None:
    # Kills: NaN or infinity that make everything small, a zero that becomes something.
    values = torch.tensor([1.0, math.nan, math.inf, -math.inf, -0.0, 2.0])
    assert is_undone(values, values.clone())
    assert is_undone(values, values + 1e-7)
    for index, value in enumerate((math.nan, 1.0, 1.0, math.inf, 1e-3, math.inf)):
        after = values.clone()
        after[index] = value
        assert not is_undone(values, after), index
    assert not is_undone(torch.zeros(4), torch.full((4,), 1e-30))
    assert is_undone(torch.zeros(0), torch.zeros(0))


def test_other_kinds() -> None:
    whole = torch.arange(5)
    assert is_undone(whole, whole.clone()) and not is_undone(whole, whole + 1)
    assert not is_undone(torch.ones(4), torch.ones(4).half())
    assert not is_undone(torch.ones(4), torch.ones(3))
    pairs = torch.tensor([1 + 2j, 3 - 1j])
    assert is_undone(pairs, pairs + 1e-7j) and not is_undone(pairs, pairs + 1e-3j)


def test_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    # Kills: a last piece that nobody looks at.
    monkeypatch.setattr(undone_edits, "PIECE_NUMEL", 4)
    before = drawn(3, 3)
    for index in range(9):
        after = before.clone().view(-1)
        after[index] += 1e-3
        assert not is_undone(before, after.view(3, 3))
    assert is_undone(before, before + 1e-9)

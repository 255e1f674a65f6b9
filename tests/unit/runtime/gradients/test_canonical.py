"""The canonical sum and exact sums of squares, against the definition."""

import math

import pytest
import torch
from unit.models import drawn

from deepspeed.ops import squares
from deepspeed.ops.squares import ExactSquares
from deepspeed.runtime.engine_parts.digest import AT_ONCE, hash_of
from deepspeed.runtime.gradients.canonical import CanonicalSums
from deepspeed.runtime.gradients.norm import local_squared_norm
from deepspeed.verify.diff import ulp_distance

CPU = torch.device("cpu")


def tree(leaves: list[torch.Tensor]) -> torch.Tensor:
    """Neighbours first; what is left over at the end of a level waits for the end."""
    rest = []
    while len(leaves) > 1:
        if len(leaves) % 2:
            rest.append(leaves.pop())
        leaves = [a + b for a, b in zip(leaves[::2], leaves[1::2], strict=True)]
    total = None
    for part in [*rest, *leaves]:
        total = part if total is None else total + part
    assert total is not None
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_mean_of_a_tree(dtype: torch.dtype) -> None:
    for count in range(1, 14):
        leaves = [(10.0**number * drawn(number, 37)).to(dtype) for number in range(count)]
        wanted = tree([leaf.float() for leaf in leaves]) / count
        for together in (1, 2, 3):
            target, sums = torch.empty(37), CanonicalSums(lambda count=count: float(count))
            for first in range(0, count, together):
                sums.add(target, leaves[first : first + together], 1.0, first == 0)
            sums.finish()
            sums.finish()
            assert torch.equal(target, wanted), (count, together)


def total(parts: list[torch.Tensor]) -> torch.Tensor:
    exact = ExactSquares()
    cells = exact.zeros(1, CPU)
    for part in parts:
        cells += local_squared_norm([part], CPU, squares=exact)
    return exact.totals(cells)


@pytest.mark.parametrize("with_op", [True, False], ids=["op", "torch"])
def test_squares_in_any_order_and_cut(with_op: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    values = drawn(0, 50_001) * torch.exp(8 * drawn(1, 50_001))
    wanted = total([values])
    if not with_op:
        monkeypatch.setattr(squares, "native_op", lambda *_: None)
    assert wanted.item() == pytest.approx(math.fsum((values.double() ** 2).tolist()), rel=1e-7)
    for cuts in (1, 2, 7, 300):
        order = torch.randperm(values.numel(), generator=torch.Generator().manual_seed(cuts))
        assert torch.equal(total(list(values[order].chunk(cuts))), wanted), cuts
    many = values.repeat(8)
    alone = total([many])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(total([many]), alone)
    # Kills: bins that overlap or end too early, powers of two in fp32.
    for scale in (1e-30, 1e-18, 1.0, 1e15, 1e22):
        scaled = (values.double() * scale).float()[:5000].clamp(-1e38, 1e38)
        right = math.fsum((scaled.double() ** 2).tolist())
        found = total([scaled]).double().item()
        assert found == pytest.approx(right if right < 3e38 else math.inf, rel=1e-6, abs=1e-44)
    assert total([torch.zeros(3)]).item() == 0.0
    # Kills: NaN far from the largest bin, which is then left out.
    for bad in (math.inf, -math.inf, math.nan, -math.nan):
        for beside in (1.0, 1e18, 1e-20):
            parts = [torch.tensor([beside]), torch.tensor([0.0, bad])]
            assert not total(parts).isfinite() and not total([torch.cat(parts)]).isfinite()


def test_a_digest_sees_every_element_and_no_cut() -> None:
    values = drawn(0, AT_ONCE + 10)
    wanted = hash_of(values, 5)
    parts = values.split([3, 1000, values.numel() - 1003])
    starts = (5, 8, 1008)
    assert sum(hash_of(p, s) for p, s in zip(parts, starts, strict=True)) % 2**64 == wanted % 2**64
    for at in (0, 77, values.numel() - 1):
        changed = values.clone()
        changed.view(torch.int32)[at] ^= 1
        assert hash_of(changed, 5) != wanted
    swapped = values.clone()
    swapped[[3, 4]] = values[[4, 3]]
    assert hash_of(swapped, 5) != wanted
    assert hash_of(values, 6) != wanted


def test_units_in_the_last_place() -> None:
    one = torch.tensor([1.0, -1.0, 0.0, 1.0])
    other = torch.tensor([1.0, -1.0, -0.0, -1.0])
    other[0] = torch.nextafter(one[0], torch.tensor(2.0))
    other[1] = torch.nextafter(one[1], torch.tensor(0.0))
    assert ulp_distance(one, other).tolist()[:3] == [1, 1, 0]
    assert ulp_distance(one.bfloat16(), one.bfloat16()).tolist() == [0] * 4

"""The reduce rule: every case of its derivation, against the mean over ranks and micro-batches."""

import itertools
from fractions import Fraction

import pytest
import torch
from unit.models import drawn

from deepspeed.runtime.gradients.reduce_rule import ReduceRule, balanced_factor

WORLDS, STEPS = (1, 2, 3, 4, 7), (1, 3, 4)
PREDIVIDE, DTYPES = (None, 1.0, 2.0, 8.0), (torch.float16, torch.float32)
SWITCH = (False, True)
CASES = list(itertools.product(WORLDS, STEPS, SWITCH, PREDIVIDE, SWITCH, SWITCH, DTYPES))


def exact_mean(world: int, steps: int) -> Fraction:
    """Equation (1) for gradients g[r, a] = 1 + r * steps + a."""
    return Fraction(sum(range(1, world * steps + 1)), world * steps)


@pytest.mark.parametrize("world, steps, prescale, predivide, sum_op, plain, dtype", CASES)
def test_the_optimizer_sees_the_mean(world, steps, prescale, predivide, sum_op, plain, dtype):
    # Kills: a factor that is missing, applied twice, or inverted in any one of the cases.
    rule = ReduceRule(world, prescale, predivide, sum_op)
    in_loss, divisor = (1, steps) if plain else (steps, 1)
    local = [sum(1 + rank * steps + a for a in range(steps)) / in_loss for rank in range(world)]
    pre, post = rule.factors(float(divisor), dtype)
    reduced = sum(value * pre for value in local) * post
    wanted = exact_mean(world, steps) * (world if sum_op else 1)
    assert reduced * rule.step_factor == pytest.approx(float(wanted), rel=1e-12)


@pytest.mark.parametrize("predivide", (1.0, 2.0, 8.0))
@pytest.mark.parametrize("prescale", SWITCH)
@pytest.mark.parametrize("world", WORLDS)
def test_averaging_twice_is_averaging_once(world, prescale, predivide):
    # Kills: the "sum" factor or 1/accumulation in the average, which a second backward repeats.
    pre, post = ReduceRule(world, prescale, predivide, sum_op=True).factors()
    first, second = [float(r + 1) for r in range(world)], [float(10 * r) for r in range(world)]
    mean = sum(x * pre for x in first) * post
    twice = sum((mean + y) * pre for y in second) * post
    assert twice == pytest.approx((sum(first) + sum(second)) / world, rel=1e-12)


@pytest.mark.parametrize(
    "world, ep_size", [(world, ep) for world in (2, 4, 6) for ep in (1, 2, 3, 6) if world % ep == 0]
)
@pytest.mark.parametrize("prescale", [False, True])
def test_an_experts_sums_are_divided_by_the_whole_world(world, ep_size, prescale):
    # Kills: dividing by the ranks that hold the expert, or by ep_size once more.
    means = [Fraction(7 * rank + 1) for rank in range(world)]
    pre, post = ReduceRule(world, prescale=prescale).factors()
    # All-to-all's backward brings them unscaled.
    brought = [sum(means[first : first + ep_size]) for first in range(0, world, ep_size)]
    reduced = sum(float(value) * pre for value in brought) * post
    assert reduced == pytest.approx(float(sum(means) / world), rel=1e-12)


@pytest.mark.parametrize("world", WORLDS)
def test_where_the_division_stands(world):
    # Kills: prescale and postscale swapped: fp16 sums would overflow, or lose their low bits.
    assert ReduceRule(world, prescale=True).factors() == (1.0 / world, 1.0)
    assert ReduceRule(world).factors() == (1.0, 1.0 / world)
    assert ReduceRule(world).factors(1.0, torch.bfloat16) == (1.0, 1.0 / world)
    assert ReduceRule(world, predivide_factor=4.0).factors() == (0.25, 4.0 / world)
    # Prescaling divides by all at once; the predivide factor splits a division that comes after.
    assert ReduceRule(world, prescale=True, predivide_factor=4.0).factors() == (1.0 / world, 1.0)
    # Kills: a mean that is silently scaled.
    assert ReduceRule(world, sum_op=True).step_factor == world
    assert ReduceRule(world).step_factor == 1.0


# fp16: case 2c of the derivation

FP16_MAX = torch.finfo(torch.float16).max


def reduced_in_fp16(world: int, value: float, factors: tuple[float, float]) -> float:
    """The mean of `world` equal gradients, summed in fp16 as a tree of ranks does."""
    pre, post = factors
    pieces = torch.full((world,), value, dtype=torch.float16) * pre
    while len(pieces) > 1:
        odd = pieces[2 * (len(pieces) // 2) :]
        pieces = torch.cat((pieces[0 : len(pieces) - 1 : 2] + pieces[1::2], odd))
    return float(pieces.float() * post)


def test_the_factor_is_a_power_of_two_near_the_root():
    # Kills: a factor that rounds, or that leaves more than half of the binades on one side.
    for world in range(1, 4097):
        factor = balanced_factor(world)
        assert factor & (factor - 1) == 0
        assert world / 2 < factor**2 <= 2 * world
        pre, post = ReduceRule(world).factors(1.0, torch.float16)
        assert pre * factor == 1.0 and post == factor / world
    assert [balanced_factor(world) for world in (1, 2, 3, 4, 8, 512)] == [1, 2, 2, 2, 4, 32]


@pytest.mark.parametrize("world", [2, 3, 4, 8, 64, 512, 4096])
def test_sums_in_fp16_do_not_overflow_where_half_the_binades_would_do(world):
    # Kills: sums before any division: they overflow log2(N) binades before their mean does.
    value = 0.9 * FP16_MAX * balanced_factor(world) / world
    summed_first = ReduceRule(world, predivide_factor=1.0).factors(1.0, torch.float16)
    assert reduced_in_fp16(world, value, summed_first) == float("inf")
    found = reduced_in_fp16(world, value, ReduceRule(world).factors(1.0, torch.float16))
    # One rounding per level of the tree, and one of the value itself.
    assert found == pytest.approx(value, rel=2.0**-11 * (world.bit_length() + 1))


@pytest.mark.parametrize("world", WORLDS)
def test_in_range_nothing_is_rounded_otherwise(world):
    # Kills: a factor that is no power of two, or a division that rounds twice.
    grads = drawn(world, world, 1000).to(torch.float16)

    def reduced(pre: float, post: float) -> torch.Tensor:
        pieces = grads * pre
        total = pieces[0].clone()
        for piece in pieces[1:]:
            total += piece
        return total.float() * post

    summed_first = ReduceRule(world, predivide_factor=1.0).factors(1.0, torch.float16)
    balanced = ReduceRule(world).factors(1.0, torch.float16)
    assert torch.equal(reduced(*balanced), reduced(*summed_first))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_what_the_user_gives_takes_precedence(dtype):
    # Kills: a factor of our own on top of, or in place of, the configured one.
    assert ReduceRule(64, prescale=True).factors(1.0, dtype) == (1 / 64, 1.0)
    assert ReduceRule(64, predivide_factor=1.0).factors(1.0, dtype) == (1.0, 1 / 64)
    assert ReduceRule(64, predivide_factor=16.0).factors(1.0, dtype) == (1 / 16, 16 / 64)

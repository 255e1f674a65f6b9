"""The reduce rule: every case of its derivation, against the definition (the mean over ranks and
micro-batches).
"""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest

from deepspeed.runtime.gradients.reduce_rule import ReduceRule

WORLDS = (1, 2, 3, 4, 7)
STEPS = (1, 3, 4)
CASES = list(
    itertools.product(WORLDS, STEPS, (False, True), (1.0, 2.0, 8.0), (False, True), (False, True))
)


def exact_mean(world: int, steps: int) -> Fraction:
    """Equation (1) for gradients g[r, a] = 1 + r * steps + a."""
    return Fraction(sum(range(1, world * steps + 1)), world * steps)


@pytest.mark.parametrize("world, steps, prescale, predivide, sum_op, plain", CASES)
def test_the_optimizer_sees_the_mean(world, steps, prescale, predivide, sum_op, plain):
    # Kills: a factor that is missing, applied twice, or inverted in any one of the cases.
    rule = ReduceRule(world, prescale, predivide, sum_op)
    in_loss, divisor = (1, steps) if plain else (steps, 1)
    local = [sum(1 + rank * steps + a for a in range(steps)) / in_loss for rank in range(world)]
    pre, post = rule.factors(float(divisor))
    reduced = sum(value * pre for value in local) * post
    wanted = exact_mean(world, steps) * (world if sum_op else 1)
    assert reduced * rule.step_factor == pytest.approx(float(wanted), rel=1e-12)


@pytest.mark.parametrize(
    "world, prescale, predivide", itertools.product(WORLDS, (False, True), (1.0, 2.0, 8.0))
)
def test_averaging_twice_is_averaging_once(world, prescale, predivide):
    # Kills: putting the "sum" factor or 1/accumulation into the average, which a second backward at
    # the boundary repeats.
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
    # Kills: dividing by the ranks that hold the expert (times ep_size too much), or by ep_size once
    # more. gradient of each rank's mean loss with respect to one expert
    means = [Fraction(7 * rank + 1) for rank in range(world)]
    pre, post = ReduceRule(world, prescale=prescale).factors()
    # All-to-all's backward brings them unscaled.
    brought = [sum(means[first : first + ep_size]) for first in range(0, world, ep_size)]
    assert sum(float(value) * pre for value in brought) * post == pytest.approx(
        float(sum(means) / world), rel=1e-12
    )


@pytest.mark.parametrize("world", WORLDS)
def test_where_the_division_stands(world):
    # Kills: prescale and postscale swapped: half-precision sums would overflow, or lose their low
    # bits.
    assert ReduceRule(world, prescale=True).factors() == (1.0 / world, 1.0)
    assert ReduceRule(world).factors() == (1.0, 1.0 / world)
    assert ReduceRule(world, predivide_factor=4.0).factors() == (0.25, 4.0 / world)
    # Prescaling divides by the whole world at once; the predivide factor splits a division that
    # comes after.
    assert ReduceRule(world, prescale=True, predivide_factor=4.0).factors() == (1.0 / world, 1.0)


def test_step_factor_is_the_world_for_sum_only():
    # Kills: a mean that is silently scaled.
    assert ReduceRule(5, sum_op=True).step_factor == 5.0
    assert ReduceRule(5).step_factor == 1.0

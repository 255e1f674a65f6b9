"""The contract: gradients, norm and parameters of every configuration equal one process's.

`make test` runs a subset with every pair of values; `-m contract` the whole product. The bounds
stand in `reference`, the mutations that these tests catch in `test_contract_bites`. The same again
on the simulated device, where every race and early reuse is an error: zero false alarms, and no
race, over every configuration. Below, the suite's own parts: configurations, how tests go over
them, a reference that is one.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from deepspeed import comm as dist
from unit.common import DistributedTest
from unit.v1.contract import reference
from unit.v1.contract.matrix import (
    CHUNKS_PER_WORLD,
    FACTORS,
    INSTANCE_FACTORS,
    Case,
    all_pairs,
    chunk,
    instance_cases,
    of_world,
    pairs_of,
    pairwise,
    pairwise_cases,
    product_cases,
)
from unit.v1.contract.model import (
    BUCKETS,
    concatenated,
    global_batch,
    make_model,
    parameter_groups,
    takes_branch,
)
from unit.v1.contract.runner import run_cases, run_simulated
from unit.v1.looping import each


class TestPairs(DistributedTest):
    """All pairs of values; one launched world runs all of its configurations."""

    world_size = [1, 2, 3, 4]
    exec_timeout = 240

    def test(self) -> None:
        # Kills: a contribution that is lost, doubled, scaled by a wrong factor, or that lands in
        # another place; special-casing of one rank (no reduction, no padding, no unscaling);
        # whatever is right for powers of two only (divisions, shard borders inside parameters,
        # padding), or only if an instance is one rank or all of them (gradients summed over the
        # wrong ranks, state cut or gathered over the wrong ranks, elements counted once per
        # instance in the norm, instances that drift apart).
        run_cases(of_world(pairwise_cases() + instance_cases(), dist.get_world_size()))


def simulated_cases() -> list[Case]:
    """Pairs of values with one optimizer instance and with several; of precisions one of a kind
    with all else, the others once: streams are a matter of what is summed, not of its type. Two
    micro-batches follow each other as three do; stateful optimizers run once at each stage.
    """
    kinds = INSTANCE_FACTORS["precision"]
    cases = pairwise_cases(127, world=(1, 2), precision=kinds)
    others = [case for case in cases if case.precision not in kinds or case.stage == 2]
    cases = [case for case in cases if case.optimizer == "sgd" or case in others]
    cases += instance_cases()
    return [dataclasses.replace(case, accumulation=min(case.accumulation, 2)) for case in cases]


class TestSimulatedPairs(DistributedTest):
    """All of them."""

    world_size = [1, 2, 4]
    exec_timeout = 400

    def test(self) -> None:
        # Kills: a missing wait for a collective, a bucket or gathered parameters used early, memory
        # let go while it is sent; and a checker that cries wolf.
        world = dist.get_world_size()
        cases = of_world(simulated_cases(), world)
        # Streams and memory of pairs are those of two ranks; four also sum over two groups.
        stateful = [case for case in cases if case.optimizer == "adamw" and case.overlap]
        run_simulated(cases if world < 4 else [case for case in stateful if case.instances == 2])


@pytest.mark.contract
@pytest.mark.parametrize("share", range(CHUNKS_PER_WORLD))
class TestProduct(DistributedTest):
    """The whole product, cut into shares."""

    world_size = list(FACTORS["world"])
    exec_timeout = 3600

    @pytest.mark.parametrize("run", [run_cases, run_simulated])
    def test(self, run: Callable[..., None], share: int) -> None:
        # Kills: what only three or more settings together bring out.
        run(chunk(of_world(product_cases(), dist.get_world_size()), share))


STEPS_OF_ACCUMULATION = {1: 3, 3: 2}


def test_every_pair_of_values_is_covered():
    # Kills: a generator that stops early; counts the pairs independently of it.
    rows = pairwise(FACTORS, [64])
    covered = set().union(*(pairs_of(row, FACTORS) for row in rows))
    wanted = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(FACTORS, 2)
        for x, y in itertools.product(FACTORS[a], FACTORS[b])
    }
    assert covered == wanted == all_pairs(FACTORS)
    assert all(set(row) == set(FACTORS) for row in rows)


@pytest.mark.parametrize(
    "factors",
    [{"a": (1,), "b": (2,)}, {"a": (1, 2, 3), "b": (1, 2), "c": (1, 2, 3, 4), "d": (0, 1)}],
)
def test_the_generator_on_other_factors(factors):
    # Kills: a generator fitted to one table.
    rows = pairwise(factors)
    assert set().union(*(pairs_of(row, factors) for row in rows)) == all_pairs(factors)


def split_of(case: Case) -> tuple[int, int]:
    return case.world, case.instances


def test_instances_are_covered_like_the_rest():
    # Kills: a split that meets no stage, precision or bucket size; worlds that no test launches.
    cases = instance_cases()
    met = {(*split_of(case), case.stage, case.precision, case.bucket) for case in cases}
    splits = INSTANCE_FACTORS["split"]
    for place, factor in enumerate(("stage", "precision", "bucket"), start=2):
        wanted = itertools.product(splits, INSTANCE_FACTORS[factor])
        assert {(row[:2], row[place]) for row in met} >= set(wanted), factor
    assert {case.precision for case in cases} == set(FACTORS["precision"])
    assert {split_of(case) for case in cases} == {*splits, (4, 4)}
    assert len(cases) == 9 + 4


def test_the_subset_is_small_and_the_same_every_time():
    # Kills: a subset that depends on hashing (not repeatable) or degenerates into the product.
    assert pairwise(FACTORS, [64]) == pairwise(FACTORS, [64])
    assert {case.precision for case in of_world(simulated_cases(), 2)} == set(FACTORS["precision"])
    assert len(pairwise_cases()) == 15 + 5 and len(simulated_cases()) == 10 + 2 + 13


def test_shares_make_up_the_product(record_property):
    # Kills: configurations that no share runs.
    product = product_cases()
    record_property("configurations", len(product))
    record_property("pairwise_configurations", len(pairwise_cases()))
    of_pairs = f"{len(pairwise_cases())} in the pairwise subset"
    print(f"contract suite: {len(product)} configurations, {of_pairs}")
    assert len(product) == math.prod(len(values) for values in FACTORS.values()) == 4320
    shares = [
        case
        for world in FACTORS["world"]
        for i in range(CHUNKS_PER_WORLD)
        for case in chunk(of_world(product, world), i)
    ]
    assert sorted(case.name for case in shares) == sorted(case.name for case in product)
    assert len({case.name for case in product}) == len(product)


def test_the_model_has_what_the_suite_is_about():
    # Kills: a change of the model after which a kind of parameter is no longer there.
    model = make_model()
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    assert 0 in sizes.values() and 1 in sizes.values()
    assert sum(size > BUCKETS["tiny"] for size in sizes.values()) >= 5
    assert sizes["back.weight"] + sizes["wide.weight"] == BUCKETS["exact"]
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert frozen == ["frozen.weight", "frozen.bias"]
    for group in parameter_groups(model):
        total = sum(p.numel() for p in group["params"] if p.requires_grad)
        assert any(total % world for world in (2, 3)), "no padding anywhere"


@pytest.mark.parametrize("world, accumulation", itertools.product((1, 2, 3), (1, 3)))
def test_the_branch_is_taken_by_one_rank_by_none_and_by_all(world, accumulation):
    # Kills: data in which "sometimes unused" never happens on one rank only.
    micros = itertools.product(range(STEPS_OF_ACCUMULATION[accumulation]), range(accumulation))
    taken = [[takes_branch(step, r, micro, world) for r in range(world)] for step, micro in micros]
    assert set(map(sum, taken)) == {0, 1, world}


@pytest.mark.parametrize("world, accumulation", [(2, 1), (3, 3)])
def test_the_mean_over_micro_batches_is_the_whole_batch(world, accumulation):
    # Kills: a half-precision reference that is not the concatenated batch in exact arithmetic.
    model = make_model().double()
    batches = global_batch(0, world, accumulation)
    whole = reference.gradients(model, concatenated(batches), 1.0)
    parts = [reference.gradients(model, batch, 1.0 / len(batches)) for batch in batches]
    for name, grad in whole.items():
        torch.testing.assert_close(sum(part[name] for part in parts), grad, rtol=1e-12, atol=1e-14)


def test_clipping_clips():
    # Kills: a limit above the norms, with which clipping or not would be the same configuration.
    for world, accumulation in itertools.product((1, 2, 3), (1, 3)):
        run = reference.fp32_run(STEPS_OF_ACCUMULATION[accumulation], accumulation, True, world)
        assert all(expected.norm > 4 * reference.CLIP for expected in run)


@pytest.mark.parametrize("world, accumulation", itertools.product((2, 3), (1, 3)))
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_lost_contribution_exceeds_the_bound(precision, world, accumulation):
    # Kills: bounds so wide that a micro-batch of one rank could be lost or doubled unseen.
    model = make_model()
    masters = {name: param.detach().clone() for name, param in reference.trainable(model).items()}
    decay = dict.fromkeys(masters, 0.0)
    dtype = reference.DTYPES[precision]
    expected = reference.half_step(masters, decay, precision, dtype, 0, accumulation, False, world)
    for batch in global_batch(0, world, accumulation):
        lost = reference.gradients(model, batch, 1.0 / (accumulation * world))
        for name in ("embed.weight", "twice.weight", "wide.weight", "wide.bias", "back.weight"):
            assert lost[name].norm().item() > 2 * expected.grad_bounds[name], name


def test_each_names_the_combination() -> None:
    # Kills: a loop over values that stops before its last, or hides which one failed.
    seen = []

    @each(a=(1, 2), b=("x", "y"))
    def body(self: Any, a: int, b: str) -> None:
        seen.append((a, b))
        if (a, b) == (2, "y"):
            raise KeyError("last")

    with pytest.raises(AssertionError, match="'a': 2, 'b': 'y'.*last"):
        body(None)
    assert len(seen) == 4

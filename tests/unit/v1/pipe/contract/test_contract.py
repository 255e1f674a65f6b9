"""The pipeline's contract: losses, gradients, norm and parameters equal those of one process.

`make test` runs a subset with every pair of values; `-m contract` the whole product. The bounds,
and where they are zero, stand in `reference`, the faults found in `test_contract_bites`.
"""

import itertools

import pytest
import torch

from unit.common import DistributedTest
from unit.v1.contract.matrix import all_pairs, of_world, pairs_of, pairwise
from unit.v1.contract.runner import run_cases
from unit.v1.pipe.contract import reference
from unit.v1.pipe.contract.cases import FACTORS, SHARES, PipeCase, pair_cases, product_cases
from unit.v1.pipe.contract.runner import PipeRun


class TestPairs(DistributedTest):
    """All pairs of values; one launched world runs all of its configurations."""

    exec_timeout = 240

    @pytest.mark.world_size(1)
    def test_world_1(self) -> None:
        # Kills: what assumes a neighbour (a message to itself, chunks of one stage, a last stage
        # that is not the first).
        run_cases(of_world(pair_cases(), 1), PipeRun)

    @pytest.mark.world_size(2)
    def test_world_2(self) -> None:
        # Kills: data ranks taken for stages or the other way round, a loss divided twice or never,
        # ties not summed.
        run_cases(of_world(pair_cases(), 2), PipeRun)

    @pytest.mark.world_size(4)
    def test_world_4(self) -> None:
        # Kills: what is right for a first and a last stage only; norms over one axis of the grid.
        run_cases(of_world(pair_cases(), 4), PipeRun)


@pytest.mark.contract
@pytest.mark.parametrize("share", range(SHARES))
class TestProduct(DistributedTest):
    """The whole product, cut into shares."""

    world_size = [1, 2, 4]
    exec_timeout = 900

    def test(self, share: int) -> None:
        # Kills: what only three or more settings together bring out.
        from deepspeed import comm as dist

        run_cases(of_world(product_cases(), dist.get_world_size())[share::SHARES], PipeRun)


def test_pairs_are_covered() -> None:
    # Kills: a cover that leaves a pair out, or whose cases say something else than its rows.
    rows = pairwise(FACTORS)
    assert set().union(*(pairs_of(row, FACTORS) for row in rows)) == all_pairs(FACTORS)
    cases = pair_cases()
    assert {(case.pipe, case.replicas) for case in cases} == set(FACTORS["grid"])
    assert {(case.schedule, case.checkpoint) for case in cases} == set(FACTORS["plan"])
    assert {case.precision for case in cases} == {"fp32", "bf16", "bf16+fp32", "fp16"}
    assert any(case.adaptive for case in cases) and any(
        not case.adaptive and case.precision == "fp16" for case in cases
    )
    assert len({case.name for case in cases}) == len(cases) < 50


def test_product_is_whole() -> None:
    # Kills: a product that drops a schedule, or turns that never bring a value to some schedule.
    cases = product_cases()
    wanted = (
        "pipe",
        "world",
        "schedule",
        "precision",
        "adaptive",
        "stage",
        "dynamic",
        "tied",
        "clip",
    )
    assert (
        len({tuple(getattr(case, name) for name in wanted) for case in cases})
        == len(cases)
        == 5 * 3 * 5 * 2**4
    )
    turns = {(case.schedule, case.overlap, case.offload, case.accumulation) for case in cases}
    assert turns == set(
        itertools.product(
            ("1f1b", "interleaved", "zero_bubble"), (True, False), (True, False), (1, 4, 7)
        )
    )


def test_two_uses_are_one_weight() -> None:
    # Kills: a reference that is wrong about ties. In double precision, against a weight that the
    # layers really share.
    case = PipeCase(0, "fp32", 3, False, False, True, False, "huge", 1, tied=True)
    apart, shared = (reference.Chain(tied=True).double() for _ in range(2))
    shared.layers[-1].weight = shared.layers[0].weight  # type: ignore[union-attr]  # both are modules
    for chain in (apart, shared):
        for micro in reference.batch(case, 0, 0):
            chain.backward(micro, 3, 1.0)
    total = reference.merged(
        {name: param.grad for name, param in apart.trainable().items() if param.grad is not None},
        True,
    )
    torch.testing.assert_close(
        total[reference.SHARED], shared.layers[0].weight.grad, rtol=1e-12, atol=1e-15
    )

"""The contract: gradients, norm and parameters of every configuration equal one process's.

`make test` runs a subset with every pair of values; `-m contract` the whole product. The bounds
stand in `reference`, the mutations that these tests catch in `test_contract_bites`. The same again
on the simulated device, where every race and early reuse is an error: zero false alarms, and no
race, over every configuration.
"""

from collections.abc import Callable

import pytest

from deepspeed import comm as dist
from unit.common import DistributedTest
from unit.v1.contract.matrix import (
    CHUNKS_PER_WORLD,
    FACTORS,
    chunk,
    instance_cases,
    of_world,
    pairwise_cases,
    product_cases,
)
from unit.v1.contract.runner import run_cases, run_simulated


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


class TestSimulatedPairs(DistributedTest):
    """All pairs of values, with one optimizer instance and with several."""

    world_size = [1, 2, 4]
    exec_timeout = 400

    def test(self) -> None:
        # Kills: a missing wait for a collective, a bucket or gathered parameters used early, memory
        # let go while it is sent; and a checker that cries wolf.
        world = dist.get_world_size()
        cases = of_world(pairwise_cases(worlds=(1, 2)) + instance_cases(), world)
        # Streams and memory of pairs are those of two ranks; four also sum over two groups.
        run_simulated([case for case in cases if world < 4 or case.optimizer == "adamw"])


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

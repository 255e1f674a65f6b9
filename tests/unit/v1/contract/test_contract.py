"""The contract: gradients, norm and parameters of every configuration equal one process's.

`make test` runs a subset with every pair of values; `-m contract` the whole product. The bounds
stand in `reference`, the mutations that these tests catch in `test_contract_bites`.
"""

import pytest

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
from unit.v1.contract.runner import run_cases


class TestPairs(DistributedTest):
    """All pairs of values; one launched world runs all of its configurations."""

    exec_timeout = 240

    @pytest.mark.world_size(1)
    def test_world_1(self) -> None:
        # Kills: special-casing of one rank (no reduction, no padding, no unscaling).
        run_cases(of_world(pairwise_cases(), 1))

    @pytest.mark.world_size(2)
    def test_world_2(self) -> None:
        # Kills: a contribution that is lost, doubled, scaled by a wrong factor, or that lands in
        # another place.
        run_cases(of_world(pairwise_cases() + instance_cases(), 2))

    @pytest.mark.world_size(3)
    def test_world_3(self) -> None:
        # Kills: whatever is right for powers of two only (divisions, shard borders inside
        # parameters, padding).
        run_cases(of_world(pairwise_cases(), 3))

    @pytest.mark.world_size(4)
    def test_world_4(self) -> None:
        # Kills: what is right only if an instance is one rank or all of them (gradients summed over
        # the wrong ranks, state cut or gathered over the wrong ranks, elements counted once per
        # instance in the norm, instances that drift apart).
        run_cases(of_world(instance_cases(), 4))


@pytest.mark.contract
@pytest.mark.parametrize("share", range(CHUNKS_PER_WORLD))
class TestProduct(DistributedTest):
    """The whole product, cut into shares."""

    world_size = list(FACTORS["world"])
    exec_timeout = 900

    def test(self, share: int) -> None:
        # Kills: what only three or more settings together bring out.
        from deepspeed import comm as dist

        run_cases(chunk(of_world(product_cases(), dist.get_world_size()), share))

"""The contract on the simulated device: same bounds, every race and early reuse an error.

All work is late, gradients are accumulated on two side streams, and the stream checker listens:
zero false alarms, and no race, over every configuration.
"""

import pytest

from unit.common import DistributedTest
from unit.v1.contract.matrix import (
    CHUNKS_PER_WORLD,
    FACTORS,
    Case,
    chunk,
    instance_cases,
    of_world,
    pairwise_cases,
    product_cases,
)
from unit.v1.contract.runner import run_cases


def run_simulated(cases: list[Case]) -> None:
    """All cases, each with the checker; raises what it finds, deviations and hangs too."""
    import torch

    from deepspeed.accelerator.sim_accelerator import simulate
    from deepspeed.verify import Budget, check_budgets, check_streams

    torch.set_num_threads(1)
    few = Budget(queues=1, processors=1)
    with simulate(backward_streams=2), check_streams(), check_budgets(Budget(), few):
        run_cases(cases)


class TestPairs(DistributedTest):
    """All pairs of values, with one optimizer instance and with several."""

    world_size = [1, 2, 4]
    exec_timeout = 400

    def test(self) -> None:
        # Kills: a missing wait for a collective, a bucket or gathered parameters used early, memory
        # let go while it is sent; and a checker that cries wolf.
        from deepspeed import comm as dist

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

    def test(self, share: int) -> None:
        # Kills: what only three or more settings together bring out.
        from deepspeed import comm as dist

        run_simulated(chunk(of_world(product_cases(), dist.get_world_size()), share))

"""Programs that hang on a device of few queues or processors are found; others are not."""

import pytest
import torch

from deepspeed import comm as dist
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.verify import Budget, BudgetError, check_budgets
from unit.common import DistributedTest

MESSAGES = 4
ROOM_FOR_TWO = Budget(processors=8)
ONE_QUEUE = Budget(queues=1)


def exchange(groups: list[object], ahead: int) -> None:
    """Each rank sends a result on every channel; `ahead` receives are posted before the first."""
    other = 1 - dist.get_rank()
    received = [torch.empty(3) for _ in groups]
    works: list[object] = []
    for number, group in enumerate(groups):
        while len(works) < min(number + ahead, len(groups)):
            works.append(dist.irecv(received[len(works)], other, group=groups[len(works)]))
        dist.isend(torch.ones(3) * number, other, group=group).wait()
        if ahead == 0:
            works.append(dist.irecv(received[number], other, group=group))
        works[number].wait()  # type: ignore[attr-defined]
    assert [value.tolist() for value in received] == [[float(n)] * 3 for n in range(len(groups))]


class TestBudgets(DistributedTest):
    """Two ranks."""

    world_size = 2

    def test_receives_ahead_hold_all_processors(self) -> None:
        # Kills: a simulation of unlimited processors. The numbers are right here: only a device of
        # this size would hang.
        groups = [dist.new_group([0, 1]) for _ in range(MESSAGES)]
        with simulate():
            with check_budgets(Budget(), Budget(processors=4 * MESSAGES + 4)):
                exchange(groups, MESSAGES)
            with check_budgets(ROOM_FOR_TWO):
                exchange(groups, 1)
            with pytest.raises(BudgetError) as told, check_budgets(ROOM_FOR_TWO):
                exchange(groups, 2)
        text = str(told.value)
        assert "8 of 8 processors are held" in text and "which waits for rank(s)" in text
        assert "works.append(dist.irecv(" in text
        assert "computation of <default stream> has not begun: no processor is free" in text

    def test_a_blocked_stream_blocks_its_queue(self) -> None:
        # Kills: streams that are independent whatever the queues. A stream that waits for a message
        # stands in front of the computation of what is sent.
        def run() -> None:
            other, side = 1 - dist.get_rank(), simulator.Stream()
            value, received = torch.ones(2), torch.empty(2)
            work = dist.irecv(received, other)
            with simulator.stream(side):
                work.wait()
                doubled = received * 2
            dist.isend(value + 1, other).wait()
            simulator.current_stream().wait_stream(side)
            assert doubled.tolist() == [4.0, 4.0]

        with simulate() as simulator:
            with check_budgets(Budget(), Budget(processors=9)):
                run()
            with pytest.raises(
                BudgetError, match="stands before it in its queue, and there"
            ) as told:
                with check_budgets(ONE_QUEUE):
                    run()
        assert "dist.isend(value + 1, other)" in str(told.value)
        assert "work = dist.irecv(received, other)" in str(told.value)

    def test_collectives_in_two_orders(self) -> None:
        # Kills: collectives that need no processor. Two groups of the same ranks, in another order
        # on each, are right only where both kernels fit.
        groups = [dist.new_group([0, 1]) for _ in range(2)]

        def run() -> None:
            order = groups if dist.get_rank() == 0 else groups[::-1]
            values = [torch.ones(2), torch.ones(2)]
            works = [
                dist.all_reduce(value, group=group, async_op=True)
                for value, group in zip(values, order, strict=True)
            ]
            for work in works:
                work.wait()
            assert sum(values).tolist() == [4.0, 4.0]  # type: ignore[union-attr]

        with simulate():
            with check_budgets(Budget(processors=64)):
                run()
            with pytest.raises(BudgetError, match="all_reduce of ranks"):
                with check_budgets(Budget(processors=63)):
                    run()


def test_needs_a_simulated_device() -> None:
    # Kills: a check that looks at nothing.
    with pytest.raises(RuntimeError, match="set DS_ACCELERATOR=sim"), check_budgets():
        pass


def test_one_process_alone() -> None:
    # Kills: a report about a program that waits for nobody.
    with simulate() as simulator, check_budgets(Budget(queues=1, processors=1)):
        side = simulator.Stream()
        value = torch.ones(2)
        side.wait_stream(simulator.current_stream())
        with simulator.stream(side):
            doubled = value * 2
        simulator.current_stream().wait_stream(side)
        assert (doubled + 1).tolist() == [3.0, 3.0]

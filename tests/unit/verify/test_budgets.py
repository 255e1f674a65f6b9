"""What the simulated device finds: programs that hang on a small one, memory's holders, races."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import deepspeed
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.sim_accelerator import RUN_AHEAD, SCHEDULE_ENV, Sim_Accelerator, simulate
from deepspeed.runtime.streams import SideStream
from deepspeed.verify import Budget, BudgetError, StreamRaceError, check_budgets, memory_peak
from unit.common import DistributedTest
from unit.models import config_of

MESSAGES = 4
ROOM_FOR_TWO = Budget(processors=8)
ONE_QUEUE = Budget(queues=1)
SGD = {"type": "SGD", "params": {"lr": 0.1}}


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
    world_size = 2

    def test_receives_ahead_hold_all_processors(self) -> None:
        # Kills: unlimited processors. The numbers are right: only a device of this size would hang.
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
            before = "stands before it in its queue, and there"
            with pytest.raises(BudgetError, match=before) as told, check_budgets(ONE_QUEUE):
                run()
        assert "dist.isend(value + 1, other)" in str(told.value)
        assert "work = dist.irecv(received, other)" in str(told.value)

    def test_collectives_in_two_orders(self) -> None:
        # Kills: collectives that need no processor. Two groups of the same ranks, in another order
        # on each, are right only where both kernels fit, and both communicators are there.
        groups = [dist.new_group([0, 1]) for _ in range(2)]

        def run() -> None:
            order = groups if dist.get_rank() == 0 else groups[::-1]
            values = [torch.ones(2), torch.ones(2)]
            pairs = zip(values, order, strict=True)
            works = [dist.all_reduce(value, group=g, async_op=True) for value, g in pairs]
            for work in works:
                work.wait()
            assert sum(values).tolist() == [4.0, 4.0]  # type: ignore[union-attr]

        with simulate():
            with pytest.raises(BudgetError, match="0 of 64 processors are held"):
                with check_budgets(Budget(processors=64)):
                    run()
            with check_budgets(Budget(processors=64)):
                run()
            told = pytest.raises(BudgetError, match="all_reduce of ranks")
            with told, check_budgets(Budget(processors=63)):
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


KB = 1024


def floats(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes // 4)


def large() -> torch.Tensor:
    return torch.empty(2 * KB)


def test_what_lives_at_the_peak_is_counted_by_place() -> None:
    # Kills: the sum of all allocations, what is alive at the end, and places inside the device.
    with simulate() as sim:
        before = floats(4 * KB)
        with memory_peak() as peak:
            first = large()
            del first
            second, third = large(), large()
            del second, third, before
            fourth = floats(2 * KB)
        del fourth
        place = f"{__file__}:{large.__code__.co_firstlineno + 1} in large"
        assert peak.by_owner == {place: 16 * KB, "(allocated before)": 4 * KB}
        assert peak.nbytes == 20 * KB == sum(peak.by_owner.values()) == sim.max_memory_allocated()
        sim.reset_peak_memory_stats()
        assert sim.max_memory_allocated() == sim.memory_allocated() < 20 * KB


def test_another_device_says_that_it_cannot() -> None:
    # Kills: an empty answer where nobody looked.
    if isinstance(get_accelerator(), Sim_Accelerator):
        pytest.skip("the suite runs on the simulated device")
    with pytest.raises(RuntimeError, match="DS_ACCELERATOR=sim"), memory_peak():
        pass


def test_the_host_runs_ahead_under_that_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    # Kills: an event that is done before anybody waited, and a name that means another schedule.
    monkeypatch.setenv(SCHEDULE_ENV, "run-ahead")
    accelerator = Sim_Accelerator()
    try:
        assert accelerator.simulator.scheduler.schedule == RUN_AHEAD
        torch.ones(4) * 2
        event = accelerator.Event()
        event.record()
        for _ in range(20):
            torch.ones(4) * 2
            assert not event.query()
        event.synchronize()
        assert event.query()
    finally:
        accelerator.close()


class TestEngine(DistributedTest):
    world_size = 2

    def test_buffers_have_names(self) -> None:
        # Kills: owners that are asked for nothing, so that all memory goes by its place.
        with simulate():
            config = config_of(2, 2, 1, "bf16", optimizer=SGD)
            engine, *_ = deepspeed.initialize(model=torch.nn.Linear(64, 64), config=config)
            with memory_peak() as peak:
                engine.backward(engine(torch.ones(2, 64, dtype=torch.bfloat16)).float().sum())
                engine.step()
            named = [owner for owner in peak.by_owner if ".py:" not in owner]
            assert any("weight" in owner for owner in named), peak.by_owner
            assert sum(peak.by_owner.values()) == peak.nbytes
            engine.destroy()


@contextmanager
def checked_device() -> Iterator[None]:
    with simulate(backward_streams=2):
        try:
            yield
        finally:
            deepspeed.verify.disable_stream_checking()


def train() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)])
    zero = {"overlap_comm": True, "reduce_bucket_size": 72}
    config = config_of(2, 4, optimizer=SGD, zero_optimization=zero, verify={"streams": True})
    engine, *_ = deepspeed.initialize(model=model, config=config)
    for _ in range(2):
        engine.backward(engine(torch.randn(4, 8)).square().mean())
        engine.step()
    engine.destroy()


class TestStreamsBlock(DistributedTest):
    world_size = 2

    def test_silent_when_all_is_ordered(self) -> None:
        # Kills: false alarms of the switch, which sees construction and every step.
        with checked_device():
            train()

    def test_a_race_on_one_rank_stops_all(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Kills: a key that is ignored; a rank that goes on and hangs in its next collective.
        if dist.get_rank() == 1:
            monkeypatch.setattr(SideStream, "wait_for", lambda self, producers: None)
        words = ("another rank left", "never waits for <backward stream")
        expected = words[dist.get_rank()]
        with checked_device(), pytest.raises(StreamRaceError, match=expected):
            train()

    def test_refused_without_streams(self) -> None:
        # Kills: a check that is asked for and silently does nothing.
        with pytest.raises(RuntimeError, match="DS_ACCELERATOR=sim"):
            train()

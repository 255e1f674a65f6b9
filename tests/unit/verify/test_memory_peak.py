"""Who holds the simulated device's memory at its peak."""

import pytest
import torch

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.sim_accelerator import RUN_AHEAD, SCHEDULE_ENV, Sim_Accelerator, simulate
from deepspeed.verify import memory_peak
from unit.common import DistributedTest

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
        line = large.__code__.co_firstlineno + 1
        assert peak.by_owner == {
            f"{__file__}:{line} in large": 16 * KB,
            "(allocated before)": 4 * KB,
        }
        assert peak.nbytes == 20 * KB == sum(peak.by_owner.values()) == sim.max_memory_allocated()
        sim.reset_peak_memory_stats()
        assert sim.max_memory_allocated() == sim.memory_allocated() < 20 * KB


def test_another_device_says_that_it_cannot() -> None:
    # Kills: an empty answer where nobody looked.
    if isinstance(get_accelerator(), Sim_Accelerator):
        pytest.skip("the suite runs on the simulated device")
    with pytest.raises(RuntimeError, match="DS_ACCELERATOR=sim"), memory_peak():
        pass


def test_the_host_runs_ahead_under_the_schedule_of_that_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
            engine, *_ = deepspeed.initialize(
                model=torch.nn.Linear(64, 64),
                config={
                    "train_micro_batch_size_per_gpu": 2,
                    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
                    "bf16": {"enabled": True},
                    "zero_optimization": {"stage": 2},
                },
            )
            with memory_peak() as peak:
                engine.backward(engine(torch.ones(2, 64, dtype=torch.bfloat16)).float().sum())
                engine.step()
            named = [owner for owner in peak.by_owner if ".py:" not in owner]
            assert any("weight" in owner for owner in named), peak.by_owner
            assert sum(peak.by_owner.values()) == peak.nbytes
            engine.destroy()

"""Ranks of the simulated device whose hosts wait for what they would issue: found, both places."""

import logging
import time
from collections.abc import Callable

import pytest
import torch

from deepspeed import comm as dist
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.comm.sim import stuck_ranks
from deepspeed.comm.sim.stuck_ranks import HostWaitError
from deepspeed.utils.logging import logger
from unit.common import DistributedTest
from unit.v1.pipe.contract.runner import leave_together

# Three looks and the wait before the first, many times over: other processes share the cores.
SOON_S = 20.0


def stuck(run: Callable[[], None]) -> str:
    """What is said of `run`, which must not return; ends the test's world."""
    started = time.monotonic()
    with pytest.raises(RuntimeError) as told, simulate():
        run()
    assert time.monotonic() - started < SOON_S
    leave_together()
    return str(told.value)


class TestPosted(DistributedTest):
    """The whole device is not waited for while a receive is posted."""

    world_size = 2

    def test_device_wait(self) -> None:
        # Kills: a device-wide wait that is let through, because here the other rank sends anyway.
        with simulate() as accelerator:
            other = 1 - dist.get_rank()
            received = torch.empty(3)
            work = dist.irecv(received, other)
            sent = dist.isend(torch.ones(3), other)
            with pytest.raises(HostWaitError) as told:
                accelerator.synchronize()
            assert "accelerator.synchronize()" in str(told.value)
            assert "work = dist.irecv(received, other)" in str(told.value)
            work.wait()
            accelerator.synchronize()
            sent.wait()
            assert received.tolist() == [1.0] * 3

    def test_waits_for_less(self) -> None:
        # Kills: an error about a stream or an event that nothing posted holds up.
        with simulate() as accelerator:
            other = 1 - dist.get_rank()
            received = torch.empty(3)
            work = dist.irecv(received, other)
            value = torch.ones(3) * 2
            event = accelerator.current_stream().record_event()
            event.synchronize()
            accelerator.current_stream().synchronize()
            assert value.sum().item() == 6.0
            dist.isend(value, other).wait()
            work.wait()
            assert received.tolist() == [2.0] * 3


class TestCircles(DistributedTest):
    world_size = 2

    def test_each_receives_before_it_sends(self) -> None:
        # Kills: a rank that hangs until the backend's time is over.
        def run() -> None:
            other = 1 - dist.get_rank()
            received = torch.empty(2)
            dist.recv(received, other)
            received.tolist()
            dist.send(received, other)

        text = stuck(run)
        assert "received.tolist()" in text and "dist.recv(received, other)" in text
        assert "has not issued its part, and cannot while it waits" in text

    def test_through_the_other_ranks_streams(self) -> None:
        # Kills: looking at hosts alone. Rank 0 has issued everything; its send stands behind a
        # receive from rank 1, whose host waits for that send before it issues its own.
        def run() -> None:
            if dist.get_rank() == 0:
                first = torch.empty(2)
                dist.recv(first, 1)
                dist.send(first * 2, 1)
                first.tolist()
                return
            second = torch.empty(2)
            work = dist.irecv(second, 0)
            work._event.synchronize()
            dist.send(torch.ones(2), 0)

        text = stuck(run)
        assert "work._event.synchronize()" in text and "work = dist.irecv(second, 0)" in text
        assert "rank 0 has issued its part, behind recv from rank 1" in text
        assert "dist.recv(first, 1)" in text

    def test_a_collective_and_a_message(self) -> None:
        # Kills: counting messages only.
        def run() -> None:
            value = torch.ones(2)
            if dist.get_rank() == 0:
                dist.all_reduce(value)
                value.tolist()
                dist.send(value, 1)
            else:
                dist.recv(value, 0)
                value.tolist()
                dist.all_reduce(value)

        text = stuck(run)
        assert "all_reduce of ranks [0, 1]" in text and "recv from rank 0" in text


class TestThreeRanks(DistributedTest):
    world_size = 3

    def test_circle(self) -> None:
        # Kills: comparing pairs of ranks only.
        def run() -> None:
            rank = dist.get_rank()
            received = torch.empty(2)
            dist.recv(received, (rank + 1) % 3)
            received.tolist()

        text = stuck(run)
        assert all(f"rank {rank}: its host waits at" in text for rank in range(3))


class TestSilence(DistributedTest):
    world_size = 2

    def test_a_slow_rank(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Kills: a rank taken for blocked because it takes its time; a wait that nobody hears of.
        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]  # a handler of one line
        logger.addHandler(handler)
        monkeypatch.setattr(stuck_ranks, "REPORT_S", 0.5)
        with simulate():
            value = torch.ones(2)
            for _ in range(2):
                if dist.get_rank() == 0:
                    time.sleep(1.0)
                dist.all_reduce(value)
                assert value.max().item() > 1
        logger.removeHandler(handler)
        reported = [line for line in lines if "the simulated device has waited" in line]
        assert len(reported) == (2 if dist.get_rank() == 1 else 0)
        for line in reported:
            assert "rank 0 is not blocked in the device" in line
            assert "dist.all_reduce(value)" in line

"""Pipelines on the simulated device: as one process, and no wait that hangs a device."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.accelerator.sim_accelerator import Sim_Accelerator, simulate
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.messages import stage_channels
from deepspeed.runtime.pipe.messages.channel import QUEUES_ENV
from deepspeed.verify import Budget, BudgetError, check_budgets
from unit.common import DistributedTest
from unit.models import config_of, drawn, linears, sgd
from unit.one_process import OneProcess
from unit.v1.looping import each

WIDTH, ROWS, MICRO_BATCHES, LAYERS, LR = 5, 3, 4, 8, 0.1
# Timers count from the third step on.
BATCHES = 4
# A device, and one on which three messages fill all processors and streams share two queues.
BUDGETS = (Budget(), Budget(queues=2, processors=12))
AT_BOUNDARIES = {"synchronize_checkpoint_boundary": True}
CHUNKS = {"1f1b": 1, "interleaved": 2, "zero_bubble": 1}


def make_layers() -> list[nn.Module]:
    return [nn.Sequential(layer, nn.Tanh()) for layer in linears(LAYERS, WIDTH, seed=3)]


def loss_of(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (outputs - labels).square().mean()


def batch(step: int) -> list[tuple[torch.Tensor, ...]]:
    return [pair.unbind(0) for pair in drawn(step, MICRO_BATCHES, 2, ROWS, WIDTH)]


def expected() -> list[float]:
    layers = nn.Sequential(*make_layers())
    one = OneProcess(layers, LR, lambda model, pair: loss_of(model(pair[0]), pair[1]))
    return [one.step(batch(step)) for step in range(BATCHES)]


@contextmanager
def simulated(schedule: str, **keys: Any) -> Iterator[tuple[PipelineEngine, Sim_Accelerator]]:
    """A device, and an engine on it."""
    with simulate() as accelerator:
        module = PipelineModule(
            make_layers(),
            num_stages=dist.get_world_size(),
            loss_fn=loss_of,
            partition_method="uniform",
            num_model_chunks=CHUNKS[schedule],
            activation_checkpoint_interval=keys.pop("checkpoint", 0),
        )
        keys |= {"gradient_clipping": 1.0, "pipeline": {"schedule": schedule}}
        config = config_of(0, ROWS, MICRO_BATCHES, optimizer=sgd(LR), **keys)
        engine: PipelineEngine = deepspeed.initialize(model=module, config=config)[0]
        try:
            yield engine, accelerator
        finally:
            engine.destroy()


def losses_of(engine: PipelineEngine) -> list[float]:
    losses = [engine.train_batch(iter(batch(step))) for step in range(BATCHES)]
    return [loss.item() for loss in losses]


def check_unwaited(schedule: str, **keys: Any) -> None:
    """Train as one process does, on a device that the host never waits for as a whole."""
    with simulated(schedule, **keys) as (engine, accelerator):
        with accelerator.count_host_waits() as waits, check_budgets(*BUDGETS):
            losses = losses_of(engine)
    assert losses == pytest.approx(expected(), rel=1e-5)
    assert not waits.inside("device synchronize")


def train_waiting(schedule: str, stage: int) -> list[float]:
    """Train; a stage waits for what it has posted after each instruction, as an allocator does."""
    with simulated(schedule) as (engine, _):
        issued = engine.channels.issued

        def and_wait(count: int) -> None:
            issued(count)
            for channel in engine.channels:
                for posted in channel._posted:
                    for work in posted.works:
                        work._event.synchronize()

        if engine.stage_id == stage:
            engine.channels.issued = and_wait  # type: ignore[method-assign]  # of this engine alone
        return losses_of(engine)


class TestSchedules(DistributedTest):
    world_size = 4
    exec_timeout = 100

    @each(schedule=CHUNKS)
    def test(self, schedule: str) -> None:
        # Kills: a host that waits for the whole device while a receive is posted.
        check_unwaited(schedule)


def post_at_once(lane: stage_channels._Lane, count: int) -> None:
    """Planted for `_Lane.issued`: all that a receive depends on counts as issued."""
    lane._issued = 1 << 30
    lane.post()


def run_two(schedule: str, budget: Budget) -> None:
    """Two batches, of which a device of this budget must not hang in one."""
    with simulated(schedule) as (engine, _), check_budgets(budget):
        for step in range(2):
            engine.train_batch(iter(batch(step)))


class TestFewQueues(DistributedTest):
    world_size = 4
    exec_timeout = 100

    def test_one_queue(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Kills: a receive behind another in the only queue, which holds up all other streams.
        with pytest.raises(BudgetError, match="what is before it in its stream is not over"):
            run_two("interleaved", Budget(queues=1))
        monkeypatch.setenv(QUEUES_ENV, "1")
        for schedule in CHUNKS:
            run_two(schedule, Budget(queues=1, processors=8))


class TestTwoStages(DistributedTest):
    world_size = 2
    exec_timeout = 100

    @each(
        keys=[
            {"wall_clock_breakdown": True, "steps_per_print": 1},
            {"comms_logger": {"enabled": True, "prof_all": True}},
            {"flops_profiler": {"enabled": True, "profile_step": 2}},
            {"checkpoint": 1, "activation_checkpointing": AT_BOUNDARIES},
        ]
    )
    def test_what_measures(self, keys: dict[str, Any]) -> None:
        # Kills: an option that times or debugs by waiting for the whole device.
        try:
            check_unwaited("1f1b", **keys)
        finally:
            dist.configure(enabled=False)

    def test_receives_that_are_posted_at_once_hang(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Kills: a check of budgets that sees no pipeline; receives posted whatever they depend on.
        budget = Budget(queues=2)
        run_two("interleaved", budget)
        monkeypatch.setattr(stage_channels._Lane, "issued", post_at_once)
        with pytest.raises(BudgetError, match="_post_next"):
            run_two("interleaved", budget)

    @each(stage=[0, 1], schedule=CHUNKS)
    def test_posts_what_depends_on_nothing_to_come(self, stage: int, schedule: str) -> None:
        # Kills: a receive that is posted before what its sender waits for is issued.
        assert train_waiting(schedule, stage) == pytest.approx(expected(), rel=1e-5)

    def test_chunks_share_communicators(self) -> None:
        # Kills: a communicator, and with it a stream, for each channel of each chunk.
        with simulated("interleaved") as (engine, _):
            channels = [channel for channel in engine.channels if channel.src != channel.dst]
            assert len(channels) == 6 and len({channel._group for channel in channels}) == 4

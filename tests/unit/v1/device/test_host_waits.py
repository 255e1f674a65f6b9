"""How often the host waits for the device in a training step: at most once, for whether it was
skipped, when the update is queued; never in a micro-batch.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.host_waits import HostWaits
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.pipe import PipelineModule
from deepspeed.verify import check_streams
from unit.common import DistributedTest
from unit.models import config_of, drawn, linears
from unit.one_process import mean_square, placed
from unit.v1.looping import each

WIDTH, ROWS, ACCUMULATION = 16, 4, 2
# Buckets are agreed on in the first backward, and buffers made in the first step.
WARM_UP = 2
STEPS = 4
BAD_STEP = 2


@dataclasses.dataclass(frozen=True)
class Case:
    """A configuration, and how often the host may wait per step; `ahead`: the update is queued
    then.
    """

    stage: int
    precision: str | None = None
    settings: tuple[tuple[str, Any], ...] = ()
    optimizer: str = "AdamW"
    waits: int = 1
    ahead: bool = True
    scheduled: bool = False
    clip: float = 0.05

    @property
    def skips(self) -> bool:
        return ("check_grad_overflow", False) not in self.settings

    def config(self) -> dict[str, Any]:
        more: dict[str, Any] = {"gradient_clipping": self.clip}
        if self.precision is not None:
            more[self.precision] = {"enabled": True, **dict(self.settings)}
        if self.scheduled:
            more["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}
        more["optimizer"] = {"type": self.optimizer, "params": {"lr": 1e-2}}
        zero = {"reduce_bucket_size": 2 * WIDTH * WIDTH}
        return config_of(self.stage, ROWS, ACCUMULATION, zero_optimization=zero, **more)

    def engine(self) -> Any:
        return deepspeed.initialize(model=linears(4, WIDTH, seed=5), config=self.config())[0]


UNCHECKED = (("check_grad_overflow", False),)
CHECKED = (("check_grad_overflow", True),)
CASES = [
    Case(0),
    Case(0, "fp16"),
    Case(0, "bf16", UNCHECKED, waits=0),
    Case(1, "bf16", CHECKED, scheduled=True),
    Case(1, "bf16", UNCHECKED, waits=0),
    Case(2, optimizer="Lion"),
    Case(2, "fp16", scheduled=True),
    Case(2, "fp16", (("loss_scale", 8.0),), clip=0.0),
    Case(2, "bf16", UNCHECKED, waits=0, scheduled=True),
    # Optimizers that cannot skip: the host decides, if there is anything to decide.
    Case(2, "bf16", UNCHECKED, "SGD", waits=0),
    Case(1, "bf16", CHECKED, "SGD", ahead=False),
]


def batch(number: int) -> torch.Tensor:
    return drawn(100 * number + dist.get_rank(), ROWS, WIDTH)


def batches(steps: int) -> Iterator[list[torch.Tensor]]:
    for step in range(steps):
        yield [batch(ACCUMULATION * step + micro) for micro in range(ACCUMULATION)]


def waited(waits: HostWaits) -> int:
    """Count waits so far. The throughput timer reads spans that are over by then."""
    return waits.total - sum(waits.inside("deepspeed/utils/timer.py").values())


class Queued:
    def __init__(self, optimizer: torch.optim.Optimizer, waits: HostWaits) -> None:
        self.before: list[int] = []
        optimizer.register_step_post_hook(lambda *_: self.before.append(waited(waits)))


def train(case: Case, bad_step: int | None = None) -> dict[str, Any]:
    """Numbers of a run on whatever device there is; on rank 1, one step's input is infinite."""
    engine = case.engine()
    seen: dict[str, Any] = {"norms": [], "scales": [], "applied": [], "rates": []}
    for step, micro_batches in enumerate(batches(STEPS)):
        for x in micro_batches:
            if step == bad_step and dist.get_rank() == 1:
                x = x * float("inf")
            engine.backward(mean_square(engine, placed(engine, x)))
            engine.step()
        seen["applied"].append(engine.was_step_applied())
        seen["norms"].append(float(engine.get_global_grad_norm()))
        seen["scales"].append(engine._sequence.loss_scale)
        seen["rates"].append(engine.get_lr()[0])
    seen["counters"] = (engine.global_steps, engine.skipped_steps)
    seen["weights"] = [param.detach().float().clone() for param in engine.module.parameters()]
    engine.destroy()
    return seen


class TestWaits(DistributedTest):
    world_size = 2

    @each(case=CASES)
    def test_of_a_step(self, case: Case) -> None:
        # Kills: reading the norm before the update, and reading what nobody asks for.
        with simulate():
            engine = case.engine()
            with get_accelerator().count_host_waits() as waits:
                queued = Queued(engine.basic_optimizer, waits)
                for step, micro_batches in enumerate(batches(STEPS)):
                    inputs = [placed(engine, x) for x in micro_batches]
                    before, copies = waited(waits), waits.pageable_copies.total()
                    for x in inputs:
                        engine.backward(mean_square(engine, x))
                        if step >= WARM_UP:
                            assert waited(waits) == before, waits.by_place
                        engine.step()
                    found = dict(waits.by_place)
                    if step >= WARM_UP:
                        assert waited(waits) - before == case.waits, found
                        ahead = queued.before[-1] == before
                        assert ahead is (case.ahead or not case.waits), found
                        assert waits.pageable_copies.total() == copies, waits.pageable_copies
            engine.destroy()

    @each(case=CASES)
    def test_training_is_that_of_a_host_that_knows(self, case: Case) -> None:
        # Kills: a factor, a skip or a scale that is another one on the device.
        bad_step = BAD_STEP if case.skips else None
        with simulate(), check_streams():
            there = train(case, bad_step)
        here = train(case, bad_step)
        assert there["applied"] == here["applied"]
        assert here["applied"] == [step != bad_step for step in range(STEPS)]
        assert there["counters"] == here["counters"] == (STEPS, int(bad_step is not None))
        assert there["scales"] == here["scales"] and there["rates"] == here["rates"]
        # Scaled gradients differ in their last bit, rounded weights therefore here and there.
        bound = {"bf16": 2e-2, "fp16": 2e-3}.get(case.precision or "", 1e-5)
        assert there["norms"] == pytest.approx(here["norms"], rel=bound, nan_ok=True)
        for a, b in zip(there["weights"], here["weights"], strict=True):
            assert (a - b).norm() <= bound * b.norm()

    def test_a_skip_is_counted_although_nobody_asked_meanwhile(self) -> None:
        # Kills: the norm of the next step, read for that of the one which was skipped.
        with simulate():
            engine = Case(1).engine()
            for step, micro_batches in enumerate(batches(STEPS)):
                for x in micro_batches:
                    bad = step == STEPS - 1 and dist.get_rank() == 0
                    engine.backward(mean_square(engine, x * float("inf") if bad else x))
                    engine.step()
            assert engine.skipped_steps == 1 and not engine.was_step_applied()
            engine.destroy()

    def test_a_state_that_is_saved_knows_the_last_step(self) -> None:
        # Kills: saving the counters and the scale from before a step that was skipped.
        config = Case(2).config()
        # Of several buckets ranks would exchange their shards, and wait for each other.
        config["zero_optimization"]["reduce_bucket_size"] = 1 << 20
        with simulate():
            engine = deepspeed.initialize(model=linears(4, WIDTH), config=config)[0]
            for x in next(batches(1)):
                engine.backward(mean_square(engine, x * float("inf")))
                engine.step()
            with get_accelerator().count_host_waits() as waits:
                assert engine.optimizer.state_dict()["overflow"]
                assert engine.skipped_steps == 1
                assert waited(waits) == 1, waits.by_place
            engine.destroy()
        assert engine.skipped_steps == 1 and not engine.was_step_applied()


class TestPipelineWaits(DistributedTest):
    world_size = 2

    @each(zero_stage=(0, 1), unchecked=(False, True))
    def test_of_a_batch(self, zero_stage: int, unchecked: bool) -> None:
        # Kills: a copy of the inputs, a loss or a norm that a stage waits for.
        case = Case(zero_stage, "bf16", UNCHECKED if unchecked else CHECKED)
        with simulate():
            layers = list(linears(4, WIDTH, seed=5))
            model = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss)
            engine = deepspeed.initialize(model=model, config=case.config())[0]
            data = iter([(batch(i).bfloat16(), batch(i).bfloat16()) for i in range(20)])
            with get_accelerator().count_host_waits() as waits:
                queued = Queued(engine.basic_optimizer, waits)
                for step in range(STEPS):
                    before = waited(waits)
                    engine.train_batch(data)
                    if step >= WARM_UP:
                        assert queued.before[-1] == before, waits.by_place
                        assert waited(waits) - before == (not unchecked), waits.by_place
            engine.destroy()

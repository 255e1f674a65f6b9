"""Activations whose number, shapes and dtypes change: right results, no hang, few descriptions."""

import random
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.messages.failure import PipelinePeerError
from unit.common import DistributedTest
from unit.models import config_of, sgd
from unit.one_process import OneProcess
from unit.v1.looping import each
from unit.v1.pipe.contract.runner import leave_together

WIDTH = 6
NUM_LAYERS = 9
GROWING = 3
STEPS = 8
EVALUATED_EVERY = 4
MICRO_BATCHES = 3
LEARNING_RATE = 0.05
SCHEDULES = ("1f1b", "interleaved", "zero_bubble")


class Carried(NamedTuple):
    """What travels, as a plain tuple."""

    hidden: torch.Tensor  # [batch, sequence, WIDTH]
    mask: torch.Tensor  # bool [batch, sequence]
    positions: torch.Tensor  # some integer dtype, [sequence]
    bias: torch.Tensor | None  # some floating dtype, [batch], without gradient
    nothing: torch.Tensor  # without elements
    factor: float | int


Micro = tuple[tuple[Any, ...], torch.Tensor]


class Mix(nn.Module):
    """Uses every side input, and changes those that can change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, mask, positions, bias, nothing, factor = inputs
        mixed = self.linear(hidden).tanh() * mask[..., None] + 0.01 * positions.float()[:, None]
        if bias is not None:
            mixed = mixed + bias.float()[:, None, None]
        mixed = mixed + nothing.sum().float() + 0.1 * factor * hidden
        return mixed, mask.roll(1, 0), positions + 1, bias, nothing, factor


class Grow(Mix):
    """One row more whenever it is told to."""

    grown = False

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, mask, positions, bias, nothing, factor = super().forward(inputs)
        if self.grown:
            grown = [torch.cat((tensor, tensor[:1])) for tensor in (hidden, mask, bias)]
            hidden, mask, bias = grown
        return hidden, mask, positions, bias, nothing, factor


def loss_of(outputs: tuple[Any, ...], labels: torch.Tensor) -> torch.Tensor:
    """Mean over rows."""
    return (outputs[0].mean(1) - labels).square().mean()


def make_layers(seed: int = 0) -> list[nn.Module]:
    """The same weights for the same seed; one of the first stage of two can change the shape."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return [Grow() if index == GROWING else Mix() for index in range(NUM_LAYERS)]


def micro_batch(seed: int, rows: int, columns: int, varied: bool) -> Micro:
    """Random values; with `varied`, random dtypes, None and empty shapes too."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    integers, floats, empty = torch.int64, torch.float32, (0,)
    if varied:
        integers = draw.choice((torch.int64, torch.int32, torch.int16, torch.uint8))
        kinds = (torch.float32, torch.float64, torch.bfloat16, torch.float16, None)
        floats, empty = draw.choice(kinds), draw.choice(((0,), (0, 3), (4, 0, 2)))
    carried = Carried(
        torch.randn(rows, columns, WIDTH, generator=generator),
        torch.rand(rows, columns, generator=generator) < 0.7,
        torch.arange(columns, dtype=integers),
        None if floats is None else torch.randn(rows, generator=generator).to(floats),
        torch.empty(empty, dtype=integers),
        draw.choice((0.5, 2)) if varied else 1,
    )
    return tuple(carried), torch.randn(rows, WIDTH, generator=generator)


def random_batch(step: int) -> list[Micro]:
    """Micro-batches of random sizes."""
    draw = random.Random(step)
    seeds = range(1_000 * step, 1_000 * step + MICRO_BATCHES)
    return [micro_batch(seed, draw.randint(1, 5), draw.randint(1, 9), True) for seed in seeds]


def fixed_batch(step: int, rows: int) -> list[Micro]:
    """Micro-batches of one size."""
    return [micro_batch(1_000 * step + m, rows, 4, False) for m in range(MICRO_BATCHES)]


def loss_of_micro(model: nn.Module, micro: Micro) -> torch.Tensor:
    """In one process."""
    inputs, labels = micro
    return loss_of(model(inputs), labels)


class Serial(OneProcess):
    """The same training on one process."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(*make_layers()), LEARNING_RATE, loss_of_micro)

    @torch.no_grad()
    def evaluate(self, batch: list[Micro]) -> float:
        """The mean loss."""
        return sum(self.loss(self.model, micro).item() for micro in batch) / len(batch)


def make_engine(stages: int, schedule: str, dynamic: bool) -> PipelineEngine:
    """A pipeline of all layers."""
    how: dict[str, Any] = {"partition_method": "uniform", "dynamic_shape": dynamic}
    how["num_model_chunks"] = 2 if schedule == "interleaved" else 1
    module = PipelineModule(make_layers(), num_stages=stages, loss_fn=loss_of, **how)
    keys = {"pipeline": {"schedule": schedule}, "optimizer": sgd(LEARNING_RATE)}
    config = config_of(0, 1, MICRO_BATCHES, **keys)
    engine: PipelineEngine = deepspeed.initialize(model=module, config=config)[0]
    return engine


def check_loss(found: torch.Tensor, wanted: float, what: str) -> None:
    """Compare sums of a handful of losses, in another order."""
    if not abs(found.item() - wanted) <= 2e-6 * abs(wanted):
        raise AssertionError(f"{what}: loss {found.item()!r} is not {wanted!r}")


def check_parameters(engine: PipelineEngine, serial: Serial) -> None:
    """Errors of rounding do not grow here: the layers contract."""
    wanted = serial.params()
    for name, param in engine.module.named_parameters():
        torch.testing.assert_close(param, wanted[name], rtol=1e-5, atol=1e-6)


def descriptions(engine: PipelineEngine, kind: str = "activations") -> set[tuple[int, int]]:
    """Messages and descriptions among them, of this rank's ends of activations or gradients."""
    ways = [f"{kind}_in", f"{kind}_out"]
    ends = [getattr(chunk, way) for chunk in engine.channels.chunks for way in ways]
    return {(end.messages, end.metadata_messages) for end in ends if end is not None}


class Shapes(DistributedTest):
    """The checks, for a number of stages."""

    exec_timeout = 90

    @each(schedule=SCHEDULES)
    def test_every_micro_batch_looks_different(self, schedule: str) -> None:
        # Kills: a shape, dtype, None or flag of another micro-batch; a wait for what is not sent; a
        # description too few or many.
        engine, serial = make_engine(self.world_size, schedule, dynamic=True), Serial()  # type: ignore[arg-type]  # one number
        for step in range(STEPS):
            batch = random_batch(step)
            wanted = serial.step(batch)
            check_loss(engine.train_batch(iter(batch)), wanted, f"step {step}")
            if step % EVALUATED_EVERY == EVALUATED_EVERY - 1:
                evaluated = random_batch(1_000 + step)
                found = engine.eval_batch(iter(evaluated))
                check_loss(found, serial.evaluate(evaluated), "eval")
        check_parameters(engine, serial)
        count = (STEPS + STEPS // EVALUATED_EVERY) * MICRO_BATCHES
        assert descriptions(engine) == {(count, count)}
        assert descriptions(engine, "gradients") == {(STEPS * MICRO_BATCHES, 0)}
        engine.destroy()

    @each(schedule=SCHEDULES)
    def test_one_shape_is_described_once(self, schedule: str) -> None:
        # Kills: a description per message or batch; shapes of one batch that outlive
        # `reset_activation_shape` or an evaluation.
        engine, serial = make_engine(self.world_size, schedule, dynamic=False), Serial()  # type: ignore[arg-type]  # one number
        wanted_descriptions = 0
        rows_and_resets = ((3, False), (3, False), (5, True), (5, False), (2, True))
        for step, (rows, resets) in enumerate(rows_and_resets):
            if resets:
                engine.reset_activation_shape()
            wanted_descriptions += resets or step == 0
            batch = fixed_batch(step, rows)
            wanted = serial.step(batch)
            check_loss(engine.train_batch(iter(batch)), wanted, f"step {step}")
        assert descriptions(engine) == {(5 * MICRO_BATCHES, wanted_descriptions)}
        evaluated = fixed_batch(90, 7)
        found = engine.eval_batch(iter(evaluated))
        check_loss(found, serial.evaluate(evaluated), "evaluation of another shape")
        batch = fixed_batch(6, 2)
        wanted = serial.step(batch)
        check_loss(engine.train_batch(iter(batch)), wanted, "after evaluation")
        check_parameters(engine, serial)
        assert descriptions(engine) == {(7 * MICRO_BATCHES, wanted_descriptions + 2)}
        engine.destroy()


class TestTwoStages(Shapes):
    world_size = 2


class TestFourStages(Shapes):
    world_size = 4

    @pytest.mark.parametrize("schedule", SCHEDULES)
    @pytest.mark.parametrize("where", ("data", "layer"))
    def test_another_shape_is_refused_everywhere(self, schedule: str, where: str) -> None:
        # Kills: a receiver that fills the old shape with a part of the message, or waits for the
        # rest; a rank that is not told.
        engine = make_engine(self.world_size, schedule, dynamic=False)  # type: ignore[arg-type]  # one number
        engine.train_batch(iter(fixed_batch(0, 3)))
        dist.barrier()  # a failure in the next batch would end ranks that are still in this one
        for layer in engine.module.modules():
            if isinstance(layer, Grow):
                layer.grown = where == "layer"
        batch = fixed_batch(1, 3)
        if where == "data":
            batch[1:] = fixed_batch(1, 4)[1:]
        dynamic = r"use PipelineModule\(dynamic_shape=True\)"
        reset = r"call engine\.reset_activation_shape\(\) on all ranks"
        with pytest.raises(RuntimeError, match=f"(?s){dynamic}.*{reset}") as refused:
            engine.train_batch(iter(batch))
        with pytest.raises(PipelinePeerError):
            engine.train_batch(iter(fixed_batch(2, 3)))  # an engine that has failed says so again
        assert type(refused.value).__name__ in ("PipelineShapeError", "PipelinePeerError")
        leave_together()

"""What an observer of gradients hears, in what order and on which ranks; what nobody hears."""

import inspect
import itertools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from unit.common import DistributedTest
from unit.models import config_of, linears, sgd
from unit.v1.looping import each

import deepspeed
from deepspeed import comm as dist
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.gradients import observer as protocol
from deepspeed.runtime.gradients.observer import UNOBSERVED, GradientObserver
from deepspeed.utils import safe_set_full_grad

EVENTS = [name for name in vars(GradientObserver) if not name.startswith("_")]
WIDTH = 6
FORMS: dict[str, dict[str, Any]] = {f"stage {stage}": {"stage": stage} for stage in range(3)}
FORMS["fp16"] = {"stage": 0, "fp16": {"enabled": True, "loss_scale": 4}}
FORMS["BF16_Optimizer"] = {
    "stage": 1,
    "bf16": {"enabled": True, "immediate_grad_update": True},
    "data_types": {"grad_accum_dtype": "fp32"},
}
# Of a step of two micro-batches.
STEPS = {
    "stage 0": "resumed opened closed resumed opened settled closed cleared",
    "stage 1": "opened closed opened sent closed settled cleared",
    "stage 2": "opened sent closed opened sent closed settled cleared",
    "fp16": "opened closed opened closed settled cleared",
    "BF16_Optimizer": "opened closed opened closed settled cleared",
}


class Recorder(GradientObserver):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.arguments: list[tuple[Any, ...]] = []
        for event in EVENTS:
            setattr(self, event, self._writer(event))

    def _writer(self, event: str) -> Callable[..., None]:
        def write(*arguments: Any) -> None:
            self.calls.append(event)
            self.arguments.append(arguments)

        return write

    def take(self) -> str:
        """What was written, which is forgotten."""
        text = " ".join(self.calls)
        self.calls.clear()
        self.arguments.clear()
        return text


def start(form: str, model: Any = None) -> Any:
    config = config_of(**FORMS[form], rows=2, accumulation=2, optimizer=sgd(0.05))
    model = model or linears(2, WIDTH, 1)
    return deepspeed.initialize(model=model, config=config)[0]


def loss_of(engine: Any) -> torch.Tensor:
    dtype = next(engine.module.parameters()).dtype
    return engine(torch.ones(2, WIDTH, dtype=dtype)).float().square().mean()


def step(engine: Any) -> None:
    for _ in range(2):
        engine.backward(loss_of(engine))
        engine.step()


def observed(form: str, model: Any = None) -> tuple[Any, Recorder]:
    engine, recorder = start(form, model), Recorder()
    engine._sequence.observe(recorder)
    return engine, recorder


def test_the_protocol_tells_when_each_event_comes() -> None:
    # Kills: an event that was added and whose place in the order nobody wrote down.
    told = set(re.findall(r"`(\w+)`", inspect.getdoc(protocol) or ""))
    assert len(EVENTS) > 5 and set(EVENTS) <= told


class TestOrder(DistributedTest):
    world_size = 2

    @each(form=list(FORMS))
    def test_of_a_step(self, form: str) -> None:
        # Kills: an event that is left out or comes at another place, in any optimizer.
        engine, recorder = observed(form)
        step(engine)
        assert recorder.take() == STEPS[form]
        loss = loss_of(engine)
        engine.scale(loss).backward()
        expected = [loss, 2.0]
        opened = recorder.arguments[recorder.calls.index("opened")]
        assert all(a is b or a == b for a, b in zip(opened, expected, strict=True))
        engine.zero_grad()
        assert recorder.take().endswith("closed cleared")
        engine.destroy()
        assert recorder.take() == "detached"

    @each(form=list(FORMS))
    def test_does_not_grow_with_parameters(self, form: str) -> None:
        # Kills: a call per parameter, which every step would pay though nobody listens.
        counts = []
        for layers in (2, 20):
            engine, recorder = observed(form, linears(layers, WIDTH, 1))
            step(engine)
            counts.append(len(recorder.calls))
            engine.destroy()
        assert counts[0] == counts[1]

    def test_of_a_backward_that_nobody_announced(self) -> None:
        engine, recorder = observed("stage 0")
        loss_of(engine).backward()
        assert recorder.take() == "resumed opened closed"
        engine.scale(loss_of(engine))
        assert recorder.take() == "opened"

    def test_of_a_gradient_that_the_client_sets(self) -> None:
        engine, recorder = observed("stage 1")
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(loss_of(engine))
        param = next(engine.module.parameters())
        safe_set_full_grad(param, torch.ones_like(param))
        assert recorder.calls[-1] == "replaced" and recorder.arguments[-1][0] is param
        engine.step()
        assert recorder.take() == "opened sent closed replaced settled cleared"

    def test_of_a_pipeline(self) -> None:
        # Kills: a loss that is told on a stage that does not have it.
        layers, how = list(linears(2, WIDTH)), {"partition_method": "uniform"}
        module = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss, **how)
        engine, recorder = observed("stage 1", module)
        engine.train_batch(itertools.repeat(torch.ones(2, 2, WIDTH).unbind(0)))
        a_pass = "pass_opened loss_known closed" if dist.get_rank() == 1 else "pass_opened closed"
        assert recorder.take() == f"{a_pass} {a_pass} sent closed settled cleared"


class TestNobody(DistributedTest):
    world_size = 1

    def test_is_the_default_and_comes_back(self) -> None:
        # Kills: an observer that the sequence keeps after another one took its place.
        engine, recorder = observed("stage 1")
        engine._sequence.observe(UNOBSERVED)
        step(engine)
        assert recorder.take() == "detached"
        assert start("stage 1")._sequence.observer is UNOBSERVED

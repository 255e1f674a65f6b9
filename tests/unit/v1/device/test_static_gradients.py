"""Gradients in memory that the next backward writes again, as CUDA graphs have them."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.sim.static_memory import StaticGradients
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.runtime.streams import SideStream
from deepspeed.verify import check_streams
from unit.common import DistributedTest
from unit.models import config_of, drawn, seeded
from unit.one_process import OneProcess, mean_square
from unit.v1.looping import each

WIDTH = 8
LAYERS = 4
ROWS = 3
LR = 0.1
STEPS = 2


def make_model(static: bool) -> nn.Sequential:
    layers = seeded(lambda: [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)], seed=1)
    return nn.Sequential(*(StaticGradients(layer) if static else layer for layer in layers))


def batch(number: int, rank: int) -> torch.Tensor:
    return drawn(10 * number + rank, ROWS, WIDTH)


def train(stage: int, micro_batches: int, overlap: bool, **more: Any) -> list[torch.Tensor]:
    sgd = {"type": "SGD", "params": {"lr": LR}}
    zero = {"overlap_comm": overlap, "reduce_bucket_size": 2 * WIDTH * (WIDTH + 1)}
    more = {"optimizer": sgd, "zero_optimization": zero, **more}
    config = config_of(stage, ROWS, micro_batches, **more)
    engine = deepspeed.initialize(model=make_model(static=True), config=config)[0]
    for number in range(STEPS * micro_batches):
        engine.backward(mean_square(engine, batch(number, dist.get_rank()).to(engine.model_dtype)))
        engine.step()
    get_accelerator().synchronize()
    found = [param.detach().clone() for param in engine.module.parameters()]
    get_accelerator().synchronize()
    engine.destroy()
    return found


def reference(micro_batches: int) -> list[torch.Tensor]:
    one = OneProcess(make_model(static=False), LR, mean_square)
    return list(one.train(batch, STEPS, micro_batches).values())


def deviates(found: list[torch.Tensor], micro_batches: int, within: float = 1e-5) -> bool:
    pairs = zip(found, reference(micro_batches), strict=True)
    return not all(torch.allclose(one, other, rtol=0.0, atol=within) for one, other in pairs)


CASES = [(1, 1, False), (1, 1, True), (2, 3, False), (2, 3, True)]


def runs() -> Iterator[tuple[int, list[torch.Tensor]]]:
    for stage, micro_batches, overlap in CASES:
        with simulate(), check_streams():
            yield micro_batches, train(stage, micro_batches, overlap)


class TestStaticGradients(DistributedTest):
    world_size = 2
    backend = "gloo"

    def test_equals_one_process(self) -> None:
        # Kills: a producer that writes its gradients again while they are copied.
        for micro_batches, found in runs():
            assert not deviates(found, micro_batches)

    def test_summed_in_an_accumulator(self) -> None:
        # Kills: an accumulator that takes a micro-batch in after the next one was written.
        fp16 = {"enabled": True, "initial_scale_power": 4}
        with simulate(), check_streams():
            found = train(1, 3, True, fp16=fp16, data_types={"grad_accum_dtype": "fp32"})
        assert not deviates([param.float() for param in found], 3, within=2e-3)

    @each(overlap=(False, True))
    def test_summed_where_they_lie(self, overlap: bool) -> None:
        # Kills: sums that the next micro-batch overwrites, trained on without a word.
        with simulate():
            with pytest.raises(RuntimeError, match="stage: 1 sums the micro-batches of .*stage 2"):
                train(1, 3, overlap)
            get_accelerator().synchronize()

    def test_the_guard_goes(self) -> None:
        # Kills: a hook on every parameter for as long as training lasts.
        with simulate():
            config = {
                "train_micro_batch_size_per_gpu": ROWS,
                "gradient_accumulation_steps": 2,
                "optimizer": {"type": "SGD", "params": {"lr": LR}},
                "zero_optimization": {"stage": 1},
            }
            engine = deepspeed.initialize(model=make_model(static=False), config=config)[0]
            assert all(param._backward_hooks for param in engine.module.parameters())
            for micro in range(2):
                engine.backward(engine(batch(micro, dist.get_rank())).square().mean())
                engine.step()
            assert not any(param._backward_hooks for param in engine.module.parameters())
            engine.destroy()

    def test_without_the_wait(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Kills: a test, or a checker, to which static memory is like any other.
        monkeypatch.setattr(SideStream, "release", lambda self, producers: None)
        with simulate(), check_streams(raises=False) as checker:
            found = train(2, 3, True)
        assert deviates(found, 3)
        assert "race" in checker.report() and "_foreach_copy_" in checker.report()


def test_autograd_takes_the_memory_over() -> None:
    # Kills: a model of static memory that is copied on its way to `param.grad`.
    layer = StaticGradients(nn.Linear(WIDTH, WIDTH))
    for _ in range(2):
        layer(batch(0, 0)).sum().backward()
        for param, memory in zip(layer.parameters(), layer.memory, strict=True):
            assert param.grad is not None and param.grad.data_ptr() == memory.data_ptr()
            param.grad = None


@pytest.mark.parametrize("static", [False, True])
def test_gradients_are_the_modules(static: bool) -> None:
    model, plain = make_model(static), make_model(static=False)
    for net in (model, plain):
        net(batch(0, 0)).square().mean().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.equal(one.grad, other.grad)

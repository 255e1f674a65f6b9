"""Fix 2: communication waits for the stream that is current inside a gradient hook, not for one
known at construction.

See docs/fixes/fix2.md. Uses only names that upstream DeepSpeed has too, so it runs unmodified
against an installed one.
"""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
import deepspeed.comm as dist
from unit.common import DistributedTest
from unit.v1.deferred_streams import DeferredAccelerator, DeferredStream, backward_on_streams

WIDTH = 8
MICRO_BATCH = 3
STEPS = 2
LR = 0.1
SMALL_BUCKET = 80  # one layer; hooks matter only where there is more than one bucket


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def batches(accumulation: int) -> torch.Tensor:
    """Shape [steps, accumulation, world, micro-batch, width]: the same numbers on every rank."""
    torch.manual_seed(13)
    return torch.randn(STEPS, accumulation, dist.get_world_size(), MICRO_BATCH, WIDTH)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).float().square().mean()


def start(configuration: dict[str, Any], model: nn.Module) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=configuration)
    return engine


def start_under_side_stream(
    sim: DeferredAccelerator, configuration: dict[str, Any], model: nn.Module
) -> Any:
    """The engine is built while a side stream is current, which is then done with."""
    construction = sim.make_stream(name="construction")
    with sim.stream(construction):
        engine = start(configuration, model)
    construction.synchronize()
    return engine


def train(
    sim: DeferredAccelerator, engine: Any, data: torch.Tensor, hook_stream: DeferredStream
) -> None:
    for step in data:
        for micro in step.to(next(engine.module.parameters()).dtype):
            loss = loss_of(engine, micro[dist.get_rank()])
            with backward_on_streams(sim, loss, lambda param: hook_stream):
                engine.backward(loss)
            engine.step()


def zero_config(stage: int, overlap: bool, accumulation: int = 1) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": accumulation,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": overlap,
            "reduce_bucket_size": SMALL_BUCKET,
        },
    }


def bf16_config(immediate: bool, accumulation: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": accumulation,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True, "immediate_grad_update": immediate},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": 1, "reduce_bucket_size": SMALL_BUCKET},
    }


class TestZero(DistributedTest):
    """Stages 1 and 2."""

    world_size = 2

    @pytest.mark.parametrize("overlap", [False, True])
    @pytest.mark.parametrize("stage", [1, 2])
    def test_hooks_on_a_stream_of_their_own(
        self, stage: int, overlap: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Construction, hooks and the caller are on three streams; as one process does."""
        sim = DeferredAccelerator()
        with sim.deferring(monkeypatch):
            model = make_model()
            reference = copy.deepcopy(model)
            engine = start_under_side_stream(sim, zero_config(stage, overlap), model)
            data = batches(accumulation=1)
            train(sim, engine, data, sim.make_stream(name="hooks"))
        optimizer = torch.optim.SGD(reference.parameters(), lr=LR)
        for step in data:
            optimizer.zero_grad()
            loss_of(reference, step.reshape(-1, WIDTH)).backward()
            optimizer.step()
        for param, expected in zip(engine.module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(param.detach(), expected.detach(), rtol=1e-5, atol=1e-6)

    def test_wait_is_on_the_hook_stream(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The stream that reduces has waited, itself, for the stream of the hooks."""
        sim = DeferredAccelerator()
        with sim.deferring(monkeypatch):
            engine = start_under_side_stream(sim, zero_config(2, overlap=True), make_model())
            hooks = sim.make_stream(name="hooks")
            sim.waits.clear()
            sim.collectives.clear()
            train(sim, engine, batches(accumulation=1)[:1], hooks)
        reducing = {stream for _, stream, _ in sim.collectives} - {sim.default}
        assert reducing, "no collective was issued on a reduction stream"
        for stream in reducing:
            assert (stream, hooks) in sim.waits, f"{stream} never waited for {hooks}"

    def test_hook_stream_changes_between_backwards(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A stream remembered from the first backward would be the wrong one in the second."""
        sim = DeferredAccelerator()
        with sim.deferring(monkeypatch):
            model = make_model()
            reference = copy.deepcopy(model)
            engine = start(zero_config(2, overlap=True), model)
            data = batches(accumulation=1)
            for index in range(STEPS):
                train(sim, engine, data[index : index + 1], sim.make_stream(name="hooks"))
        optimizer = torch.optim.SGD(reference.parameters(), lr=LR)
        for step in data:
            optimizer.zero_grad()
            loss_of(reference, step.reshape(-1, WIDTH)).backward()
            optimizer.step()
        for param, expected in zip(engine.module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(param.detach(), expected.detach(), rtol=1e-5, atol=1e-6)


class TestBF16Optimizer(DistributedTest):
    """fp32 accumulation, from hooks and after backward."""

    world_size = 2

    @pytest.mark.parametrize("accumulation", [1, 2])
    @pytest.mark.parametrize("immediate", [False, True])
    def test_same_as_on_the_default_stream(
        self, immediate: bool, accumulation: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Bit by bit the parameters that training on the default stream alone gives."""
        sim = DeferredAccelerator()
        results = []
        with sim.deferring(monkeypatch):
            for side in (False, True):
                hooks = sim.make_stream(name="hooks") if side else sim.default
                engine = start_under_side_stream(
                    sim, bf16_config(immediate, accumulation), make_model()
                )
                train(sim, engine, batches(accumulation), hooks)
                results.append([param.detach().clone() for param in engine.module.parameters()])
        for on_default, on_hooks in zip(*results, strict=True):
            assert on_default.isfinite().all()
            torch.testing.assert_close(on_hooks, on_default, rtol=0, atol=0)

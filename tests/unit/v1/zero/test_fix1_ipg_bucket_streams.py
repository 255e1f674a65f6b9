"""Fix 1: a bucket is filled from the streams of all its gradients, and its reduction waits for
every one of them.

See docs/fixes/fix1.md. Uses only names that upstream DeepSpeed has too, so it runs unmodified
against an installed one.
"""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
import deepspeed.comm as dist
from deepspeed.runtime.zero.stage_1_and_2 import IPGBucket
from unit.common import DistributedTest
from unit.v1.deferred_streams import DeferredAccelerator, DeferredStream, backward_on_streams

WIDTH = 8
LAYERS = 4
MICRO_BATCH = 3
STEPS = 3
LR = 0.1
# One layer is 72 elements. Buckets hold parameters of one, two and all layers.
ONE_LAYER, TWO_LAYERS, EVERYTHING = 72, 150, 10_000


def config(
    stage: int, overlap: bool, bucket: int, accumulation: int = 1, **zero: Any
) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": accumulation,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": overlap,
            "reduce_bucket_size": bucket,
            "contiguous_gradients": True,
            **zero,
        },
    }


def make_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def batches(accumulation: int) -> torch.Tensor:
    """Shape [steps, accumulation, world, micro-batch, width]: the same numbers on every rank."""
    torch.manual_seed(11)
    return torch.randn(STEPS, accumulation, dist.get_world_size(), MICRO_BATCH, WIDTH)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def single_process(model: nn.Module, data: torch.Tensor) -> list[torch.Tensor]:
    """Parameters that one process reaches with all ranks' batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in data:
        optimizer.zero_grad()
        loss_of(model, step.reshape(-1, WIDTH)).backward()
        optimizer.step()
    return [param.detach() for param in model.parameters()]


def train(
    sim: DeferredAccelerator, engine: Any, data: torch.Tensor, streams: list[DeferredStream]
) -> None:
    """Train with the accumulation node of parameter `i` on stream `i % len(streams)`."""
    order = {param: index for index, param in enumerate(engine.module.parameters())}
    for step in data:
        for micro in step:
            loss = loss_of(engine, micro[dist.get_rank()])
            with backward_on_streams(sim, loss, lambda param: streams[order[param] % len(streams)]):
                engine.backward(loss)
            engine.step()


def assert_close(engine: Any, expected: list[torch.Tensor]) -> None:
    for (name, param), value in zip(engine.module.named_parameters(), expected, strict=True):
        torch.testing.assert_close(
            param.detach(),
            value,
            rtol=1e-5,
            atol=1e-6,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def start(sim: DeferredAccelerator, configuration: dict[str, Any]) -> tuple[Any, nn.Module]:
    """The engine, and a copy of its model to train in one process."""
    model = make_model()
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=configuration)
    return engine, reference


class TestProducerStreams(DistributedTest):
    """Gradients of one bucket are produced on several streams."""

    world_size = 2

    @pytest.mark.parametrize("bucket", [ONE_LAYER, TWO_LAYERS, EVERYTHING])
    @pytest.mark.parametrize("stage", [1, 2])
    def test_training_equals_one_process(
        self, stage: int, bucket: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A gradient that the reduction does not wait for is NaN when it is read."""
        sim = DeferredAccelerator()
        with sim.deferring(monkeypatch):
            engine, reference = start(sim, config(stage, overlap=True, bucket=bucket))
            data = batches(accumulation=1)
            train(sim, engine, data, [sim.make_stream(name="producer") for _ in range(3)])
        assert_close(engine, single_process(reference, data))

    def test_accumulated_micro_batches(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A bucket is sent several times per step, and each time waits anew."""
        sim = DeferredAccelerator()
        with sim.deferring(monkeypatch):
            engine, reference = start(
                sim, config(2, overlap=True, bucket=ONE_LAYER, accumulation=3)
            )
            data = batches(accumulation=3)
            train(sim, engine, data, [sim.make_stream(name="producer") for _ in range(2)])
        assert_close(engine, single_process(reference, data))

    def test_waits_are_recorded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The stream that reduces has waited, itself, for each stream that produced."""
        sim = DeferredAccelerator()
        with sim.deferring(monkeypatch):
            engine, _ = start(sim, config(2, overlap=True, bucket=ONE_LAYER))
            producers = [sim.make_stream(name="producer") for _ in range(2)]
            sim.waits.clear()
            sim.collectives.clear()
            train(sim, engine, batches(accumulation=1)[:1], producers)
        reducing = {stream for _, stream, _ in sim.collectives if stream is not sim.default}
        assert len(reducing) == 1, f"collectives were issued on {reducing}"
        (reduction_stream,) = reducing
        waited_for = {stream for waiter, stream in sim.waits if waiter is reduction_stream}
        assert set(producers) <= waited_for, f"{reduction_stream} waited for {waited_for} only"

    @pytest.mark.parametrize("stage", [1, 2])
    def test_without_overlap(self, stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """The bucket is read on one of the producers' streams: the same hazard."""
        sim = DeferredAccelerator()
        with sim.deferring(monkeypatch):
            engine, reference = start(sim, config(stage, overlap=False, bucket=TWO_LAYERS))
            data = batches(accumulation=1)
            train(sim, engine, data, [sim.make_stream(name="producer") for _ in range(3)])
        assert_close(engine, single_process(reference, data))


class TestFallback(DistributedTest):
    """No hook recorded a stream: the one that is current counts."""

    world_size = 2

    def test_everything_on_one_side_stream(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """One bucket for all parameters, sent after backward, which ran on a side stream."""
        sim = DeferredAccelerator()
        with sim.deferring(monkeypatch):
            engine, reference = start(sim, config(1, overlap=True, bucket=EVERYTHING))
            data = batches(accumulation=1)
            side = sim.make_stream(name="caller")
            with sim.stream(side):
                train(sim, engine, data, [side])
            side.synchronize()
        assert_close(engine, single_process(reference, data))

    def test_parameter_larger_than_the_bucket(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is reduced without being copied together with others."""
        sim = DeferredAccelerator()
        with sim.deferring(monkeypatch):
            engine, reference = start(sim, config(2, overlap=True, bucket=WIDTH))
            data = batches(accumulation=1)
            train(sim, engine, data, [sim.make_stream(name="producer") for _ in range(3)])
        assert_close(engine, single_process(reference, data))


def test_clear_forgets_the_streams() -> None:
    """A stale stream would order the next reduction after unrelated work, or live on."""
    bucket = IPGBucket()
    assert bucket.copy_streams == set()
    bucket.copy_streams.add("a stream")
    bucket.elements = 3
    bucket.clear()
    assert bucket.copy_streams == set()
    assert bucket.elements == 0


def test_buckets_do_not_share_their_streams() -> None:
    """Each bucket has a set of its own."""
    first, second = IPGBucket(), IPGBucket()
    first.copy_streams.add("a stream")
    assert second.copy_streams == set()

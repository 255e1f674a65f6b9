"""Fix 1: a bucket is filled from the streams of all its gradients, and its reduction waits for
every one of them.

See docs/fixes/fix1.md. Uses only names that upstream DeepSpeed has too, so it runs unmodified
against an installed one.
"""

from contextlib import nullcontext
from typing import Any

import pytest

from deepspeed.runtime.zero.stage_1_and_2 import IPGBucket
from unit.common import DistributedTest
from unit.v1.deferred_streams import DeferredAccelerator, DeferredStream
from unit.v1.looping import each
from unit.v1.zero.on_streams import WIDTH, batches, check, config_of, start, train

# One layer is 72 elements. Buckets hold parameters of one, two and all layers.
ONE_LAYER, TWO_LAYERS, EVERYTHING = 72, 150, 10_000


def config(stage: int, bucket: int, overlap: bool = True, accumulation: int = 1) -> dict[str, Any]:
    zero = {"overlap_comm": overlap, "contiguous_gradients": True}
    return config_of(stage, bucket, accumulation, zero_optimization=zero)


def producers(sim: DeferredAccelerator, count: int) -> list[DeferredStream]:
    return [sim.make_stream(name="producer") for _ in range(count)]


class TestProducerStreams(DistributedTest):
    """Gradients of one bucket are produced on several streams."""

    world_size = 2

    @each(
        config=[
            *(config(stage, bucket) for stage in (1, 2) for bucket in (ONE_LAYER, TWO_LAYERS)),
            *(config(stage, EVERYTHING) for stage in (1, 2)),
            # A bucket is sent several times per step, and each time waits anew.
            config(2, ONE_LAYER, accumulation=3),
            # The bucket is read on one of the producers' streams: the same hazard.
            *(config(stage, TWO_LAYERS, overlap=False) for stage in (1, 2)),
        ]
    )
    def test_training_equals_one_process(
        self, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A gradient that the reduction does not wait for is NaN when it is read."""
        sim = DeferredAccelerator()
        accumulation = config["gradient_accumulation_steps"]
        with sim.deferring(monkeypatch):
            engine, data = start(config), batches(3, accumulation)
            train(sim, engine, data, producers(sim, 3 if accumulation == 1 else 2))
        check(engine, data)

    def test_waits_are_recorded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The stream that reduces has waited, itself, for each stream that produced."""
        sim = DeferredAccelerator()
        with sim.deferring(monkeypatch):
            engine = start(config(2, ONE_LAYER))
            streams = producers(sim, 2)
            sim.waits.clear()
            sim.collectives.clear()
            train(sim, engine, batches(1), streams)
        reducing = {stream for _, stream, _ in sim.collectives if stream is not sim.default}
        assert len(reducing) == 1, f"collectives were issued on {reducing}"
        (reduction_stream,) = reducing
        waited_for = {stream for waiter, stream in sim.waits if waiter is reduction_stream}
        assert set(streams) <= waited_for, waited_for


class TestFallback(DistributedTest):
    """No hook recorded a stream: the one that is current counts."""

    world_size = 2

    # One bucket for all parameters, sent after backward, which ran on a side stream; parameters
    # that are larger than the bucket, reduced without being copied together with others.
    @each(is_larger=(False, True))
    def test_training_equals_one_process(
        self, is_larger: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sim = DeferredAccelerator()
        with sim.deferring(monkeypatch):
            engine = start(config(2, WIDTH) if is_larger else config(1, EVERYTHING))
            data, side = batches(3), sim.make_stream(name="caller")
            streams = producers(sim, 3) if is_larger else [side]
            with nullcontext() if is_larger else sim.stream(side):
                train(sim, engine, data, streams)
            side.synchronize()
        check(engine, data)


def test_clear_forgets_the_streams() -> None:
    """A stale stream would order the next reduction after unrelated work, or live on."""
    bucket, other = IPGBucket(), IPGBucket()
    assert bucket.copy_streams == set()
    bucket.copy_streams.add("a stream")
    assert other.copy_streams == set()  # each bucket has a set of its own
    bucket.elements = 3
    bucket.clear()
    assert bucket.copy_streams == set()
    assert bucket.elements == 0

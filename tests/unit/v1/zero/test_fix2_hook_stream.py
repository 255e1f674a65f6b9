"""Fix 2: communication waits for the stream that is current inside a gradient hook, not for one
known at construction.

See docs/fixes/fix2.md. Uses only names that upstream DeepSpeed has too, so it runs unmodified
against an installed one.
"""

from typing import Any

import pytest
import torch

from unit.common import DistributedTest
from unit.v1.deferred_streams import DeferredAccelerator
from unit.v1.looping import each
from unit.v1.zero.on_streams import batches, check, config_of, start, train

STEPS = 2
SMALL_BUCKET = 80  # one layer; hooks matter only where there is more than one bucket


def start_under_side_stream(sim: DeferredAccelerator, configuration: dict[str, Any]) -> Any:
    """The engine is built while a side stream is current, which is then done with."""
    construction = sim.make_stream(name="construction")
    with sim.stream(construction):
        engine = start(configuration)
    construction.synchronize()
    return engine


def zero_config(stage: int, overlap: bool) -> dict[str, Any]:
    return config_of(stage, SMALL_BUCKET, zero_optimization={"overlap_comm": overlap})


class TestZero(DistributedTest):
    world_size = 2

    @each(stage=(1, 2), overlap=(False, True))
    def test_hooks_on_a_stream_of_their_own(
        self, stage: int, overlap: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Construction, hooks and the caller are on three streams; as one process does."""
        sim = DeferredAccelerator()
        with sim.deferring(monkeypatch):
            engine, data = start_under_side_stream(sim, zero_config(stage, overlap)), batches(STEPS)
            train(sim, engine, data, [sim.make_stream(name="hooks")])
        check(engine, data)

    def test_wait_is_on_the_hook_stream_of_each_backward(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The stream that reduces has waited, itself, for the stream of the hooks."""
        sim = DeferredAccelerator()
        with sim.deferring(monkeypatch):
            engine = start_under_side_stream(sim, zero_config(2, overlap=True))
            hooks = sim.make_stream(name="hooks")
            sim.waits.clear()
            sim.collectives.clear()
            train(sim, engine, batches(1), [hooks])
        reducing = {stream for _, stream, _ in sim.collectives} - {sim.default}
        assert reducing, "no collective was issued on a reduction stream"
        for stream in reducing:
            assert (stream, hooks) in sim.waits, f"{stream} never waited for {hooks}"
        # A stream remembered from the first backward would be the wrong one in the second.
        sim = DeferredAccelerator()
        with sim.deferring(monkeypatch):
            engine, data = start(zero_config(2, overlap=True)), batches(STEPS)
            for step in data.split(1):
                train(sim, engine, step, [sim.make_stream(name="hooks")])
        check(engine, data)


class TestBF16Optimizer(DistributedTest):
    world_size = 2

    @each(immediate=(False, True), accumulation=(1, 2))
    def test_same_as_on_the_default_stream(
        self, immediate: bool, accumulation: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Bit by bit the parameters that training on the default stream alone gives."""
        blocks = {
            "bf16": {"enabled": True, "immediate_grad_update": immediate},
            "data_types": {"grad_accum_dtype": "fp32"},
        }
        sim = DeferredAccelerator()
        results = []
        with sim.deferring(monkeypatch):
            for side in (False, True):
                hooks = sim.make_stream(name="hooks") if side else sim.default
                config = config_of(1, SMALL_BUCKET, accumulation, **blocks)
                engine = start_under_side_stream(sim, config)
                train(sim, engine, batches(STEPS, accumulation), [hooks])
                results.append([param.detach().clone() for param in engine.module.parameters()])
        for on_default, on_hooks in zip(*results, strict=True):
            assert on_default.isfinite().all()
            torch.testing.assert_close(on_hooks, on_default, rtol=0, atol=0)

"""The peaks that docs/devices.md gives by formula, against those of simulated runs."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.runtime.zero.memory_estimators import plan_model_states
from deepspeed.runtime.zero.replicated_estimates import plan_whole_gradients
from unit.common import DistributedTest
from unit.v1.looping import each
from unit.wide_model import Wide

LAYERS = 24
WIDTH = 256
NUMELS = [WIDTH * WIDTH] * LAYERS
TOLERANCE = 0.02
MOMENTS = {"AdamW": 2, "SGD": 0}
# A few layers share a bucket, or all do.
BUCKETS = (3 * WIDTH * WIDTH, 10**9)


def peak_of(precision: str, optimizer: str, accumulate_in: str | None = None, **zero: Any) -> int:
    """Most bytes that three steps of two micro-batches hold on the device."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": optimizer, "params": {"lr": 1e-6}},
        "zero_optimization": zero,
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    if precision == "fp16":
        config[precision]["loss_scale"] = 1
    if accumulate_in is not None:
        config["data_types"] = {"grad_accum_dtype": accumulate_in}
    gc.collect()
    with simulate() as device:
        before = device.memory_allocated()
        engine, *_ = deepspeed.initialize(model=Wide(LAYERS, WIDTH), config=config)
        device.reset_peak_memory_stats()
        for _ in range(6):
            engine.backward(engine(torch.ones(1, WIDTH, dtype=engine.model_dtype)))
            engine.step()
        device.synchronize()
        peak: int = device.max_memory_allocated() - before
        engine.destroy()
    return peak


class TestPeaks(DistributedTest):
    world_size = 1

    @each(precision=("fp32", "bf16", "fp16"), optimizer=("AdamW", "SGD"))
    def test_stage_0(self, precision: str, optimizer: str) -> None:
        # Kills: gradients beside the buffer, twice the memory for two dtypes, masters of fp32.
        plan = plan_whole_gradients(
            NUMELS, model_bytes=4 if precision == "fp32" else 2, moments=MOMENTS[optimizer]
        )
        assert peak_of(precision, optimizer) == pytest.approx(plan.device, rel=TOLERANCE)

    @each(precision=("bf16", "fp16"), optimizer=("AdamW", "SGD"))
    def test_fp32_accumulation(self, precision: str, optimizer: str) -> None:
        # Kills: a copy of the accumulator for the step.
        plan = plan_whole_gradients(
            NUMELS, model_bytes=2, moments=MOMENTS[optimizer], fp32_accumulation=True
        )
        peak = peak_of(precision, optimizer, accumulate_in="fp32")
        assert peak == pytest.approx(plan.device, rel=TOLERANCE)

    @each(stage=(1, 2), precision=("fp32", "bf16"), overlap=(False, True), bucket=BUCKETS)
    def test_zero(self, stage: int, precision: str, overlap: bool, bucket: int) -> None:
        # Kills: gradients that outlive their bucket, a buffer per bucket.
        plan = plan_model_states(
            NUMELS,
            1,
            stage=stage,
            model_bytes=4 if precision == "fp32" else 2,
            reduce_bucket_size=bucket,
            overlap_comm=overlap,
            gradient_accumulation_steps=2,
        )
        # In a bf16 model stage 1 would otherwise sum micro-batches in fp32.
        accumulate_in = precision if stage == 1 else None
        peak = peak_of(
            precision,
            "AdamW",
            accumulate_in,
            stage=stage,
            overlap_comm=overlap,
            reduce_bucket_size=bucket,
        )
        assert peak == pytest.approx(plan.device, rel=TOLERANCE)

"""The peaks that docs/devices.md gives by formula, against those of simulated runs."""

import gc
from typing import Any, NamedTuple

import pytest
import torch

import deepspeed
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.runtime.zero.estimates.replicated import plan_whole_gradients
from deepspeed.runtime.zero.estimates.stages_1_and_2 import plan_model_states
from unit.common import DistributedTest
from unit.simple_model import Wide
from unit.v1.looping import each

LAYERS = 12
WIDTH = 256
NUMELS = [WIDTH * WIDTH] * LAYERS
TOLERANCE = 0.02
MOMENTS = {"AdamW": 2, "SGD": 0}
# A few layers share a bucket, or all do.
BUCKETS = (3 * WIDTH * WIDTH, 10**9)


def peak_of(
    precision: str,
    optimizer: str,
    accumulate_in: str | None = None,
    micro_batches: int = 4,
    **zero: Any,
) -> int:
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
        for micro_batch in range(micro_batches):
            if micro_batch == micro_batches // 2 and "offload_optimizer" in zero:
                # What the host makes is the simulated device's until its pages are locked.
                device.synchronize()
                device.reset_peak_memory_stats()
            engine.backward(engine(torch.ones(1, WIDTH, dtype=engine.model_dtype)))
            engine.step()
        device.synchronize()
        peak: int = device.max_memory_allocated() - before
        engine.destroy()
    return peak


class Case(NamedTuple):
    stage: int
    precision: str
    overlap: bool
    bucket: int
    offload: bool = False


SHARDED = [
    Case(1, "fp32", False, BUCKETS[0]),
    Case(2, "bf16", True, BUCKETS[0]),
    Case(1, "bf16", True, BUCKETS[0], offload=True),
    Case(2, "bf16", True, BUCKETS[0], offload=True),
    Case(2, "fp32", False, BUCKETS[1], offload=True),
]


class TestSharded(DistributedTest):
    world_size = 2
    backend = "gloo"

    @each(case=SHARDED)
    def test_zero(self, case: Case) -> None:
        # Kills: state that every rank has whole, and pieces on their way to the host that pile up.
        zero: dict[str, Any] = {"overlap_comm": case.overlap, "reduce_bucket_size": case.bucket}
        plan = plan_model_states(
            NUMELS,
            self.world_size,
            stage=case.stage,
            model_bytes=4 if case.precision == "fp32" else 2,
            gradient_accumulation_steps=2,
            offload=case.offload,
            **zero,
        )
        if case.offload:
            zero["offload_optimizer"] = {"device": "cpu"}
        accumulate_in = case.precision if case.stage == 1 else None
        peak = peak_of(case.precision, "AdamW", accumulate_in, stage=case.stage, **zero)
        assert peak == pytest.approx(plan.step, rel=TOLERANCE)

    def test_bf16_optimizer(self) -> None:
        # Kills: masters or moments that every rank has whole.
        plan = plan_whole_gradients(
            NUMELS, model_bytes=2, fp32_accumulation=True, num_shards=self.world_size
        )
        assert peak_of("bf16", "AdamW", "fp32", stage=1) == pytest.approx(
            plan.device, rel=TOLERANCE
        )


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

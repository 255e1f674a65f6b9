"""How much memory gradients take while the host, which waits nowhere here, is far ahead."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.verify import check_streams
from unit.common import DistributedTest

WIDTH = 128
LAYERS = 8
ROWS = 2
MICRO_BATCHES = 4
BUCKET = 4 * WIDTH * WIDTH  # bytes; one layer each
GRADIENTS = LAYERS * BUCKET


def engine_of(stage: int, overlap: bool, **more: Any) -> Any:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    zero = {"stage": stage, "overlap_comm": overlap, "reduce_bucket_size": WIDTH * WIDTH}
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": zero,
        **more,
    }
    return deepspeed.initialize(model=model, config=config)[0]


def micro_batch(engine: Any) -> None:
    x = torch.randn(ROWS, WIDTH).to(engine.device)
    engine.backward(engine(x).square().mean())
    engine.step()


def peaks(engine: Any) -> list[int]:
    """How far each micro-batch of a step rises above what the step began with."""
    for _ in range(MICRO_BATCHES):
        micro_batch(engine)  # buffers are made
    accelerator = get_accelerator()
    before = accelerator.memory_allocated()
    found = []
    for _ in range(MICRO_BATCHES):
        accelerator.reset_peak_memory_stats()
        micro_batch(engine)
        found.append(accelerator.max_memory_allocated() - before)
    return found


def in_all_configurations(stage: int) -> Iterator[list[int]]:
    for overlap, streams in itertools.product((False, True), (0, 3)):
        with simulate(backward_streams=streams), check_streams():
            engine = engine_of(stage, overlap)
            yield peaks(engine)
            engine.destroy()


class TestPeak(DistributedTest):
    world_size = 2
    backend = "gloo"

    def test_stage_2_holds_buckets_and_not_gradients(self) -> None:
        # Kills: gradients held until the host happens to see that they were copied: 1, 2, 3 times
        # all of them after micro-batches 1, 2, 3. A producer that is not waited for is an error of
        # the stream checker.
        for found in in_all_configurations(stage=2):
            # One gradient, a copy of it where it is accumulated on another stream, and the reduced
            # pieces of two buckets, half of one each.
            assert max(found) < 3.5 * BUCKET, found

    def test_stage_1_holds_its_sum_and_buckets(self) -> None:
        # Kills: the same at the boundary, and gradients of one step that are held in the next.
        for found in in_all_configurations(stage=1):
            assert GRADIENTS <= max(found) < GRADIENTS + 3 * BUCKET, found

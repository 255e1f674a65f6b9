"""Training with gradients that are made on streams of their own, and one process to compare with.

Uses only names that upstream DeepSpeed has too.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import deepspeed
import deepspeed.comm as dist
from unit.models import drawn, seeded
from unit.one_process import OneProcess, mean_square
from unit.v1.deferred_streams import DeferredAccelerator, DeferredStream, backward_on_streams

WIDTH = 8
MICRO_BATCH = 3
LR = 0.1


def config_of(stage: int, bucket: int, accumulation: int = 1, **more: Any) -> dict[str, Any]:
    """Of ``more``, `zero_optimization` has neither stage nor bucket."""
    zero = {"stage": stage, "reduce_bucket_size": bucket, **more.pop("zero_optimization", {})}
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": accumulation,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
        **more,
    }


def make_model() -> nn.Sequential:
    """Four layers of 72 elements."""
    return seeded(lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))), seed=5)


def start(configuration: dict[str, Any]) -> Any:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=configuration)[0]


def batches(steps: int, accumulation: int = 1) -> torch.Tensor:
    """Shape [steps, accumulation, world, micro-batch, width]: the same numbers on every rank."""
    return drawn(11, steps, accumulation, dist.get_world_size(), MICRO_BATCH, WIDTH)


def train(
    sim: DeferredAccelerator, engine: Any, data: torch.Tensor, streams: Sequence[DeferredStream]
) -> None:
    """Train with the accumulation nodes of parameters on these streams in turn."""
    order = {param: streams[i % len(streams)] for i, param in enumerate(engine.module.parameters())}
    for step in data.to(next(iter(order)).dtype):
        for micro in step:
            loss = mean_square(engine, micro[dist.get_rank()])
            with backward_on_streams(sim, loss, order.__getitem__):
                engine.backward(loss)
            engine.step()


def check(engine: Any, data: torch.Tensor) -> None:
    """The parameters are those that one process reaches with all ranks' batches."""
    one = OneProcess(make_model(), LR, mean_square)
    for step in data:
        one.step([step.reshape(-1, WIDTH)])
    found = {name: param.detach() for name, param in engine.module.named_parameters()}
    torch.testing.assert_close(found, one.params(), rtol=1e-5, atol=1e-6)

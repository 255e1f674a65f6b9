"""Gradients whose mean fp16 holds and whose sum over ranks it does not."""

from typing import Any

import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from unit.common import DistributedTest
from unit.v1.looping import each

LR = 2.0**-16
NUMEL = 16


class Linear(nn.Module):
    """Its gradient is its input, exactly."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(NUMEL))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def engine_of(stage: int, **more: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        # Summed by the collective; host backends sum slices in fp32 otherwise.
        "zero_optimization": {"stage": stage, "reduce_scatter": False},
        "fp16": {"enabled": True, "loss_scale": 1.0},
        **more,
    }
    return deepspeed.initialize(model=Linear(), config=config)[0]


def gradient() -> float:
    """A power of two; all ranks' sum is 2^16 or more, and fp16 ends just below."""
    return 2.0**16 / (dist.get_world_size() // 2 * 2)


def step(engine: Any) -> None:
    engine.backward(engine(torch.full((NUMEL,), gradient(), dtype=torch.float16)))
    engine.step()


class TestLargeSums(DistributedTest):
    """On two to four ranks."""

    world_size = [2, 3, 4]

    @each(stage=(0, 1, 2))
    def test_the_mean_is_used(self, stage: int) -> None:
        # Kills: summing before any division: the sum is infinite, and every step is skipped.
        engine = engine_of(stage)
        step(engine)
        assert engine.skipped_steps == 0
        weight = next(engine.module.parameters())
        assert torch.equal(weight.detach().float(), torch.full((NUMEL,), -LR * gradient()))
        engine.destroy()

    @each(stage=(0, 1, 2))
    def test_the_users_factor_is_used(self, stage: int) -> None:
        # Kills: a configured factor that is overruled; with 1 the sum overflows, as was asked for.
        engine = engine_of(stage, gradient_predivide_factor=1.0)
        step(engine)
        assert engine.skipped_steps == 1
        engine.destroy()

"""Batches by their tokens (docs/data.md): another number of samples on each rank, one mean."""

from typing import Any

import torch
from torch import nn
from unit.common import DistributedTest
from unit.models import drawn, seeded
from unit.one_process import OneProcess, mean_square, of_all_ranks

import deepspeed
from deepspeed import comm as dist

ACCUMULATION, LR, CLIP = 2, 0.5, 0.4
# Samples by step, micro-batch and rank.
ROWS = [[[1, 3], [4, 2]], [[5, 1], [1, 2]]]


def make_model() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)), seed=3)


def batch_of(number: int, rank: int) -> torch.Tensor:
    step, micro = divmod(number, ACCUMULATION)
    return drawn(100 * step + 10 * micro + rank, ROWS[step][micro][rank], 5)


class TestUnequalBatches(DistributedTest):
    world_size = 2

    def test_equal_one_process(self) -> None:
        # Kills: a mean of ranks' means, which counts a sample of a small batch more, and a total of
        # one micro-batch.
        one, norms = OneProcess(make_model(), LR, mean_square, CLIP), []
        for step in range(len(ROWS)):
            one.step([torch.cat(of_all_ranks(batch_of, step, ACCUMULATION))])
            norms.append(float(one.norm))
        assert norms[0] > CLIP
        for stage in range(4):
            engine, *_ = deepspeed.initialize(
                model=make_model(),
                config={
                    "train_micro_batch_size_per_gpu": 1,
                    "gradient_accumulation_steps": ACCUMULATION,
                    "gradient_clipping": CLIP,
                    "optimizer": {"type": "SGD", "params": {"lr": LR}},
                    "zero_allow_untested_optimizer": True,
                    "zero_optimization": {"stage": stage},
                },
            )
            for step in range(len(ROWS)):
                own = of_all_ranks(batch_of, step, ACCUMULATION)[dist.get_rank() :: 2]
                self.step(engine, own)
                assert abs(engine.get_global_grad_norm() - norms[step]) < 1e-5, stage
            with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
                for param, wanted in zip(
                    engine.module.parameters(), one.params().values(), strict=True
                ):
                    torch.testing.assert_close(param.detach(), wanted, atol=1e-6, rtol=1e-5)
            engine.destroy()

    def step(self, engine: Any, micro_batches: list[torch.Tensor]) -> None:
        """What the page has."""
        rows = sum(len(batch) for batch in micro_batches)
        total = torch.tensor(float(rows), device=engine.device)
        dist.all_reduce(total, group=engine.data_parallel_group)
        share = engine.dp_world_size * engine.gradient_accumulation_steps() / total
        for batch in micro_batches:
            loss = engine(batch).square().sum() * share
            engine.backward(loss)
            engine.step()

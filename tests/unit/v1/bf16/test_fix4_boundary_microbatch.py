"""Fix 4: the boundary micro-batch is in the fp32 accumulator before the accumulator is reduced.

See docs/fixes/fix4.md. Uses only names that upstream DeepSpeed has too, so it runs unmodified
against an installed one.
"""

from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
import deepspeed.comm as dist
from unit.common import DistributedTest
from unit.models import drawn
from unit.one_process import OneProcess, mean_square, train

WIDTH, MICRO_BATCH, LR = 16, 4, 0.5


def make_model() -> nn.Module:
    torch.manual_seed(7)
    layers = nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(*layers).to(torch.bfloat16)


def batches(accumulation: int) -> torch.Tensor:
    """Shape [accumulation, world, micro-batch, width], the same on every rank, all different."""
    shape = (accumulation, dist.get_world_size(), MICRO_BATCH, WIDTH)
    return drawn(17, *shape).bfloat16()


def mean_gradients(data: torch.Tensor) -> list[torch.Tensor]:
    """fp32 mean over micro-batches and ranks of the bf16 gradients of one process."""
    one = OneProcess(make_model(), LR, lambda model, batch: mean_square(model, batch) / len(data))
    total = [torch.zeros_like(param, dtype=torch.float32) for param in one.model.parameters()]
    for batch in data.flatten(0, 1):
        one.backward([batch])
        for sum_, grad in zip(total, one.grads().values(), strict=True):
            sum_ += grad.float() / data.shape[1]
    return total


def start(immediate: bool, accumulation: int, rows: int = MICRO_BATCH) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": accumulation,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True, "immediate_grad_update": immediate},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_optimization": {"stage": 1},
    }
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


class TestBoundary(DistributedTest):
    world_size = 2

    # With accumulation 1 every micro-batch is the boundary.
    @pytest.mark.parametrize("immediate", [False, True])
    @pytest.mark.parametrize("accumulation", [1, 3])
    def test_all_micro_batches_are_reduced(self, immediate: bool, accumulation: int) -> None:
        engine, data = start(immediate, accumulation), batches(accumulation)
        train(engine, data[:-1, dist.get_rank()], mean_square)
        engine.backward(mean_square(engine, data[-1, dist.get_rank()]))
        for flat in engine.optimizer.fp32_groups_gradients_flat:
            mine = flat.detach().clone()
            first = mine.clone()
            dist.broadcast(first, src=0)
            assert mine.abs().max() > 0
            torch.testing.assert_close(mine, first, rtol=1e-6, atol=1e-6)
        grads = mean_gradients(data)
        expected = torch.cat([grad.reshape(-1) for grad in grads])
        flat = engine.optimizer.fp32_groups_gradients_flat[0].detach()[: expected.numel()]
        torch.testing.assert_close(flat, expected, rtol=1e-5, atol=1e-6)
        engine.step()
        befores = make_model().parameters()
        for param, before, grad in zip(engine.module.parameters(), befores, grads, strict=True):
            # What one process computes in fp32 and rounds to bf16. One bf16 rounding step of slack:
            # the fp32 sum may be taken in another order.
            wanted = (before.detach().float() - LR * grad).bfloat16()
            torch.testing.assert_close(param.detach(), wanted, rtol=2**-8, atol=1e-6)

    def test_norm_does_not_depend_on_the_split(self) -> None:
        """The same global batch in one and in four micro-batches: in the unfixed order the share of
        the boundary micro-batch changes with the split.
        """
        norms = []
        for accumulation in (1, 4):
            rows = MICRO_BATCH // accumulation
            engine = start(False, accumulation, rows)
            train(engine, batches(1)[0, dist.get_rank()].split(rows), mean_square)
            norms.append(float(engine.get_global_grad_norm()))
        assert norms[0] > 0
        assert abs(norms[1] - norms[0]) / norms[0] < 0.02, f"grad norms {norms}"

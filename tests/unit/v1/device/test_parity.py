"""Training on a device equals plain torch there: what only a device has, streams and copies."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_params
from unit.common import DistributedTest
from unit.models import config_of, drawn, seeded, sgd
from unit.one_process import OneProcess, mean_square, of_all_ranks, placed, train

WIDTH, LAYERS, ROWS, LR = 64, 6, 5, 0.1
STEPS, ACCUMULATION = 3, 2


class Streamed(nn.Module):
    """Every other layer runs on a side stream, so a bucket has gradients of two."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.side: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        accelerator = get_accelerator()
        for index, layer in enumerate(self.layers):
            if self.side is None or index % 2:
                x = layer(x).tanh()
                continue
            main = accelerator.current_stream()
            self.side.wait_stream(main)
            with accelerator.stream(self.side):
                x = layer(x).tanh()
            main.wait_stream(self.side)
        return x


def batch(number: int, rank: int) -> torch.Tensor:
    return drawn(10 * number + rank, ROWS, WIDTH)


def reference_step(masters: list[torch.Tensor], one: OneProcess, batches: list[Any]) -> None:
    """A step on the whole batch: gradients in the dtype of the model, masters in fp32."""
    with torch.no_grad():
        for param, master in zip(one.model.parameters(), masters, strict=True):
            param.copy_(master)
    totals = [torch.zeros_like(master) for master in masters]
    for one_batch in batches:
        one.backward([one_batch])
        for total, grad in zip(totals, one.grads().values(), strict=True):
            total += grad.float() / len(batches)
    for master, total in zip(masters, totals, strict=True):
        master -= LR * total


def train_and_compare(stage: int, precision: str, overlap: bool, offload: bool) -> None:
    zero: dict[str, Any] = {"overlap_comm": overlap, "reduce_bucket_size": 2 * WIDTH * (WIDTH + 1)}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    config = config_of(
        stage, ROWS, ACCUMULATION, precision, optimizer=sgd(LR), zero_optimization=zero
    )
    model = seeded(Streamed, seed=3)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    model.side = get_accelerator().Stream() if engine.device.type != "cpu" else None
    plain = seeded(Streamed, seed=3).to(engine.device, engine.model_dtype)
    # Masters start from the rounded weights.
    masters = [param.detach().float().clone() for param in plain.parameters()]
    one = OneProcess(plain, LR, mean_square)
    numbers = range(STEPS * ACCUMULATION)
    train(engine, (placed(engine, batch(n, dist.get_rank())) for n in numbers), mean_square)
    for step in range(STEPS):
        batches = of_all_ranks(batch, step, ACCUMULATION)
        reference_step(masters, one, [placed(engine, x) for x in batches])
    found = safe_get_full_fp32_params(list(model.parameters()))
    # fp32: another order of the same sums. bf16: micro-batch gradients are rounded to 8 bits, on
    # other sums at stage 1.
    bound = 1e-5 if precision == "fp32" else 2e-3
    for value, master in zip(found, masters, strict=True):
        assert (value.to(engine.device) - master).norm() <= bound * master.norm()
    engine.destroy()


MATRIX = [
    pytest.param(*case, id="zero{}-{}-overlap{:d}-offload{:d}".format(*case))
    for case in itertools.product((1, 2), ("fp32", "bf16"), (False, True), (False, True))
]


@pytest.mark.gpu
@pytest.mark.parametrize("stage, precision, overlap, offload", MATRIX)
class TestOneDevice(DistributedTest):
    # Kills, on a device: a reduction that does not wait for all producer streams, a step before its
    # copies to the host are there.
    world_size = 1
    requires_cuda_env = True

    def test(self, stage: int, precision: str, overlap: bool, offload: bool) -> None:
        train_and_compare(stage, precision, overlap, offload)


class TestTwoDevices(TestOneDevice):
    # Kills the same with collectives on their own stream.
    world_size = 2


@pytest.mark.parametrize("stage, precision, overlap, offload", [MATRIX[0], MATRIX[-1]])
class TestHost(DistributedTest):
    # Keeps the comparison itself right where there is no device to run it on.
    world_size = 2

    def test(self, stage: int, precision: str, overlap: bool, offload: bool) -> None:
        train_and_compare(stage, precision, overlap, offload)

"""Adapters on a frozen base at stage 3: several dtypes in one model."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.runtime.zero import Init
from unit.common import DistributedTest
from unit.v1.zero.stage3_models import LR, Tensors, config_of, distance, engine_of

WIDTH = 7
STEPS = 4
SHARDED: dict[str, Any] = {"stage3_param_persistence_threshold": 0}


class Adapted(nn.Module):
    """A frozen layer in bf16 and a trained product of two small matrices in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added = self.up(self.down(x.to(self.up.weight.dtype)))
        return self.base(x.to(self.base.weight.dtype)).to(x.dtype) + added.to(x.dtype)


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Adapted(), Adapted(), Adapted())


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def one_process() -> Tensors:
    """Plain torch over the batches of all ranks."""
    model, world = made(), dist.get_world_size()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
    for step, rank in itertools.product(range(STEPS), range(world)):
        (model(batch(step, rank)).square().mean() / world).backward()
        if rank == world - 1:
            optimizer.step()
            optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}


def trained(
    stage: int, model: nn.Module | None = None, dtype: torch.dtype = torch.float32, **zero: Any
) -> Tensors:
    model = made() if model is None else model
    config = config_of(stage, 1, **zero)
    config["bf16"] = {"enabled": dtype == torch.bfloat16}
    engine = engine_of(model, config)
    for step in range(STEPS):
        loss = engine(batch(step, dist.get_rank()).to(dtype)).float().square().mean()
        engine.backward(loss)
        engine.step()
    engine.destroy()
    return {name: param.detach() for name, param in model.named_parameters()}


class TestDtypes(DistributedTest):
    """Parameters of several dtypes."""

    world_size = 2

    def test_a_base_in_bf16_and_adapters_in_fp32(self) -> None:
        # Kills: a frozen base that is made fp32 (its products round otherwise, and take twice the
        # memory), a gather that takes one dtype's bytes for another's.
        wanted, stage2 = one_process(), trained(2)
        assert distance(stage2, wanted) < 1e-6
        with Init():
            cut = made()
        for model, zero in (
            (None, SHARDED),
            (None, {}),
            (cut, SHARDED),
            (None, {**SHARDED, "offload_param": {"device": "cpu"}}),
        ):
            found = trained(3, model, **zero)
            for name, value in found.items():
                assert value.dtype == wanted[name].dtype, name
                assert torch.equal(value, stage2[name]), (name, zero)

    def test_bf16_makes_all_of_it_bf16(self) -> None:
        # Kills: adapters that keep a dtype which the configuration does not name.
        stage2, stage3 = (trained(stage, dtype=torch.bfloat16, **SHARDED) for stage in (2, 3))
        for name, value in stage3.items():
            assert value.dtype == torch.bfloat16 and torch.equal(value, stage2[name]), name

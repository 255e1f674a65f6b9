"""Adapters on a frozen base at stage 3: several dtypes in one model, and modules that come late."""

from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.runtime.zero import Init
from unit.common import DistributedTest
from unit.models import drawn, seeded
from unit.one_process import OneProcess, mean_square
from unit.v1.zero.stage3.models import (
    LR,
    SHARDED,
    STEPS,
    Tensors,
    config_of,
    distance,
    engine_of,
    values_of,
)

WIDTH = 7


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
    return seeded(lambda: nn.Sequential(Adapted(), Adapted(), Adapted()))


def batch(step: int, rank: int) -> torch.Tensor:
    return drawn(10 * step + rank, 4, WIDTH)


def one_process() -> Tensors:
    return OneProcess(made(), LR, mean_square).train(batch, STEPS)


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
    return values_of(model)


class TestDtypes(DistributedTest):
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


class Late(nn.Module):
    """Around a layer, once it has been given something: a frozen layer of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.more = nn.ModuleDict()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((layer(x).tanh() for layer in self.more.values()), start=self.inner(x))


def layer_of(seed: int, rank: int) -> nn.Linear:
    """Other values on each rank: those of the first count."""
    torch.manual_seed(10 * seed + rank)
    return nn.Linear(WIDTH, WIDTH)


def give(model: nn.Sequential, step: int, rank: int) -> None:
    """Between steps: a layer around one that is there, more of it, a layer in place of another."""
    if step == 1:
        model[1] = Late(model[1])
    if step in (1, 3):
        model[1].more[str(step)] = layer_of(step, rank).requires_grad_(False)
    if step == 2:
        model[2].base = layer_of(step, rank).requires_grad_(False)


class TestLate(DistributedTest):
    world_size = 2

    def test_frozen_ones_are_taken_in(self) -> None:
        # Kills: a layer that each rank has with values of its own, one that stays whole, modules
        # around sharded ones that nobody gathers for.
        rank, world = dist.get_rank(), dist.get_world_size()
        plain = made()
        optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=LR)
        model = made()
        engine = engine_of(model, config_of(3, 1, **SHARDED, stage3_max_reuse_distance=0))
        for step in range(5):
            give(plain, step, 0)
            if step == 3:
                with deepspeed.zero.Init():
                    give(model, step, rank)
            else:
                give(model, step, rank)
            engine.backward(engine(batch(step, rank)).square().mean())
            engine.step()
            assert all(param.numel() == 0 for param in model.parameters()), step
            for other in range(world):
                (plain(batch(step, other)).square().mean() / world).backward()
            optimizer.step()
            optimizer.zero_grad()
        engine.destroy()
        assert distance(values_of(model), values_of(plain)) < 1e-6

    def test_trained_ones_are_refused(self) -> None:
        # Kills: an adapter that no optimizer trains, in silence.
        rank = dist.get_rank()
        model = made()
        engine = engine_of(model, config_of(3, 1))
        model[1] = Late(model[1])
        model[1].more["a"] = layer_of(1, rank)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"1\.more\.a\.weight, 1\.more\.a\.bias came"):
                engine(batch(0, rank))
        model[1].more["a"].requires_grad_(False)
        engine(batch(0, rank))
        engine.destroy()
        first, *_ = deepspeed.initialize(model=model, config=config_of(3, 1))
        model[0] = Late(model[0])
        model[0].more["a"] = layer_of(2, rank)
        told: list[Any] = [None, None]
        with torch.no_grad():
            dist.all_gather_object(told, first(batch(0, 0)))
        assert torch.equal(*told)
        first.destroy()

"""What client libraries and their users do at every stage, as upstream lets them."""

from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.runtime.zero.utils import is_zero_param
from deepspeed.utils import safe_get_full_fp32_param
from unit.common import DistributedTest
from unit.v1.looping import each
from unit.v1.zero.usage import Warnings

LR = 0.1


def data(step: int, rank: int) -> torch.Tensor:
    """Exact in half precision."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(-4, 5, (2, 4), generator=generator) / 4


def make(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    return model if dtype == torch.float32 else model.to(dtype)


def start(model: nn.Module, stage: int, **keys: Any) -> Any:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **keys,
    }
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def step(engine: Any, index: int, dtype: torch.dtype, factor: float = 1.0) -> None:
    loss = engine(data(index, dist.get_rank()).to(dtype)).float().square().mean()
    engine.backward(loss * factor)
    engine.step()


def trained_in_fp32(start_from: nn.Module, steps: int) -> dict[str, torch.Tensor]:
    """One process, fp32, the whole batch; from the same weights."""
    model = make()
    model.load_state_dict(start_from.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for index in range(steps):
        losses = [model(data(index, rank)).square().mean() for rank in range(dist.get_world_size())]
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}


class TestHalfModels(DistributedTest):
    world_size = 2

    @each(stage=(0, 1, 2, 3), dtype=(torch.bfloat16, torch.float16))
    def test_without_a_precision_block(self, stage: int, dtype: torch.dtype) -> None:
        # Kills: masters that nobody asked for at stage 0, none where state is sharded, a model
        # that comes out in another dtype.
        model = make(dtype)
        wanted = trained_in_fp32(model, 3)
        with Warnings() as said:
            engine = start(model, stage)
        told = [text for text in said.texts if "no precision block is enabled" in text]
        name = "bf16" if dtype == torch.bfloat16 else "fp16"
        has = {
            (0, "bf16"): 'without fp32 master weights. Set "bf16": {"enabled": true} for these',
            (0, "fp16"): "without fp32 master weights and a loss scale. Set",
            (1, "bf16"): 'with fp32 master weights. Set "bf16": {"enabled": true} to say so',
            (1, "fp16"): 'without a loss scale. Set "fp16": {"enabled": true} for these',
        }[min(stage, 1), name]
        assert [has in text for text in told] == [True] * (dist.get_rank() == 0)
        for index in range(3):
            step(engine, index, dtype)
        assert engine.model_dtype == dtype and engine.get_data_types() == (dtype, dtype)
        assert {param.dtype for param in engine.module.parameters()} == {dtype}
        for param_name, param in engine.module.named_parameters():
            master = safe_get_full_fp32_param(param)
            assert (master is None) == (stage == 0)
            found = param.detach() if master is None else master
            assert torch.allclose(found.float(), wanted[param_name], atol=0.02), param_name
        engine.destroy()

    def test_of_several_dtypes(self) -> None:
        model = make()
        model[0].bfloat16()
        model[0].register_forward_hook(lambda module, args, output: output.float())
        engine = start(model, 0)
        assert engine.model_dtype == torch.float32
        step(engine, 0, torch.bfloat16)
        assert [p.dtype for p in model.parameters()] == 2 * [torch.bfloat16] + 2 * [torch.float32]
        engine.destroy()
        for stage in (1, 2, 3):
            with pytest.raises(ValueError, match="trainable parameters are of 2 dtypes"):
                start(model, stage)


class TestNorm(DistributedTest):
    world_size = 2

    @each(
        stage=(0, 1, 2, 3),
        precision=(torch.float32, torch.bfloat16, torch.float16),
        clipping=(0.0, 1.0),
    )
    def test_after_a_skipped_step(
        self, stage: int, precision: torch.dtype, clipping: float
    ) -> None:
        # Kills: infinity in the log and the progress bar of whoever prints the norm.
        block = {
            torch.float32: {},
            torch.bfloat16: {"bf16": {"enabled": True}},
            torch.float16: {"fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}},
        }[precision]
        engine = start(make(), stage, gradient_clipping=clipping, **block)
        assert engine.get_global_grad_norm() is None
        step(engine, 0, precision, factor=float("inf"))
        assert engine.get_global_grad_norm() == 0.0 and not engine.was_step_applied()
        step(engine, 1, precision)
        norm = float(engine.get_global_grad_norm())
        assert norm > 0
        step(engine, 2, precision, factor=float("nan"))
        assert float(engine.get_global_grad_norm()) == norm and not engine.was_step_applied()
        step(engine, 3, precision)
        assert float(engine.get_global_grad_norm()) != norm and engine.was_step_applied()
        assert engine.skipped_steps == 2
        engine.destroy()


class TestZeroNames(DistributedTest):
    world_size = 2

    @each(stage=(0, 1, 2, 3))
    def test_of_every_stage(self, stage: int) -> None:
        # Kills: a model that is cut for a stage that does not gather it; edits of ordinary
        # parameters that are refused or lost.
        config = {"zero_optimization": {"stage": stage}}
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = make()
        assert is_zero_param(model[0].weight) == (stage == 3)
        with deepspeed.zero.Init(
            config_dict_or_path={"zero_optimization": {"stage": 3}}, enabled=False
        ):
            plain = make()
        with deepspeed.zero.GatheredParameters(list(plain.parameters()), modifier_rank=0):
            plain[0].weight.data.fill_(2.0)
        with deepspeed.zero.GatheredParameters(plain[0].weight):
            assert bool((plain[0].weight == 2.0).all())
        engine = start(model, stage)
        with deepspeed.zero.GatheredParameters(list(engine.parameters())):
            assert engine.module[0].weight.shape == (4, 4)
        step(engine, 0, torch.float32)
        engine.destroy()

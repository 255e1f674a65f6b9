"""Buffers keep their dtype at every stage and precision; `data_types` says otherwise."""

from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from unit.common import DistributedTest
from unit.v1.looping import each

POSITIONS = 2000


class Rotary(nn.Module):
    """Turns its inputs by their positions, as language models do, and counts what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 4)
        self.register_buffer("inv_freq", 0.37 ** torch.arange(2.0), persistent=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.seen += x.abs().double().mean()
            self.steps += 1
        angle = torch.arange(len(x))[:, None] * self.inv_freq
        turned = torch.cat([angle.cos(), angle.sin()], dim=-1).to(x.dtype)
        return self.project(x) * turned


def start(stage: int, **keys: Any) -> Any:
    torch.manual_seed(3)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
        **keys,
    }
    return deepspeed.initialize(model=Rotary(), config=config)[0]


def dtypes(engine: Any) -> list[torch.dtype]:
    return [buffer.dtype for buffer in engine.module.buffers()]


class TestBuffers(DistributedTest):
    world_size = 2

    @each(
        stage=(0, 1, 2, 3),
        precision=(
            {"bf16": {"enabled": True}},
            {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
            {"fp16": {"enabled": True, "loss_scale": 128}},
        ),
    )
    def test_kept(self, stage: int, precision: dict[str, Any]) -> None:
        # Kills: `model.to(dtype)`, which rounds positions: bf16 has no integer above 256 but the
        # even ones, and 0.37 as 0.3691 is a turn too few at position 2000.
        engine = start(stage, **precision)
        assert dtypes(engine) == [torch.float32, torch.float64, torch.int32]
        assert next(engine.module.parameters()).dtype == engine.model_dtype
        wanted = Rotary()
        assert torch.equal(engine.module.inv_freq, wanted.inv_freq)
        with torch.no_grad():
            for param, value in zip(wanted.parameters(), (0.5, 1.0), strict=True):
                param.fill_(value)
        with deepspeed.zero.GatheredParameters(list(engine.parameters()), modifier_rank=0):
            for param, value in zip(engine.module.parameters(), (0.5, 1.0), strict=True):
                param.data.fill_(value)
        x = torch.ones(POSITIONS, 4)
        found = engine(x.to(engine.model_dtype)).float()
        assert torch.allclose(found, wanted(x), atol=0.02)
        engine.backward(found.mean())
        engine.step()
        assert engine.module.seen == 1.0 and engine.module.steps == 1
        engine.destroy()

    @each(stage=(0, 2, 3))
    def test_asked_for(self, stage: int) -> None:
        # Kills: a key that is read and does nothing.
        bf16 = {"enabled": True}
        low = start(stage, bf16=bf16, data_types={"buffer_dtype": "bf16", "param_dtype": "bf16"})
        assert dtypes(low) == [torch.bfloat16, torch.bfloat16, torch.int32]
        low.destroy()
        for wide in (
            start(stage, bf16=bf16, data_types={"buffer_dtype": "fp32"}),
            start(stage, data_types={"buffer_dtype": "fp32", "param_dtype": "fp32"}),
        ):
            assert dtypes(wide) == [torch.float32, torch.float32, torch.int32]
            wide.destroy()
        for precision, name in (({"bf16": bf16}, "fp32"), ({}, "bf16")):
            with pytest.raises(AssertionError, match=r"data_types\.param_dtype: .* conflicts"):
                start(stage, **precision, data_types={"param_dtype": name})

    def test_saved_and_loaded(self, tmpdir: Any) -> None:
        # Kills: a buffer that is rounded on its way through a file.
        for stage in (0, 2, 3):
            folder = str(tmpdir.join(str(stage)))
            engine = start(stage, bf16={"enabled": True})
            engine.module.seen.fill_(1 / 3)
            engine.save_checkpoint(folder)
            other = start(stage, bf16={"enabled": True})
            other.load_checkpoint(folder)
            assert other.module.seen == torch.tensor(1 / 3, dtype=torch.float64)
            dist.barrier()

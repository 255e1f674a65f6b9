"""Fix 3, pipeline half: what a stage receives has the sender's shape and dtype, and the dtype that
the model declares.

See docs/fixes/fix3.md. Uses only names that upstream DeepSpeed has too, so it runs unmodified
against an installed one.
"""

from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.pipe import PipelineModule
from unit.common import DistributedTest

WIDTH = 8
MICRO_BATCHES = 3
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Arrives(nn.Module):
    """First layer of the second stage: remembers what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seen: list[tuple[torch.dtype, tuple[int, ...]]] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen.append((inputs.dtype, tuple(inputs.shape)))
        return self.linear(inputs)


def loss_of(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (outputs.float() - labels.float()).square().mean()


@pytest.mark.parametrize("precision", sorted(DTYPES))
class TestWhatArrives(DistributedTest):
    world_size = 2

    def test_shape_and_dtype(self, precision: str) -> None:
        # Kills: float32 buffers for half-precision activations; the first message's shape for all.
        dtype = DTYPES[precision]
        torch.manual_seed(5)
        arrives = Arrives()
        how: dict[str, Any] = {"partition_method": "uniform", "dynamic_shape": True}
        layers = [nn.Linear(WIDTH, WIDTH), arrives]
        module = PipelineModule(layers=layers, num_stages=2, loss_fn=loss_of, **how)
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            **({} if precision == "fp32" else {precision: {"enabled": True}}),
        }
        params = list(module.parameters())
        engine, *_ = deepspeed.initialize(model=module, config=config, model_parameters=params)
        lengths = [3, 5, 4]
        batch = [torch.randn(2, 2, length, WIDTH).to(dtype).unbind() for length in lengths]
        engine.train_batch(iter(batch))
        if engine.is_last_stage():
            assert arrives.seen == [(dtype, (2, length, WIDTH)) for length in lengths]

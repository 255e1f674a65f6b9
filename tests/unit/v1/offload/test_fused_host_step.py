"""The optimizer step on the host in one pass: the same bits, and low-precision weights by it."""

from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.ops.adam import DeepSpeedCPUAdam
from unit.common import DistributedTest

WIDTH = 24


def trained(
    fuses: bool, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> list[torch.Tensor]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 7))
    with monkeypatch.context() as patched:
        if not fuses:
            # What the step sees is then no optimizer of the host's: it scales before and rounds
            # after.
            patched.setattr("deepspeed.runtime.optimizers.master_weights.HostOptimizer", int)
        client = DeepSpeedCPUAdam(model.parameters(), lr=0.01, weight_decay=0.1)
        engine, *_ = deepspeed.initialize(model=model, optimizer=client, config=config)
        dtype = next(model.parameters()).dtype
        generator = torch.Generator().manual_seed(deepspeed.comm.get_rank())
        for _ in range(6):
            loss = (
                engine(torch.randn(4, WIDTH, generator=generator).to(dtype)).float().square().mean()
            )
            engine.backward(loss)
            engine.step()
    weights = [param.detach().clone() for param in model.parameters()]
    masters = [group.master.clone() for group in engine.optimizer.groups]
    engine.destroy()
    return weights + masters


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [1, 2])
class TestOnePass(DistributedTest):
    world_size = 2

    def test_same_bits(self, stage: int, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
        # Kills: the factor left out or applied twice (clipping is on, fp16 is scaled), weights that
        # stay behind their masters.
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_clipping": 0.05,
            "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}},
        }
        if precision != "fp32":
            config[precision] = {
                "enabled": True,
                **({"initial_scale_power": 8} if precision == "fp16" else {}),
            }
        fused = trained(True, config, monkeypatch)
        apart = trained(False, config, monkeypatch)
        assert all(torch.equal(a, b) for a, b in zip(fused, apart, strict=True))

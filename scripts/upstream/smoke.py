"""Trains a few steps with every stage of a tree's package; run by pytest with `harness`."""

from unittest import mock

import pytest
import torch
from unit.common import DistributedTest

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule

MODES = [
    *((stage, {}) for stage in (0, 1, 2, 3)),
    *((stage, {"bf16": {"enabled": True}}) for stage in (0, 1, 2, 3)),
    *((stage, {"fp16": {"enabled": True, "initial_scale_power": 8}}) for stage in (0, 1, 2, 3)),
    (1, {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}),
]


def config(stage, extra):
    """A configuration with accumulation, clipping and small buckets."""
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 100,
            # Until 0.19.6 parameters that stay whole are read before they are gathered on gloo: the
            # losses of every second run of the release as it is are NaN or infinite.
            "stage3_param_persistence_threshold": 0,
        },
        **extra,
    }


class TestSmoke(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("stage,extra", MODES, ids=str)
    def test(self, stage, extra):
        host = type(get_accelerator())
        with mock.patch.object(host, "is_fp16_supported", lambda accelerator: True):
            self._train(stage, extra)

    def _train(self, stage, extra):
        torch.manual_seed(1)
        model = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.Linear(16, 1)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config(stage, extra)
        )
        dtype = next(iter(engine.module.parameters())).dtype
        batch = torch.randn(4, 8, dtype=dtype)
        losses = []
        for _ in range(20):
            loss = (engine(batch).float() - 1).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0] / 2, losses


class TestSmokePipeline(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("stage", [0, 1])
    def test(self, stage):
        torch.manual_seed(1)
        model = PipelineModule(
            layers=[torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)],
            num_stages=2,
            loss_fn=lambda output, label: (output - label).square().mean(),
        )
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config(stage, {})
        )
        batch = (torch.randn(4, 8), torch.ones(4, 1))
        losses = [engine.train_batch(iter([batch] * 2)).item() for _ in range(20)]
        assert losses[-1] < losses[0] / 2, losses

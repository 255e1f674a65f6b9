# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

from unittest import mock

import pytest
import torch

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from unit.common import DistributedTest

LR, STEPS, FIRST_SCALE = 0.125, 7, 16.0


class TestLossScaleGrowthStep(DistributedTest):
    """The gradient is the same at every step, so that every step is the same too."""

    world_size = 1

    @pytest.mark.parametrize("stage", [1, 2, 3])
    def test(self, stage):
        # A host computes in fp16 too, slowly; it counts as supported only where it is fast.
        with mock.patch.object(type(get_accelerator()), "is_fp16_supported", lambda accelerator: True):
            self._train(stage)

    def _train(self, stage):
        model = torch.nn.Linear(4, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        engine, _, _, _ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=LR),
            config={
                "train_micro_batch_size_per_gpu": 1,
                # Above the norm, which is clipped to 1 where nothing is said.
                "gradient_clipping": 100.0,
                "zero_allow_untested_optimizer": True,
                "fp16": {
                    "enabled": True,
                    "initial_scale_power": 4,
                    "loss_scale_window": 2,
                },
                "zero_optimization": {
                    "stage": stage
                },
            },
        )
        for step in range(1, STEPS + 1):
            engine.backward(engine(torch.ones(1, 4, dtype=torch.float16)).sum())
            engine.step()
            with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
                weight = next(engine.module.parameters()).detach().clone().float()
            assert torch.equal(weight, torch.full((1, 4), 1 - step * LR)), f"step {step}: {weight.tolist()}"
        assert engine.optimizer.loss_scale > FIRST_SCALE, "the scale has not grown"

    @pytest.mark.parametrize("optimizer_class", [FP16_Optimizer, FP16_UnfusedOptimizer])
    def test_stage_0(self, optimizer_class):
        model = torch.nn.Linear(4, 1, bias=False).half()
        torch.nn.init.ones_(model.weight)
        optimizer = optimizer_class(
            torch.optim.SGD(model.parameters(), lr=LR),
            dynamic_loss_scale=True,
            dynamic_loss_args={
                "init_scale": FIRST_SCALE,
                "scale_window": 2,
                "min_scale": 1
            },
        )
        for step in range(1, STEPS + 1):
            optimizer.zero_grad()
            optimizer.backward(model(torch.ones(1, 4, dtype=torch.float16)).sum())
            optimizer.step()
            weight = model.weight.detach().float()
            assert torch.equal(weight, torch.full((1, 4), 1 - step * LR)), f"step {step}: {weight.tolist()}"
        assert optimizer.loss_scale_config.cur_scale > FIRST_SCALE, "the scale has not grown"

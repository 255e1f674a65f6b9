# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

from unittest import mock

import pytest
import torch

import deepspeed
from deepspeed.accelerator import get_accelerator
from unit.common import DistributedTest

LR, STEPS = 0.125, 7


class TestLossScaleGrowthStep(DistributedTest):
    """The gradient is the same at every step, so that every step is the same too."""

    world_size = 1

    @pytest.mark.parametrize("stage", [0, 1, 2, 3])
    def test(self, stage):
        self._train(torch.optim.SGD, stage)

    def test_fused(self):
        # FP16_Optimizer is chosen for FusedAdam.
        with mock.patch("deepspeed.runtime.engine.FusedAdam", torch.optim.SGD):
            self._train(torch.optim.SGD, 0)

    def _train(self, optimizer_class, stage):
        # A host computes in fp16 too, slowly; it counts as supported only where it is fast.
        with mock.patch.object(type(get_accelerator()), "is_fp16_supported", lambda accelerator: True):
            self._train_in_fp16(optimizer_class, stage)

    def _train_in_fp16(self, optimizer_class, stage):
        model = torch.nn.Linear(4, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        engine, _, _, _ = deepspeed.initialize(
            model=model,
            optimizer=optimizer_class(model.parameters(), lr=LR),
            config={
                "train_micro_batch_size_per_gpu": 1,
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
        first_scale = self._scale(engine.optimizer)
        for step in range(1, STEPS + 1):
            engine.backward(engine(torch.ones(1, 4, dtype=torch.float16)).sum())
            engine.step()
            with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
                weight = next(engine.module.parameters()).detach().clone().float()
            assert torch.equal(weight, torch.full((1, 4), 1 - step * LR)), (f"step {step}: {weight.tolist()}")
        assert self._scale(engine.optimizer) > first_scale, "the scale has not grown"

    def _scale(self, optimizer):
        return optimizer.cur_scale if hasattr(optimizer, "cur_scale") else optimizer.loss_scale

# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

from unittest import mock

import pytest
import torch

import deepspeed
from deepspeed.accelerator import get_accelerator
from unit.common import DistributedTest

LR, SCALE = 0.125, 8


class TestStage0LossScale(DistributedTest):
    world_size = 1

    @pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
    def test(self, fused):
        # A host computes in fp16 too, slowly; it counts as supported only where it is fast.
        with mock.patch.object(type(get_accelerator()), "is_fp16_supported", lambda accelerator: True):
            if fused:
                # FP16_Optimizer is chosen for FusedAdam.
                with mock.patch("deepspeed.runtime.engine.FusedAdam", torch.optim.SGD):
                    self._train()
            else:
                self._train()

    def _train(self):
        model = torch.nn.Linear(4, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        engine, _, _, _ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=LR),
            config={
                "train_micro_batch_size_per_gpu": 1,
                # Above the norm, which is clipped to 1 where nothing is said.
                "gradient_clipping": 100.0,
                "fp16": {
                    "enabled": True,
                    "loss_scale": SCALE
                },
            },
        )
        engine.backward(engine(torch.ones(1, 4, dtype=torch.float16)).sum())
        # The gradient is 1.
        assert torch.equal(model.weight.grad, torch.full((1, 4), float(SCALE), dtype=torch.float16))
        engine.step()
        assert torch.equal(model.weight.detach().float(), torch.full((1, 4), 1 - LR))

# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

import pytest
import torch

import deepspeed
from deepspeed import comm as dist
from unit.common import DistributedTest


class TestBoundaryMicroBatch(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("steps", [1, 3])
    def test(self, steps):
        torch.manual_seed(2)
        model = torch.nn.Linear(4, 4)
        engine, optimizer, _, _ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            config={
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": steps,
                "bf16": {
                    "enabled": True
                },
                "data_types": {
                    "grad_accum_dtype": "fp32"
                },
                "zero_allow_untested_optimizer": True,
                "zero_optimization": {
                    "stage": 1
                },
            },
        )
        torch.manual_seed(20 + dist.get_rank())
        for _ in range(steps):
            engine.backward(engine(torch.randn(2, 4, dtype=torch.bfloat16)).float().square().mean())
            if engine.is_gradient_accumulation_boundary():
                for accumulator in optimizer.fp32_groups_gradients_flat:
                    mean = accumulator.clone()
                    torch.distributed.all_reduce(mean)
                    torch.testing.assert_close(accumulator, mean / dist.get_world_size())
            engine.step()

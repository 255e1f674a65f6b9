# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

import pytest
import torch

import deepspeed
from deepspeed import comm as dist
from unit.common import DistributedTest


class TestMeshParamGradients(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("stage", [0, 1, 2])
    def test(self, stage):
        torch.manual_seed(4)
        model = torch.nn.Linear(4, 4)
        engine, _, _, _ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            mesh_param=(1, 2),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "zero_allow_untested_optimizer": True,
                "zero_optimization": {
                    "stage": stage
                },
            },
        )
        # Each rank has other positions of the same sequence.
        torch.manual_seed(10 + dist.get_rank())
        engine.backward(engine(torch.randn(3, 4)).square().mean())
        engine.step()
        for name, param in engine.module.named_parameters():
            copies = [torch.empty_like(param) for _ in range(2)]
            torch.distributed.all_gather(copies, param.detach())
            assert torch.equal(*copies), f"{name} differs between ranks that share a sequence"

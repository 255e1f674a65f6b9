# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

from unittest import mock

import torch

import deepspeed
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import is_moe_param, split_params_into_different_moe_groups_for_optimizer
from unit.common import DistributedTest

WIDTH = 4


class MoEModel(torch.nn.Module):

    def __init__(self):
        super().__init__()
        self.dense = torch.nn.Linear(WIDTH, WIDTH)
        self.moe = MoE(WIDTH, torch.nn.Linear(WIDTH, WIDTH), num_experts=2, ep_size=2, min_capacity=0)

    def forward(self, batch):
        return self.moe(self.dense(batch))[0]


class TestExpertGradNorm(DistributedTest):
    world_size = 2

    def test(self):
        # A host computes in fp16 too, slowly; it counts as supported only where it is fast.
        with mock.patch.object(type(get_accelerator()), "is_fp16_supported", lambda accelerator: True):
            self._train()

    def _train(self):
        torch.manual_seed(5)
        model = MoEModel()
        groups = split_params_into_different_moe_groups_for_optimizer([{
            "params": list(model.parameters()),
            "name": "parameters"
        }])
        # FP16_Optimizer is chosen for FusedAdam.
        with mock.patch("deepspeed.runtime.engine.FusedAdam", torch.optim.SGD):
            engine, _, _, _ = deepspeed.initialize(
                model=model,
                optimizer=torch.optim.SGD(groups, lr=0.1),
                config={
                    "train_micro_batch_size_per_gpu": 4,
                    "fp16": {
                        "enabled": True,
                        "loss_scale": 8
                    },
                },
            )
        torch.manual_seed(11 + dist.get_rank())
        engine.backward(engine(torch.randn(4, WIDTH, dtype=torch.float16)).float().square().mean())
        dense, experts = torch.zeros([]), torch.zeros([])
        for param in engine.module.parameters():
            if param.grad is not None:
                total = experts if is_moe_param(param) else dense
                total += (param.grad.float() / 8).square().sum()
        torch.distributed.all_reduce(experts)
        engine.step()
        norm = torch.as_tensor(engine.get_global_grad_norm()).float()
        torch.testing.assert_close(norm, (dense + experts).sqrt())

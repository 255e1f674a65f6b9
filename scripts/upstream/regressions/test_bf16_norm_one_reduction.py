# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

from unittest import mock

import pytest
import torch

import deepspeed
from deepspeed import comm as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from unit.common import DistributedTest

WIDTH = 4


def config():
    return {
        "train_micro_batch_size_per_gpu": 4,
        "zero_allow_untested_optimizer": True,
        "bf16": {
            "enabled": True
        },
        "data_types": {
            "grad_accum_dtype": "fp32"
        },
        "zero_optimization": {
            "stage": 1
        },
    }


def float_reductions():
    """Replaces all_reduce by one that counts those of a single floating-point number."""
    sizes, all_reduce = [], dist.all_reduce

    def counted(tensor, *args, **kwargs):
        if tensor.is_floating_point() and tensor.numel() == 1:
            sizes.append(1)
        return all_reduce(tensor, *args, **kwargs)

    return sizes, mock.patch.object(dist, "all_reduce", counted)


class MoEModel(torch.nn.Module):

    def __init__(self, ep_sizes):
        super().__init__()
        self.dense = torch.nn.Linear(WIDTH, WIDTH)
        self.moe = torch.nn.ModuleList(
            MoE(WIDTH, torch.nn.Linear(WIDTH, WIDTH), num_experts=2, ep_size=size, min_capacity=0)
            for size in ep_sizes)

    def forward(self, batch):
        batch = self.dense(batch)
        for moe in self.moe:
            batch = batch + moe(batch)[0]
        return batch


class TestExperts(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("ep_sizes", [[1], [2], [1, 2]], ids=["ep1", "ep2", "both"])
    def test(self, ep_sizes):
        torch.manual_seed(5)
        model = MoEModel(ep_sizes)
        groups = split_params_into_different_moe_groups_for_optimizer([{
            "params": list(model.parameters()),
            "name": "parameters"
        }])
        engine, optimizer, _, _ = deepspeed.initialize(model=model,
                                                       optimizer=torch.optim.SGD(groups, lr=0.1),
                                                       config=config())
        torch.manual_seed(11 + dist.get_rank())
        engine.backward(engine(torch.randn(4, WIDTH, dtype=torch.bfloat16)).float().square().mean())
        dense, experts = optimizer.get_grads_for_norm()
        # Experts of a layer with ep_size 2 are on one rank each, of all others both ranks hold copies.
        total = torch.zeros([])
        for name, grads in [("dense", dense), *experts.items()]:
            part = sum(grad.square().sum() for grad in grads).clone()
            torch.distributed.all_reduce(part)
            total += part / (1 if name == "ep_size_2" else 2)
        reductions, patch = float_reductions()
        with patch:
            engine.step()
        assert len(reductions) == 1
        torch.testing.assert_close(torch.as_tensor(engine.get_global_grad_norm()).float(), total.sqrt())


class TensorParallel:
    """An mpu: two ranks that hold copies of parameters that are not sliced."""

    def __init__(self):
        self.own = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
        self.all = dist.new_group([0, 1])

    def get_model_parallel_rank(self):
        return dist.get_rank()

    def get_model_parallel_world_size(self):
        return 2

    def get_model_parallel_group(self):
        return self.all

    def get_data_parallel_rank(self):
        return 0

    def get_data_parallel_world_size(self):
        return 1

    def get_data_parallel_group(self):
        return self.own


class TestRankWithNothingToCount(DistributedTest):
    world_size = 2

    def test(self):
        torch.manual_seed(5)
        model = torch.nn.Linear(WIDTH, WIDTH)
        engine, _, _, _ = deepspeed.initialize(
            model=model,
            mpu=TensorParallel(),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            config=config(),
        )
        engine.backward(engine(torch.ones(4, WIDTH, dtype=torch.bfloat16)).float().square().mean())
        grads = [deepspeed.utils.safe_get_full_grad(param) for param in engine.module.parameters()]
        engine.step()
        expected = torch.linalg.vector_norm(torch.stack([grad.float().norm() for grad in grads]))
        torch.testing.assert_close(torch.as_tensor(engine.get_global_grad_norm()).float(), expected)

# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

from unittest import mock

import pytest
import torch

import deepspeed
from deepspeed import comm as dist
from unit.common import DistributedTest

GROUPS = 3


class TestGradNormOneReduction(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("offload", [False, True], ids=["device", "offload"])
    @pytest.mark.parametrize("stage", [1, 2])
    def test(self, stage, offload):
        torch.manual_seed(3)
        model = torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(GROUPS)))
        twin = torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(GROUPS)))
        twin.load_state_dict(model.state_dict())
        batch = torch.randn(2, 6)
        zero = {"stage": stage}
        if offload:
            zero["offload_optimizer"] = {"device": "cpu"}
        groups = [{"params": list(layer.parameters())} for layer in model]
        engine, _, _, _ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.SGD(groups, lr=0.1),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "gradient_clipping": 1.0,
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
                "zero_optimization": zero,
            },
        )
        engine.backward(engine(batch[dist.get_rank():dist.get_rank() + 1]).square().mean())
        twin(batch).square().mean().backward()
        expected = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in twin.parameters()]))

        reductions = []
        all_reduce = dist.all_reduce

        def counted(tensor, *args, **kwargs):
            if tensor.is_floating_point() and tensor.numel() <= GROUPS:
                reductions.append(tensor.numel())
            return all_reduce(tensor, *args, **kwargs)

        with mock.patch.object(dist, "all_reduce", counted):
            engine.step()
        assert len(reductions) == 1, f"{len(reductions)} reductions for the norm of {GROUPS} groups"
        torch.testing.assert_close(torch.as_tensor(engine.get_global_grad_norm()).float().cpu(), expected)


class OneRankPerStage:
    """An mpu: each rank holds another part of the model."""

    def __init__(self):
        self.own = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
        self.all = dist.new_group(list(range(dist.get_world_size())))

    def get_model_parallel_rank(self):
        return dist.get_rank()

    def get_model_parallel_world_size(self):
        return dist.get_world_size()

    def get_model_parallel_group(self):
        return self.all

    def get_data_parallel_rank(self):
        return 0

    def get_data_parallel_world_size(self):
        return 1

    def get_data_parallel_group(self):
        return self.own


class TestStagesWithOtherGroups(DistributedTest):
    world_size = 2

    def test(self):
        torch.manual_seed(7 + dist.get_rank())
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        for param in model.parameters():
            param.model_parallel = True
        groups = [{"params": list(model.parameters())}]
        if dist.get_rank() == 1:
            groups = [{"params": list(layer.parameters())} for layer in model]
        engine, _, _, _ = deepspeed.initialize(
            model=model,
            mpu=OneRankPerStage(),
            optimizer=torch.optim.SGD(groups, lr=0.1),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "zero_allow_untested_optimizer": True,
                "zero_optimization": {
                    "stage": 1
                },
            },
        )
        batch = torch.randn(1, 4)
        engine.backward(engine(batch).square().mean())
        grads = [deepspeed.utils.safe_get_full_grad(param) for param in engine.module.parameters()]
        expected = sum(grad.float().square().sum() for grad in grads)
        torch.distributed.all_reduce(expected)
        reductions = []
        all_reduce = dist.all_reduce

        def counted(tensor, *args, **kwargs):
            reductions.append(tensor.is_floating_point())
            # The other rank may issue no further collective: do not wait for it.
            assert sum(reductions) <= 2, ("the norm takes more collectives on a stage with more groups")
            return all_reduce(tensor, *args, **kwargs)

        with mock.patch.object(dist, "all_reduce", counted):
            engine.step()
        torch.testing.assert_close(torch.as_tensor(engine.get_global_grad_norm()).float(), expected.sqrt())

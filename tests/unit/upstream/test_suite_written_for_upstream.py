"""A suite as written for upstream, by upstream's names alone; it runs as it stands."""

import os

import pytest
import torch

import deepspeed
import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import groups, safe_get_full_fp32_param
from unit.common import (
    DistributedFixture,
    DistributedTest,
    allclose_on_all_ranks,
    enable_determinism,
    get_xdist_worker_id,
    preferred_dtype,
    reduce_boolean_flags,
)
from unit.simple_model import (
    LinearStack,
    SimpleFrozenModel,
    SimpleModel,
    SimpleMoEModel,
    SimpleOptimizer,
    UnusedParametersModel,
    args_from_dict,
    random_dataloader,
    random_dataset,
    sequence_dataloader,
)

HIDDEN = 8


def ds_config(zero_stage, **more):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 0.015}},
        "zero_optimization": {"stage": zero_stage},
        "bf16": {"enabled": preferred_dtype() == torch.bfloat16},
        **more,
    }


def engine_of(model, zero_stage):
    config, params = ds_config(zero_stage), model.parameters()
    engine, _, _, _ = deepspeed.initialize(config=config, model=model, model_parameters=params)
    return engine


def train(engine, loader):
    for batch in loader:
        loss = engine(batch[0], batch[1])
        engine.backward(loss)
        engine.step()
    return loss


class BaselineModel(DistributedFixture):
    """Other fixtures are this one with ranks of their own."""

    world_size = 2

    def run(self, class_tmpdir, zero_stage):
        model = SimpleModel(HIDDEN, nlayers=2)
        engine = engine_of(model, zero_stage)
        train(engine, random_dataloader(engine, 8, HIDDEN, engine.device))
        engine.save_checkpoint(class_tmpdir, tag=f"{type(self).__name__}{zero_stage}")
        full = {name: safe_get_full_fp32_param(p) for name, p in engine.named_parameters()}
        if dist.get_rank() == 0:
            torch.save(full, os.path.join(class_tmpdir, f"{type(self).__name__}{zero_stage}.pt"))
        dist.barrier()


class baseline_ws1(BaselineModel):
    world_size = 1


@pytest.mark.parametrize("zero_stage", [2])
class TestLoadedByOtherRanks(DistributedTest):
    world_size = 2
    reuse_dist_env = True

    def test(self, class_tmpdir, zero_stage, baseline_ws1):
        assert dist.get_world_size() == self.world_size == int(os.environ["WORLD_SIZE"])
        model = SimpleModel(HIDDEN, nlayers=2)
        engine = engine_of(model, zero_stage)
        path, _ = engine.load_checkpoint(class_tmpdir, tag=f"baseline_ws1{zero_stage}")
        assert path is not None
        held = torch.load(os.path.join(class_tmpdir, f"baseline_ws1{zero_stage}.pt"))
        for name, param in engine.named_parameters():
            allclose_on_all_ranks(safe_get_full_fp32_param(param), held[name], rtol=0, atol=0)


class TestSimpleModels(DistributedTest):
    world_size = 2
    requires_cuda_env = False
    non_daemonic_procs = True

    @pytest.mark.parametrize("zero_stage", [1, 3])
    def test_models(self, tmpdir, zero_stage):
        get_accelerator().manual_seed(3)
        models = [SimpleFrozenModel(HIDDEN), UnusedParametersModel(HIDDEN)]
        models += [SimpleModel(HIDDEN, empty_grad=True), LinearStack(*[HIDDEN] * 3, num_layers=2)]
        for model in models:
            args = args_from_dict(tmpdir, ds_config(zero_stage))
            trained = [p for p in model.parameters() if p.requires_grad]
            engine, optimizer, _, _ = deepspeed.initialize(
                args=args, model=model, model_parameters=trained
            )
            loss = train(engine, random_dataloader(engine, 4, HIDDEN, engine.device))
            assert reduce_boolean_flags(torch.isfinite(loss).item())
            assert engine.global_steps == 2 and optimizer is engine.optimizer

    def test_client_optimizer_and_training_data(self):
        model = SimpleModel(HIDDEN)
        config = ds_config(2, zero_allow_untested_optimizer=True)
        del config["optimizer"]
        data = random_dataset(8, HIDDEN, torch.device("cpu"))
        optimizer = SimpleOptimizer(model.parameters())
        engine, _, loader, _ = deepspeed.initialize(
            config=config, model=model, optimizer=optimizer, training_data=data
        )
        batches = [(x.to(engine.device), y.to(engine.device)) for x, y in loader]
        assert len(batches) == 2 and train(engine, batches).dim() == 0

    @enable_determinism(5)
    def test_experts(self):
        model = SimpleMoEModel(HIDDEN, num_experts=2, ep_size=2)
        engine = engine_of(model, 1)
        loader = sequence_dataloader(engine, 4, HIDDEN, engine.device, seq_len=4)
        assert reduce_boolean_flags(torch.isfinite(train(engine, loader)).item())
        assert dist.get_world_size(group=groups._get_expert_parallel_group("ep_size_2")) == 2

    @pytest.mark.world_size(1)
    def test_own_number_of_ranks(self):
        assert dist.get_world_size() == 1
        assert reduce_boolean_flags(False, any) is False


class TestWithoutGroup(DistributedTest):
    world_size = 2
    init_distributed = False

    def test(self):
        assert not dist.is_initialized()
        deepspeed.init_distributed(dist_backend=get_accelerator().communication_backend_name())
        assert dist.get_world_size() == 2 and os.environ["LOCAL_RANK"] == str(dist.get_rank())
        dist.barrier()  # the first rank has the store, by which the other may still be joining


def test_worker():
    number = get_xdist_worker_id()
    assert number is None or number >= 0

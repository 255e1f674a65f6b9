"""AutoTP on two ranks: what is checked, other ways to ask for it, and what trains beside it."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.module_inject import LinearAllreduce, LinearLayer
from deepspeed.module_inject.layers import GatherReplacedLayerParams
from deepspeed.runtime.config import DeepSpeedConfigError
from deepspeed.runtime.sharding.model_ranks import is_model_parallel_parameter
from deepspeed.utils import safe_get_full_grad
from deepspeed.utils.exceptions import MisuseError
from deepspeed.verify import check_budgets, check_streams
from unit.common import DistributedTest
from unit.models import drawn, seeded
from unit.one_process import train
from unit.v1.looping import each
from unit.v1.tensor.architectures import PlainDecoder, batch_of, model_of
from unit.v1.tensor.megatron import Mpu
from unit.v1.tensor.test_autotp import (
    CHECKED,
    alike,
    assert_close,
    check_training,
    config,
    start,
    whole,
)


class Gated(nn.Module):
    """An MLP of two layers in one, with names that say nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.both = nn.Linear(8, 24)
        self.back = nn.Linear(12, 8)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        one, other = self.both(self.norm(value)).chunk(2, -1)
        return value + self.scale * self.back(torch.tanh(one) * other)


class Own(nn.Module):
    """A model of no library."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Gated(), Gated()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


REFUSED: list[dict[str, Any]] = [
    {"tp_size": 3},
    {"tp_size": 2, "tp_group": 1},
    {"tp_size": 2, "tp": {"tp_group": 1}},
    {"tp_size": 2, "preset_model": "x"},
]
SPECS = [
    {"patterns": [r".*\.both\.weight$"], "partition_type": "column", "shape": [2, -1]},
    {"patterns": [r".*\.back\.weight$"], "partition_type": "row"},
    {"patterns": [r".*\.scale$"], "partition_type": "skip"},
]


class TestTwoRanks(DistributedTest):
    """One group of ranks for all: to start them takes longer than a check."""

    world_size = 2

    def test_two_ranks(self) -> None:
        self.check_other_data_or_random_numbers_raise()
        self.check_replicas_stay_equal_with_dropout()
        self.check_overlapped_recomputed_and_checked()
        self.check_on_streams()
        self.check_layers_by_patterns()
        self.check_heads_that_do_not_say_their_width()
        self.check_cut_before_the_engine()
        self.check_what_cannot_be_is_refused_before_anything_changes()
        self.check_half_precision()
        self.check_scripts_read_whole_parameters()

    def check_other_data_or_random_numbers_raise(self) -> None:
        # Kills: training on, with wrong gradients.
        engine = start(model_of("llama"), 2, 1)
        with pytest.raises(MisuseError, match=r"ranks \[0, 1\] .* different batches"):
            engine(**batch_of(2, dist.get_rank()))
        data = batch_of(2, 0)
        with pytest.raises(ValueError, match="that is not cut while ranks share the layers"):
            start(model_of("llama"), 0, 1)
        longer = {key: value[:, : 5 + dist.get_rank()] for key, value in data.items()}
        with pytest.raises(MisuseError, match="different batches"):
            engine(**longer)
        torch.manual_seed(dist.get_rank())
        engine(**data)  # which draws nothing
        engine.module.config.attention_dropout = 0.1
        with pytest.raises(MisuseError, match="random states differ"):
            engine(**data)
        with torch.no_grad():
            engine(**data)
        engine.destroy()

    @each(kwargs=[{"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}], stage=[0, 2])
    def check_replicas_stay_equal_with_dropout(self, kwargs: dict[str, Any], stage: int) -> None:
        # Kills: ranks that seed themselves differently drop out different residuals.
        model = seeded(model_of, "gpt2", seed=dist.get_rank(), **kwargs)
        engine = start(model, 2, stage)
        train(engine, [batch_of(2, 0)] * 2)
        for name, param in engine.module.named_parameters():
            if not getattr(param, "tensor_model_parallel", False):
                parts = [torch.empty_like(param) for _ in range(2)]
                dist.all_gather(parts, param.detach())
                assert torch.equal(*parts), name
        engine.destroy()

    @each(name=["qwen3", "gpt2"])
    def check_overlapped_recomputed_and_checked(self, name: str) -> None:
        # Kills: an input's gradient that is read before it has come; the ledger or the intent check
        # taking layers' collectives for gradients'.
        model, first = alike(model_of, name)
        if name == "qwen3":
            model.gradient_checkpointing_enable()
        block = {"autotp_size": 2, "tp_overlap_comm": True}
        check_training(start(model, 2, 2, tensor_parallel=block, **CHECKED), first)

    def check_on_streams(self) -> None:
        # Kills: an input's gradient that is read before it has come; a host that waits for batches
        # to be compared.
        for overlaps in (False, True):
            with simulate(schedule=1, backward_streams=2), check_streams(), check_budgets():
                model, first = alike(model_of, "qwen3", num_hidden_layers=1)
                block = {"autotp_size": 2, "tp_overlap_comm": overlaps}
                engine = start(model, 2, 2, tensor_parallel=block)
                check_training(engine, first, ends=False)
                data = batch_of(2, 0)
                for _ in range(3):  # with the one before, the first four are checked
                    engine(**data)
                with get_accelerator().count_host_waits() as waits:
                    engine.backward(engine(**data).loss)
                    assert not waits.inside("deepspeed/runtime"), waits.by_place
                engine.destroy()

    @each(own_ranks=[False, True])
    def check_layers_by_patterns(self, own_ranks: bool) -> None:
        # Kills: patterns that are read and not used; a shape that is not; ranks of the engine's
        # where the client says which share layers.
        model, first = alike(Own)
        block = {"autotp_size": 2, "partition_config": {"layer_specs": SPECS}}
        mpu = Mpu(2) if own_ranks else None
        keys = config(2, 1, tensor_parallel=block)
        engine = deepspeed.initialize(model=model, config=keys, mpu=mpu)[0]
        assert mpu is None or engine.mpu is mpu
        assert isinstance(engine.module.blocks[0].both, LinearLayer)
        assert isinstance(engine.module.blocks[1].back, LinearAllreduce)
        x = drawn(0, 4, 8)
        first(x).backward()
        engine.backward(engine(x))
        named = engine.module.named_parameters()
        found = {name: safe_get_full_grad(param) for name, param in named}
        for name, grad in whole(engine, found).items():
            assert_close(name, grad, first.get_parameter(name).grad, 1.0)
        engine.destroy()

    def check_heads_that_do_not_say_their_width(self) -> None:
        # Kills: half a head on each rank; a number of heads that stays whole.
        model, first = alike(PlainDecoder)
        engine = start(model, 2, 1)
        attention = model.blocks[0].attention
        assert (attention.num_heads, attention.num_kv_heads) == (2, 1)
        check_training(engine, first)

    @each(says=[True, False])
    def check_cut_before_the_engine(self, says: bool) -> None:
        # Kills: an engine that averages over ranks with other slices, or cuts again; parameters
        # that an optimizer made before no longer holds.
        model = seeded(model_of, "mistral")
        first = copy.deepcopy(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        same = deepspeed.tp_model_init(model, tp_size=2, dtype=torch.float32)
        assert same is model and model.model.layers[0].mlp.up_proj.weight.shape == (12, 16)
        keys = config(2, 1)
        del keys["optimizer"]
        if not says:
            del keys["tensor_parallel"]
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=keys)[0]
        assert engine.dp_world_size == 1 and engine.get_tensor_parallel_rank() == dist.get_rank()
        check_training(engine, first)
        with pytest.raises(DeepSpeedConfigError, match="autotp_size"):
            deepspeed.tp_model_init(model, tp_size=4, dtype=torch.float32)

    @each(name=["llama", "gpt2"])
    def check_scripts_read_whole_parameters(self, name: str) -> None:
        """As OpenRLHF and dlrover push weights, one parameter after the other."""
        # Kills: this rank's slice, slices of stacked ones side by side, a slice that does not come
        # back, training that goes on with another one, a change that is lost.
        model, whole_model = alike(model_of, name)
        first = dict(whole_model.named_parameters())
        engine = start(model, 2, 2)
        for key, param in engine.module.named_parameters():
            own = param.detach().clone()
            with GatherReplacedLayerParams([param], engine.module, enabled=False):
                assert torch.equal(param, own)
            with GatherReplacedLayerParams(param, engine.module):
                assert torch.equal(param, first[key]), key
            assert torch.equal(param, own), key
        cut = [param for param in engine.module.parameters() if is_model_parallel_parameter(param)]
        slices = [param.detach().clone() for param in cut]
        gathered = GatherReplacedLayerParams(cut[:2], engine.module)
        with pytest.raises(ValueError, match="(bias|weight) changed inside the block"), gathered:
            cut[1].data[:] += 1
        with pytest.raises(RuntimeError, match="mine"), gathered:
            cut[1].data[:] += 1
            raise RuntimeError("mine")
        assert all(map(torch.equal, cut, slices))
        with pytest.raises(ValueError, match="give the whole model"):
            GatherReplacedLayerParams(cut, nn.Sequential(engine.module))
        with GatherReplacedLayerParams(list(model.parameters()), engine.module):
            pass
        check_training(engine, whole_model)

    @each(kwargs=REFUSED)
    def check_what_cannot_be_is_refused_before_anything_changes(
        self, kwargs: dict[str, Any]
    ) -> None:
        model = model_of("opt")
        shapes = [param.shape for param in model.parameters()]
        with pytest.raises(DeepSpeedConfigError, match="autotp_size|tp_group|preset_model"):
            deepspeed.tp_model_init(model, dtype=None, **kwargs)
        assert shapes == [param.shape for param in model.parameters()]

    @each(enabled=["bf16", "fp16", "torch_autocast"])
    def check_half_precision(self, enabled: str) -> None:
        # Kills: layers that cast otherwise than those they were.
        model, first = alike(model_of, "llama")
        block = {"autotp_size": 2, "tp_overlap_comm": enabled == "torch_autocast"}
        engine = start(model, 2, 2, tensor_parallel=block, **{enabled: {"enabled": True}})
        data = batch_of(2, 0)
        loss = engine(**data).loss
        assert loss.item() == pytest.approx(first(**data).loss.item(), rel=0.03)
        engine.backward(loss)
        engine.step()
        assert engine.get_global_grad_norm() is None or float(engine.get_global_grad_norm()) > 0
        engine.destroy()

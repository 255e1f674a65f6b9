"""Adapters that peft merges into a sharded base and takes out again, as trl and ms-swift do."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.runtime.zero import GatheredParameters
from unit.common import DistributedTest
from unit.models import drawn
from unit.one_process import mean_square, train

peft = pytest.importorskip("peft")

WIDTH = 24
STEPS = 2


def adapted(base: torch.dtype, adapter: torch.dtype, **settings: Any) -> Any:
    """A small model with adapters that are not zero, the same on every rank."""
    torch.manual_seed(3)
    layers = [nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)]
    init = settings.get("use_dora", False)
    chosen = peft.LoraConfig(r=4, target_modules=["0", "2"], init_lora_weights=init, **settings)
    model = peft.get_peft_model(nn.Sequential(*layers).to(base), chosen)
    for name, param in model.named_parameters():
        if "lora_" in name:
            param.data = (param.data + 0.1 * torch.randn(param.shape)).to(adapter)
    return model


def engine_of(model: Any, block: dict[str, Any]) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
        # Norms and biases stay whole between steps, weights do not.
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": WIDTH},
        **block,
    }
    return deepspeed.initialize(model=model, config=config)[0]


def as_trl(model: Any) -> list[dict[str, torch.Tensor]]:
    """What is pushed if everything is gathered, merged and taken out at once."""
    with GatheredParameters(list(model.parameters())):
        model.merge_adapter()
        pushed = {name: param.data.clone() for name, param in model.named_parameters()}
        model.unmerge_adapter()
    return [pushed]


def as_swift(model: Any) -> list[dict[str, torch.Tensor]]:
    """The same group by group: the layers of one are merged, others are left sharded."""
    pushed: list[dict[str, torch.Tensor]] = []
    for layer in model.base_model.model:
        with GatheredParameters(list(layer.parameters())):
            merges = hasattr(layer, "merge")
            if merges:
                layer.merge()
            state = model.state_dict(keep_vars=True).items()
            pushed.append({name: value.data.clone() for name, value in state if value.numel()})
            if merges:
                layer.unmerge()
    return pushed


class TestMerging(DistributedTest):
    """Against the same model that nobody merges."""

    world_size = 2

    @pytest.mark.parametrize("way", [as_trl, as_swift])
    @pytest.mark.parametrize(
        "base, adapter, settings",
        [
            (torch.bfloat16, torch.bfloat16, {}),
            (torch.float16, torch.float16, {}),
            (torch.float32, torch.float32, {}),
            (torch.bfloat16, torch.float32, {}),
            (torch.bfloat16, torch.bfloat16, {"use_dora": True}),
        ],
    )
    def test_merge_push_unmerge(
        self, way: Any, base: torch.dtype, adapter: torch.dtype, settings: dict[str, Any]
    ) -> None:
        # Kills: what rounding leaves that raises, or that trains on in what is whole.
        block: dict[str, Any] = {}
        if base == adapter != torch.float32:
            block = {{torch.bfloat16: "bf16", torch.float16: "fp16"}[base]: {"enabled": True}}
        plain = adapted(base, adapter, **settings)
        model = copy.deepcopy(plain)
        plain.merge_adapter()
        wanted = {name: param.detach().clone() for name, param in plain.named_parameters()}
        plain.unmerge_adapter()
        assert not all(map(torch.equal, plain.parameters(), model.parameters()))
        ends = []
        for merges in (False, True):
            trained = copy.deepcopy(model)
            engine = engine_of(trained, block)
            if merges:
                pushed = way(trained)
                for name, value in wanted.items():
                    shown = [part[name] for part in pushed if name in part]
                    assert any(torch.equal(seen, value) for seen in shown), name
            for step in range(STEPS):
                x = drawn(10 * step + dist.get_rank(), 2, WIDTH).to(base)
                train(engine, [x], mean_square)
                if merges:
                    way(trained)
            engine.destroy()
            ends.append([param.detach().clone() for param in trained.parameters()])
        assert all(map(torch.equal, *ends))

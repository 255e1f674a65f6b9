"""Checkpoints of stage 3: resumed bit for bit, made whole, and of another number of ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed.checkpoint.files import CheckpointError
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from unit.common import DistributedFixture, DistributedTest
from unit.v1.zero.stage3_models import Net, config_of, make_net, train


def engine_of(precision: str, gathers: bool = True, seed: int = 0) -> tuple[Any, Net]:
    torch.manual_seed(seed)
    model = Net()
    config = config_of(
        3,
        stage3_param_persistence_threshold=10,
        stage3_gather_16bit_weights_on_model_save=gathers,
    )
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0], model


def masters(model: Net) -> dict[str, torch.Tensor]:
    return {
        name: safe_get_full_fp32_param(param).clone()
        for name, param in model.named_parameters()
        if param.requires_grad
    }


class TestResume(DistributedTest):
    """On as many ranks."""

    world_size = [1, 2]

    @pytest.mark.parametrize("precision", ["fp32", "bf16"])
    def test(self, precision: str, tmp_path: Path) -> None:
        # Kills: moments, masters or frozen shards of another parameter, weights that do not follow.
        engine, model = engine_of(precision)
        train(engine, 2)
        engine.save_checkpoint(str(tmp_path), tag="two")
        assert engine.save_16bit_model(str(tmp_path / "whole"))
        train(engine, 2, first=2)
        wanted = masters(model)
        other, resumed = engine_of(precision, seed=1)
        train(other, 1, first=7)
        other.load_checkpoint(str(tmp_path), tag="two")
        assert other.global_steps == 2
        train(other, 2, first=2)
        found = masters(resumed)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        other.load_checkpoint(str(tmp_path), tag="two", load_module_only=True)
        whole = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), "two")
        found = masters(resumed)
        assert all(torch.equal(found[name], whole[name]) for name in found)
        exported = torch.load(tmp_path / "whole" / "pytorch_model.bin")
        assert exported.keys() == whole.keys()
        for name, value in exported.items():
            assert torch.equal(value, whole[name].to(value.dtype)), name
        assert exported["head.weight"].data_ptr() == exported["embed.weight"].data_ptr()
        engine.destroy()
        other.destroy()

    def test_without_leave_to_gather(self, tmp_path: Path) -> None:
        # Kills: a whole model on one rank that nobody asked for.
        engine, _ = engine_of("fp32", gathers=False)
        assert not engine.save_16bit_model(str(tmp_path))
        assert not os.listdir(tmp_path)
        with pytest.raises(ValueError, match="gather_16bit_weights_on_model_save"):
            engine._zero3_consolidated_16bit_state_dict()
        engine.destroy()


class saved_by_three(DistributedFixture):
    """A folder of three ranks."""

    world_size = 3

    def run(self, class_tmpdir: str) -> None:
        engine, _ = engine_of("fp32")
        engine.save_checkpoint(os.path.join(class_tmpdir, "three"))


class TestOthers(DistributedTest):
    """Folders that this run cannot go on from."""

    world_size = 2

    def test(self, saved_by_three: None, class_tmpdir: str) -> None:
        # Kills: shards of other ranks loaded as they are.
        engine, model = engine_of("fp32")
        before = masters(model)
        with pytest.raises(CheckpointError, match="by 2 ranks"):
            engine.load_checkpoint(os.path.join(class_tmpdir, "three"))
        after = masters(model)
        assert all(torch.equal(before[name], after[name]) for name in before)
        below = os.path.join(class_tmpdir, "below")
        engine.save_checkpoint(os.path.join(class_tmpdir, "two"))
        engine.destroy()
        stage2 = make_net()
        optimizer = torch.optim.AdamW([p for p in stage2.parameters() if p.requires_grad])
        second = deepspeed.initialize(model=stage2, optimizer=optimizer, config=config_of(2))[0]
        second.save_checkpoint(below)
        with pytest.raises(CheckpointError, match="stage 3"):
            second.load_checkpoint(os.path.join(class_tmpdir, "two"))
        third, _ = engine_of("fp32")
        with pytest.raises(CheckpointError, match="below ZeRO stage 3"):
            third.load_checkpoint(below)

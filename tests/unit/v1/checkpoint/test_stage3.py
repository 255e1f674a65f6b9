"""Checkpoints of stage 3: resumed bit for bit, made whole, in part."""

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed import comm as dist
from deepspeed.checkpoint.verification import verify_checkpoint
from deepspeed.runtime.checkpointing import whole_weights
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.runtime.zero.gathering.gather_unit import GatherUnit
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as fp32_weights
from unit.common import DistributedTest
from unit.models import seeded
from unit.v1.zero.stage3.models import Net, config_of, train

from . import runs
from .runs import by_name, decay_groups, differences, of_kind, on_rank_0, refused

PRECISIONS = ("fp32", "bf16")


def engine_of(precision: str, stage: int = 3, seed: int = 0, **more: Any) -> Any:
    """With two parameter groups, a frozen layer, tied weights and a parameter that no loss uses;
    what is not of `checkpoint` is of `zero_optimization`.
    """
    files = {key: more.pop(key) for key in ("writer", "verify") if key in more}
    whole = {"stage3_gather_16bit_weights_on_model_save": True}
    at_stage_3 = {"stage3_param_persistence_threshold": 10, **whole} if stage == 3 else {}
    config = {**config_of(stage, **{**at_stage_3, **more}), "checkpoint": files}
    if precision != "fp32":
        config[precision] = {"enabled": True}
    model = seeded(Net, seed=seed)
    optimizer = torch.optim.AdamW(decay_groups(model), lr=0.01)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def held(engine: Any) -> dict[str, Any]:
    """Weights, masters, moments and step counts by name, on every rank."""
    return {"steps": engine.global_steps, **by_name(engine)}


def masters(engine: Any) -> dict[str, torch.Tensor]:
    return of_kind(by_name(engine), "master")


class TestResume(DistributedTest):
    """On as many ranks."""

    world_size = [1, 2]

    @pytest.mark.parametrize("precision", PRECISIONS)
    def test(self, precision: str, tmp_path: Path) -> None:
        # Kills: moments, masters or frozen shards of another parameter, weights that do not follow.
        engine = engine_of(precision)
        train(engine, 2)
        engine.save_checkpoint(tmp_path, tag="two")
        assert engine.save_16bit_model(tmp_path / "whole")
        train(engine, 2, first=2)
        other = engine_of(precision, seed=1)
        train(other, 1, first=7)
        other.load_checkpoint(tmp_path, tag="two")
        assert other.global_steps == 2
        train(other, 2, first=2)
        assert differences(masters(engine), masters(other)) == []
        other.load_checkpoint(tmp_path, tag="two", load_module_only=True)
        assert other.global_steps == 4
        exported = torch.load(tmp_path / "whole" / "pytorch_model.bin")
        fp32 = fp32_weights(tmp_path, "two")
        found = masters(other)
        assert all(torch.equal(found[name], fp32[name]) for name in found)
        assert exported.keys() == fp32.keys()
        for name, value in exported.items():
            assert torch.equal(value, fp32[name].to(value.dtype)), name
        assert exported["head.weight"].data_ptr() == exported["embed.weight"].data_ptr()
        engine.destroy()
        other.destroy()

    def test_without_leave_to_gather(self, tmp_path: Path) -> None:
        # Kills: a whole model on one rank that nobody asked for, a refusal to who asks for it.
        engine = engine_of("fp32", stage3_gather_16bit_weights_on_model_save=False)
        assert not engine.save_16bit_model(tmp_path)
        assert not os.listdir(tmp_path)
        for stage in ("zero3_", ""):
            gathered = getattr(engine, f"_{stage}consolidated_16bit_state_dict")()
            with GatheredParameters(list(engine.module.parameters())):
                wanted = engine.module.state_dict()
                assert differences(dict(gathered or wanted), dict(wanted)) == []
            assert (gathered is None) == (dist.get_rank() > 0)
        engine.destroy()


class TestWhole(DistributedTest):
    """`save_16bit_model` and what it is made of."""

    world_size = 2

    def test_one_unit_is_whole_at_a_time(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Kills: a rank that gathers everything, a file made of a whole state dict.
        engine = engine_of("bf16", stage3_max_live_parameters=0)
        engine.module.register_buffer("counted", torch.arange(3))
        params = list(engine.module.parameters())
        offload = engine.parameter_offload
        most = max(unit.numel for unit in (*offload.units, *offload.persistent_units))
        most += sum(unit.numel for unit in offload.persistent_units)
        seen: list[int] = []
        hold = whole_weights.hold_whole

        def counting(chosen: Any) -> None:
            hold(chosen)
            seen.append(sum(param.numel() for param in params))

        monkeypatch.setattr(whole_weights, "hold_whole", counting)
        gc.collect()
        gc.disable()  # memory must go by itself, and not when circles are looked for
        engine.save_16bit_model(tmp_path)
        left = [one for one in gc.get_objects() if isinstance(one, GatherUnit)]
        gc.enable()
        assert not {one.name for one in left} & {"read by hand"}
        assert max(seen) <= most < sum(param.ds_numel for param in params)
        gathered = engine._zero3_consolidated_16bit_state_dict()
        assert (gathered is None) == (dist.get_rank() > 0)
        assert max(seen) <= most
        saved = torch.load(tmp_path / "pytorch_model.bin")
        assert differences(dict(saved), dict(gathered or saved)) == []
        assert torch.equal(saved["counted"], torch.arange(3))
        assert saved["embed.weight"].dtype is torch.bfloat16
        trained = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
        engine.save_16bit_model(tmp_path, "trained.bin", exclude_frozen_parameters=True)
        without = {"frozen.weight", "frozen.bias"}
        assert saved.keys() - torch.load(tmp_path / "trained.bin").keys() == without
        assert trained is None or saved.keys() - trained.keys() == without
        engine.destroy()

    def test_what_cannot_be_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        # Kills: a rank that waits in a gather for one that has raised; half a file.
        engine = engine_of("fp32")

        def full(*arguments: Any) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "pwrite", full)
        with refused("rank 0: OSError.*No space"):
            engine.save_16bit_model(tmp_path / "full")
        monkeypatch.undo()
        assert not (tmp_path / "full" / "pytorch_model.bin").exists()
        (tmp_path / "file").write_text("")
        with refused("rank 0: "):
            engine.save_16bit_model(tmp_path / "file")
        train(engine, 1)
        assert engine.save_16bit_model(tmp_path / "full")
        written = torch.load(tmp_path / "full" / "pytorch_model.bin")
        assert masters(engine).keys() <= written.keys()
        engine.destroy()

    def test_in_the_background(self, tmp_path: Path) -> None:
        # Kills: a file of shards that the next step has changed already, one without a manifest.
        engine = engine_of("fp32", writer={"type": "fast", "decoupled": True})
        train(engine, 2)
        wanted = held(engine)
        engine.save_checkpoint(tmp_path, tag="two")
        train(engine, 2, first=2)
        engine.load_checkpoint(tmp_path, tag="two")
        assert differences(wanted, held(engine)) == []
        assert verify_checkpoint(str(tmp_path), "two") == []
        path = tmp_path / "two" / "zero_pp_rank_1_mp_rank_00_model_states.pt"
        on_rank_0(lambda: runs.put(path, path.read_bytes()[:-1]))
        with refused("zero_pp_rank_1_mp_rank_00_model_states.pt"):
            engine.load_checkpoint(tmp_path, tag="two")
        assert differences(wanted, held(engine)) == []
        engine.destroy()

    def test_some_of_what_is_usual(self, tmp_path: Path) -> None:
        # Kills: frozen parameters asked for that were left out, or overwritten by something; a
        # KeyError, on one rank or after weights were changed; weights that only a training run can
        # load.
        engine = engine_of("fp32")
        train(engine, 2)
        engine.save_checkpoint(tmp_path, tag="thawed", exclude_frozen_parameters=True)
        engine.save_checkpoint(tmp_path, tag="unsaid")
        wanted = held(engine)
        engine.destroy()
        config = {**config_of(3), "bf16": {"enabled": True}}
        evaluated = deepspeed.initialize(model=seeded(Net, seed=5), config=config)[0]
        evaluated.load_checkpoint(tmp_path, tag="unsaid")
        found = {name: runs.whole(param) for name, param in evaluated.module.named_parameters()}
        rounded = {name: value.bfloat16() for name, value in of_kind(wanted, "weight").items()}
        assert differences(rounded, found) == []
        evaluated.destroy()

        def say_no_world() -> None:
            (tmp_path / "unsaid" / "manifest.json").unlink()
            for path in (tmp_path / "unsaid").glob("zero_pp_rank_*_model_states.pt"):
                state = torch.load(path)
                del state["dp_world_size"]
                torch.save(state, path)

        on_rank_0(say_no_world)
        for stage in (3, 1):
            other = engine_of("fp32", stage, seed=6, verify="off")
            train(other, 1)
            before = held(other)
            with refused("a model file has no 'dp_world_size'"):
                other.load_checkpoint(tmp_path, tag="unsaid")
            other._config.tree.checkpoint.verify = "full"
            with refused("frozen.weight is missing"):
                other.load_checkpoint(tmp_path, tag="thawed")
            assert differences(before, held(other)) == []
            other.load_checkpoint(tmp_path, tag="thawed", load_module_strict=False)
            frozen = {name: before[name] for name in ("weight.frozen.weight", "weight.frozen.bias")}
            assert differences({**wanted, **frozen}, held(other)) == []
            other.destroy()

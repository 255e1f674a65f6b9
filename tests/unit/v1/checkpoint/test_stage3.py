"""Checkpoints of stage 3: resumed bit for bit, by other ranks, at other stages, made whole."""

import gc
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import deepspeed
from deepspeed import comm as dist
from deepspeed.checkpoint import ds_to_universal
from deepspeed.checkpoint.files import CheckpointError
from deepspeed.checkpoint.verification import verify_checkpoint
from deepspeed.runtime.checkpointing import whole_weights
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.runtime.zero.gathering.gather_unit import GatherUnit
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from unit.common import DistributedFixture, DistributedTest
from unit.v1.zero.stage3.models import Net, config_of, train

from .runs import differences, moment, whole

WHOLE = "DS_RESHARD_MATRIX" in os.environ
PRECISIONS = ("fp32", "bf16")
STAGES = (0, 1, 2, 3)
WORLDS = (1, 2, 3)


def engine_of(
    precision: str,
    stage: int = 3,
    seed: int = 0,
    universal: bool = False,
    writer: Any = None,
    verify: str = "full",
    **zero: Any,
) -> tuple[Any, Net]:
    """With two parameter groups, a frozen layer, tied weights and a parameter that no loss uses."""
    torch.manual_seed(seed)
    model = Net()
    at_stage_3 = {
        "stage3_param_persistence_threshold": 10,
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    config = config_of(stage, **{**(at_stage_3 if stage == 3 else {}), **zero})
    config["checkpoint"] = {"load_universal": universal, "writer": writer, "verify": verify}
    if precision != "fp32":
        config[precision] = {"enabled": True}
    trained = [param for param in model.parameters() if param.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [param for param in trained if param.dim() > 1]},
        {"params": [param for param in trained if param.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0], model


def held(engine: Any, model: Net, moments: bool = True) -> dict[str, Any]:
    """Weights, masters, moments and step counts by name, on every rank."""
    found: dict[str, Any] = {"steps": engine.global_steps}
    for name, param in model.named_parameters():
        found[f"weight.{name}"] = whole(param)
        if not param.requires_grad:
            continue
        linked = hasattr(param, "_hp_mapping")
        master = safe_get_full_fp32_param(param) if linked else None
        found[f"master.{name}"] = (found[f"weight.{name}"] if master is None else master).clone()
        for key in ("exp_avg", "exp_avg_sq") if moments else ():
            found[f"{key}.{name}"] = moment(engine, param, key)
    return found


def different_weights(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    """Which weights differ, of what two engines held."""
    names = [name for name in left if name.startswith("weight.")]
    return [name for name in names if not torch.equal(left[name], right[name])]


def masters(model: Net) -> dict[str, torch.Tensor]:
    """Of every trained parameter."""
    return {
        name: safe_get_full_fp32_param(param).clone()
        for name, param in model.named_parameters()
        if param.requires_grad
    }


class TestResume(DistributedTest):
    """On as many ranks."""

    world_size = [1, 2]

    @pytest.mark.parametrize("precision", PRECISIONS)
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
        assert other.global_steps == 4
        exported = torch.load(tmp_path / "whole" / "pytorch_model.bin")
        fp32 = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), "two")
        found = masters(resumed)
        assert all(torch.equal(found[name], fp32[name]) for name in found)
        assert exported.keys() == fp32.keys()
        for name, value in exported.items():
            assert torch.equal(value, fp32[name].to(value.dtype)), name
        assert exported["head.weight"].data_ptr() == exported["embed.weight"].data_ptr()
        engine.destroy()
        other.destroy()

    def test_without_leave_to_gather(self, tmp_path: Path) -> None:
        # Kills: a whole model on one rank that nobody asked for, a refusal to who asks for it.
        engine, _ = engine_of("fp32", stage3_gather_16bit_weights_on_model_save=False)
        assert not engine.save_16bit_model(str(tmp_path))
        assert not os.listdir(tmp_path)
        for get in (
            engine._zero3_consolidated_16bit_state_dict,
            engine._consolidated_16bit_state_dict,
        ):
            gathered = get()
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
        engine, model = engine_of("bf16", stage3_max_live_parameters=0)
        engine.module.register_buffer("counted", torch.arange(3))
        params = list(model.parameters())
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
        engine.save_16bit_model(str(tmp_path))
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
        engine.save_16bit_model(str(tmp_path), "trained.bin", exclude_frozen_parameters=True)
        without = {"frozen.weight", "frozen.bias"}
        assert saved.keys() - torch.load(tmp_path / "trained.bin").keys() == without
        assert trained is None or saved.keys() - trained.keys() == without
        engine.destroy()

    def test_what_cannot_be_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        # Kills: a rank that waits in a gather for one that has raised; half a file.
        engine, model = engine_of("fp32")

        def full(*arguments: Any) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(CheckpointError, match="rank 0: OSError.*No space"):
            engine.save_16bit_model(str(tmp_path / "full"))
        monkeypatch.undo()
        assert not (tmp_path / "full" / "pytorch_model.bin").exists()
        (tmp_path / "file").write_text("")
        with pytest.raises(CheckpointError, match="rank 0: "):
            engine.save_16bit_model(str(tmp_path / "file"))
        train(engine, 1)
        assert engine.save_16bit_model(str(tmp_path / "full"))
        assert masters(model).keys() <= torch.load(tmp_path / "full" / "pytorch_model.bin").keys()
        engine.destroy()

    def test_in_the_background(self, tmp_path: Path) -> None:
        # Kills: a file of shards that the next step has changed already, one without a manifest.
        engine, model = engine_of("fp32", writer={"type": "fast", "decoupled": True})
        train(engine, 2)
        wanted = held(engine, model)
        engine.save_checkpoint(str(tmp_path), tag="two")
        train(engine, 2, first=2)
        engine.load_checkpoint(str(tmp_path), tag="two")
        assert differences(wanted, held(engine, model)) == []
        assert verify_checkpoint(str(tmp_path), "two") == []
        dist.barrier()
        if dist.get_rank() == 0:
            path = tmp_path / "two" / "zero_pp_rank_1_mp_rank_00_model_states.pt"
            path.write_bytes(path.read_bytes()[:-1])
        dist.barrier()
        with pytest.raises(CheckpointError, match="zero_pp_rank_1_mp_rank_00_model_states.pt"):
            engine.load_checkpoint(str(tmp_path), tag="two")
        assert differences(wanted, held(engine, model)) == []
        engine.destroy()

    def test_without_what_is_frozen(self, tmp_path: Path) -> None:
        # Kills: frozen parameters asked for that were left out, or overwritten by something.
        engine, model = engine_of("fp32")
        train(engine, 2)
        engine.save_checkpoint(str(tmp_path), exclude_frozen_parameters=True)
        wanted = held(engine, model)
        engine.destroy()
        for stage in (3, 1):
            other, loaded = engine_of("fp32", stage, seed=6)
            frozen = [
                f"weight.{name}" for name, p in loaded.named_parameters() if not p.requires_grad
            ]
            before = held(other, loaded, moments=False)
            with pytest.raises(CheckpointError, match="frozen.weight is missing"):
                other.load_checkpoint(str(tmp_path))
            other.load_checkpoint(str(tmp_path), load_module_strict=False)
            expected = {**wanted, **{name: before[name] for name in frozen}}
            assert differences(expected, held(other, loaded)) == []
            other.destroy()

    def test_files_that_do_not_say_over_how_many_ranks(self, tmp_path: Path) -> None:
        # Kills: a KeyError, on one rank or after weights were changed.
        engine, model = engine_of("fp32")
        engine.save_checkpoint(str(tmp_path), tag="tag")
        dist.barrier()
        if dist.get_rank() == 0:
            (tmp_path / "tag" / "manifest.json").unlink()
            for path in (tmp_path / "tag").glob("zero_pp_rank_*_model_states.pt"):
                state = torch.load(path)
                del state["dp_world_size"]
                torch.save(state, path)
        dist.barrier()
        engine.destroy()
        for stage in (3, 1):
            other, loaded = engine_of("fp32", stage, seed=6, verify="off")
            before = held(other, loaded, moments=False)
            with pytest.raises(CheckpointError, match="a model file has no 'dp_world_size'"):
                other.load_checkpoint(str(tmp_path), tag="tag")
            assert differences(before, held(other, loaded, moments=False)) == []
            other.destroy()

    def test_without_an_optimizer(self, tmp_path: Path) -> None:
        # Kills: weights that only a training run can load.
        engine, model = engine_of("bf16")
        train(engine, 1)
        engine.save_checkpoint(str(tmp_path))
        wanted = {name: whole(param) for name, param in model.named_parameters()}
        engine.destroy()
        torch.manual_seed(5)
        other = Net()
        config = {**config_of(3), "bf16": {"enabled": True}}
        evaluated = deepspeed.initialize(model=other, config=config)[0]
        evaluated.load_checkpoint(str(tmp_path))
        found = {name: whole(param) for name, param in other.named_parameters()}
        assert differences(wanted, found) == []
        evaluated.destroy()


class Crossing(NamedTuple):
    """A folder that this many ranks saved at this stage."""

    precision: str
    stage: int
    world: int

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.precision}-{self.stage}-{self.world}"


def crossings(stage: int, world: int) -> list[Crossing]:
    """What `world` ranks load into `stage`: all in the campaign, else a share of each kind."""
    every = (
        Crossing(precision, of_stage, of_world)
        for precision in PRECISIONS
        for of_stage in (STAGES if stage == 3 else (3,))
        for of_world in WORLDS
        if (of_stage, of_world) != (stage, world)  # that is `TestResume`
    )
    return [
        one
        for one in every
        if WHOLE
        or (
            one.stage == stage
            and one.precision == PRECISIONS[one.world % 2]
            and one.world == 1 + world % 3
        )
        or (
            one.stage != stage
            and one.precision == PRECISIONS[(one.stage + stage + 1) % 2]
            and one.world == 1 + (world + one.stage + stage) % 3
        )
    ]


NEEDED = {one for stage in STAGES for world in WORLDS for one in crossings(stage, world)}


class saved_by_all(DistributedFixture):
    """Folders of every stage, precision and number of ranks, with what they hold."""

    world_size = list(WORLDS)
    exec_timeout = 1200 if WHOLE else 240

    def run(self, class_tmpdir: str) -> None:
        for one in sorted(one for one in NEEDED if one.world == dist.get_world_size()):
            engine, model = engine_of(one.precision, one.stage, seed=10 * one.world + one.stage)
            train(engine, 2, first=one.stage)
            folder = os.path.join(class_tmpdir, one.name)
            engine.save_checkpoint(folder)
            found = held(engine, model)
            if dist.get_rank() == 0:
                torch.save(found, f"{folder}.pt")
            engine.destroy()


class TestOthers(DistributedTest):
    """By other numbers of ranks, from and at other stages: equal bit for bit by name.

    Kills: shards of other ranks loaded as they are, padding taken for elements, frozen parameters
    that stay what they were, weights that are not their masters rounded, another group's moments.
    """

    world_size = list(WORLDS)
    exec_timeout = 1200 if WHOLE else 240

    def test(self, saved_by_all: None, class_tmpdir: str) -> None:
        for stage in STAGES:
            loaded = crossings(stage, dist.get_world_size())
            for precision in sorted({one.precision for one in loaded}):
                engine, model = engine_of(precision, stage, seed=77)
                train(engine, 1, first=9)
                for one in loaded:
                    if one.precision == precision:
                        folder = os.path.join(class_tmpdir, one.name)
                        wanted = torch.load(f"{folder}.pt")
                        engine.load_checkpoint(folder, load_module_only=True)
                        assert different_weights(wanted, held(engine, model)) == [], (stage, one)
                        engine.load_checkpoint(folder)
                        found = differences(wanted, held(engine, model))
                        assert found == [], (stage, one, found[:3])
                engine.destroy()
        if dist.get_world_size() == 2:  # no test of its own: the fixture runs for each
            self.universal(class_tmpdir)

    def universal(self, class_tmpdir: str) -> None:
        # Kills: shards copied as if they were weights, a group's rates that are another's.
        source, folder = (os.path.join(class_tmpdir, name) for name in ("bf16-3-3", "universal"))
        wanted = torch.load(f"{source}.pt")
        if dist.get_rank() == 0:
            options = ["--input_folder", f"{source}/global_step2", "--output_folder"]
            arguments = [*options, f"{folder}/all"]
            ds_to_universal.main(ds_to_universal.parse_arguments(arguments))
        dist.barrier()
        for stage in (2, 3):
            engine, model = engine_of("bf16", stage, seed=78, universal=True)
            engine.load_checkpoint(folder)
            found = differences(wanted, held(engine, model))
            assert found == [], (stage, found[:3])
            assert [group["weight_decay"] for group in engine.optimizer.param_groups] == [0.01, 0.0]
            engine.destroy()

"""Arguments of save_checkpoint, load_checkpoint and save_16bit_model."""

import os
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed import comm as dist
from deepspeed.checkpoint.files import CheckpointError, CheckpointTagError, read_file
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils.logging import logger
from unit.common import DistributedTest
from unit.v1.zero.usage import Warnings

from .runs import config, differences, look, start, train

ZERO2 = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
STAGES = pytest.mark.parametrize(
    "keys", [{}, {"bf16": {"enabled": True}}, ZERO2], ids=["stage0", "stage0-bf16", "stage2"]
)


def weights(engine: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in engine.module.state_dict().items()}


class TestOptions(DistributedTest):
    world_size = 2

    @STAGES
    def test_partial_loads(self, tmpdir: Any, keys: dict[str, Any]) -> None:
        """Kills: weights loaded without their masters, a schedule whose rate nobody applies."""
        engine = start(config(**keys))
        train(engine, 3)
        saved, rates = weights(engine), engine.get_lr()
        engine.save_checkpoint(str(tmpdir))

        module_only = start(config(**keys), seed=2)
        train(module_only, 1)
        before = look(module_only)
        module_only.load_checkpoint(str(tmpdir), load_module_only=True)
        assert differences(saved, weights(module_only)) == []
        after = look(module_only)
        kept = [key for key in before if key.startswith("state.")] + [
            "counters",
            "schedule",
            "random",
            "data",
        ]
        assert (
            differences({key: before[key] for key in kept}, {key: after[key] for key in kept}) == []
        )
        train(module_only, 1)  # steps from the loaded weights: masters followed
        moved = [
            name
            for name in saved
            if not torch.allclose(weights(module_only)[name], saved[name], atol=0.05)
        ]
        assert moved in ([], ["calls"])

        fresh = start(config(**keys), seed=3)
        moments = {key: value for key, value in look(fresh).items() if key.startswith("state.")}
        fresh.load_checkpoint(str(tmpdir), load_optimizer_states=False)
        assert differences(saved, weights(fresh)) == []
        assert (
            differences(
                moments,
                {key: value for key, value in look(fresh).items() if key.startswith("state.")},
            )
            == []
        )
        assert (fresh.global_steps, fresh.get_lr()) == (3, rates)

        unscheduled = start(config(**keys), seed=4)
        unscheduled.load_checkpoint(str(tmpdir), load_lr_scheduler_states=False)
        assert unscheduled.lr_scheduler.state_dict() != engine.lr_scheduler.state_dict()

    @pytest.mark.parametrize("from_fp32", [True, False])
    def test_load_from_fp32_weights(self, tmpdir: Any, from_fp32: bool) -> None:
        """Kills: masters always from the checkpoint, or always rounded up from bf16 weights."""
        engine = start(config(**ZERO2))
        train(engine, 3)
        engine.save_checkpoint(str(tmpdir))
        zero = {"stage": 2, "load_from_fp32_weights": from_fp32}
        other = start(config(bf16={"enabled": True}, zero_optimization=zero), seed=2)
        other.load_checkpoint(str(tmpdir))
        assert differences(weights(engine), weights(other)) == []
        pairs = list(zip(engine.optimizer.groups, other.optimizer.groups, strict=True))
        rounded = [torch.cat(group.own_parts(group.flat)).float() for group, _ in pairs]
        for (group, loaded), low in zip(pairs, rounded, strict=True):
            assert torch.equal(loaded.master, group.master if from_fp32 else low)
        # Were they equal, both ways would pass.
        assert any(
            not torch.equal(group.master, low)
            for (group, _), low in zip(pairs, rounded, strict=True)
        )

    def test_custom_load_fn(self, tmpdir: Any) -> None:
        engine = start(config(**ZERO2))
        train(engine, 1)
        engine.save_checkpoint(str(tmpdir))
        other, calls = start(config(**ZERO2), seed=2), []

        def load(src: dict[str, torch.Tensor], dst: torch.nn.Module) -> None:
            calls.append(sorted(src))
            dst.load_state_dict(src)

        other.load_checkpoint(str(tmpdir), custom_load_fn=load)
        assert calls == [sorted(engine.module.state_dict())]
        assert differences(weights(engine), weights(other)) == []

    @STAGES
    def test_exclude_frozen_parameters(self, tmpdir: Any, keys: dict[str, Any]) -> None:
        engine = start(config(**keys))
        train(engine, 1)
        engine.save_checkpoint(str(tmpdir), exclude_frozen_parameters=True)
        model = torch.load(
            next(Path(str(tmpdir)).rglob("mp_rank_00_model_states.pt")), weights_only=False
        )
        assert not [name for name in model["module"] if name.startswith("frozen")]
        assert not model["frozen_param_shapes"]
        other = start(config(**keys), seed=2)
        before = weights(other)
        with pytest.raises(
            CheckpointError, match=r"frozen\.\w+ is missing.*load_module_strict=False"
        ):
            other.load_checkpoint(str(tmpdir))
        assert differences(before, weights(other)) == []  # refused before anything was changed
        other.load_checkpoint(str(tmpdir), load_module_strict=False)
        expected = {
            name: before[name] if name.startswith("frozen") else value
            for name, value in weights(engine).items()
        }
        assert differences(expected, weights(other)) == []

    def test_client_state_and_tags(self, tmpdir: Any) -> None:
        engine = start(config(**ZERO2))
        train(engine, 1)
        mine = {
            "epoch": 3,
            "best": torch.tensor([1.5]),
            "nested": {"names": ("a", None, True)},
            "ds_version": "mine",
        }
        engine.save_checkpoint(str(tmpdir), tag="a", client_state=mine)
        engine.save_checkpoint(str(tmpdir), tag="b", save_latest=False)
        assert Path(str(tmpdir), "latest").read_text() == "a"
        path, found = engine.load_checkpoint(str(tmpdir))
        assert path == str(Path(str(tmpdir), "a"))
        assert differences(found, mine) == []
        path, found = engine.load_checkpoint(str(tmpdir), tag="b")
        assert path == str(Path(str(tmpdir), "b")) and set(found) == {"ds_version"}
        with pytest.raises(ValueError, match="client_state: module are the engine's own keys"):
            engine.save_checkpoint(str(tmpdir), client_state={"module": 1})
        with pytest.raises(
            ValueError, match=r"client_state cannot be loaded back: .*add_safe_globals"
        ):
            engine.save_checkpoint(str(tmpdir), client_state={"odd": Fraction(1, 3)})
        endless: list[Any] = []
        endless.append(endless)
        with pytest.raises(ValueError, match="client_state cannot be loaded back: .*recursion"):
            engine.save_checkpoint(str(tmpdir), client_state={"endless": endless})
        with pytest.raises(ValueError, match=r"tag: 'a/b' is no name of a folder"):
            engine.save_checkpoint(str(tmpdir), tag="a/b")
        # One rank's None is an error of all: the others must not wait for it.
        for nowhere in ("", None, str(tmpdir) if dist.get_rank() == 0 else None):
            with pytest.raises(ValueError, match="every rank must give the folder"):
                engine.save_checkpoint(nowhere)

    def test_ranks_agree_on_the_tag(self, tmpdir: Any) -> None:
        """Kills: files of one checkpoint in two folders; a mode that nobody looks at."""
        told: list[str] = []
        logger.addFilter(lambda record: bool(told.append(record.getMessage()) or True))
        names = set()
        for mode in ("Warn", "Fail", "Ignore"):
            engine = start(config(**ZERO2, checkpoint={"tag_validation": mode}))
            if mode == "Fail":
                # An AssertionError, which upstream's callers catch, and a CheckpointError.
                assert issubclass(CheckpointTagError, AssertionError)
                with pytest.raises(
                    CheckpointTagError,
                    match=r"tag: ranks save under different tags \['r0', 'r1'\].*\"Fail\"",
                ):
                    engine.save_checkpoint(str(tmpdir), tag=f"r{dist.get_rank()}")
            elif mode == "Warn":
                engine.save_checkpoint(str(tmpdir), tag=f"r{dist.get_rank()}")
                assert "different tags ['r0', 'r1']; this one uses rank 0's, 'r0'" in "".join(told)
                names = {
                    path.name
                    for path in Path(str(tmpdir)).iterdir()
                    if not path.name.startswith(".")
                }
                assert engine.load_checkpoint(str(tmpdir))[0] == str(tmpdir.join("r0"))
            else:  # as with a warning, without one
                told.clear()
                engine.save_checkpoint(str(tmpdir), tag=f"r{dist.get_rank()}")
                assert "different tags" not in "".join(told)
                assert engine.load_checkpoint(str(tmpdir))[0] == str(tmpdir.join("r0"))
            dist.barrier()
        assert {"r0", "latest"} <= names and "r1" not in names

    def test_nothing_there_to_load(self, tmpdir: Any) -> None:
        # Kills: a run that starts anew without a word, or with a word of each rank; a file, or the
        # folder of a tag, that is taken for an empty folder.
        engine = start(config(**ZERO2))
        engine.save_checkpoint(str(tmpdir), tag="mine", save_latest=False)
        cases = {
            tmpdir: "has no file 'latest'; give the tag that you mean: mine",
            tmpdir.join("nowhere"): "is not there",
            tmpdir.join("mine"): f"is one checkpoint: give load_checkpoint({str(tmpdir)!r}, "
            "tag='mine')",
        }
        for folder, why in cases.items():
            with Warnings() as said:
                assert engine.load_checkpoint(str(folder)) == (None, None)
            told = f"training starts anew: {folder} {why}"
            assert [told in text for text in said.texts] == [True] * (dist.get_rank() == 0), (
                said.texts
            )
        file = tmpdir.join(f"file{dist.get_rank()}")
        file.write("")
        dist.barrier()
        with pytest.raises(CheckpointError, match=r"file0 is a file; give the folder that"):
            engine.load_checkpoint(str(tmpdir.join("file0")))

    def test_a_file_system_without_modes(
        self, tmpdir: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Kills: a save that fails, or warns each time, because a script cannot be made executable.
        def forbidden(*args: Any, **kwargs: Any) -> None:
            raise PermissionError(1, "Operation not permitted")

        engine = start(config(**ZERO2))
        monkeypatch.setattr(os, "chmod", forbidden)
        with Warnings() as said:
            for _ in range(2):
                engine.save_checkpoint(str(tmpdir))
                tmpdir.join("zero_to_fp32.py").write("") if dist.get_rank() == 0 else None
        told = [text for text in said.texts if "zero_to_fp32.py is not executable" in text]
        assert len(told) == (dist.get_rank() == 0), said.texts
        assert engine.load_checkpoint(str(tmpdir))[0]

    def test_save_16bit_model(self, tmpdir: Any) -> None:
        engine = start(config(**ZERO2))
        train(engine, 1)
        assert engine.save_16bit_model(str(tmpdir.join("out")), "weights.bin")
        assert engine.save_16bit_model(str(tmpdir.join("trained")), exclude_frozen_parameters=True)
        saved = torch.load(Path(str(tmpdir), "out", "weights.bin"), weights_only=True)
        assert differences(dict(saved), weights(engine)) == []
        trained = torch.load(Path(str(tmpdir), "trained", "pytorch_model.bin"), weights_only=True)
        assert saved.keys() - trained.keys() == {"frozen.weight", "frozen.bias"}

    def test_weights_of_a_derived_engine(self, tmpdir: Any) -> None:
        """Kills: weights taken from the model past a client's `module_state_dict`."""

        class Derived(DeepSpeedEngine):
            def module_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
                state = super().module_state_dict(*args, **kwargs)
                return {**state, "added": torch.ones(2)}

        engine = start(config(**ZERO2))
        engine.__class__ = Derived
        engine.save_checkpoint(str(tmpdir), tag="whole")
        engine.save_16bit_model(str(tmpdir), "weights.bin")
        saved = torch.load(Path(str(tmpdir), "weights.bin"), weights_only=True)
        model = read_file(str(tmpdir.join("whole", "mp_rank_00_model_states.pt")))
        gathered = engine._zero3_consolidated_16bit_state_dict()
        assert (gathered is None) == (dist.get_rank() > 0)
        for weights_of_file in (saved, model["module"], gathered or saved):
            assert torch.equal(weights_of_file["added"], torch.ones(2))

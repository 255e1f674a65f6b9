"""Arguments of saving and loading; loading of some: other names, adapters, frozen since, ties."""

import os
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.checkpoint.files import CheckpointError, CheckpointTagError, read_file
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.utils.logging import logger
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from unit.common import DistributedTest
from unit.v1.zero.usage import Warnings

from .runs import (
    ACCUMULATE,
    BF16,
    WIDTH,
    Net,
    by_name,
    config,
    differences,
    look,
    samples,
    start,
    train,
)

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


ZERO: dict[str, dict[str, Any]] = {
    "stage0": {},
    "stage0-bf16": BF16,
    "stage1-accumulate": {**ACCUMULATE, "zero_optimization": {"stage": 1}},
    "stage2": {**BF16, "zero_optimization": {"stage": 2}},
}


def in_all_cases(check: Callable[[Any, Any, dict[str, Any]], None]) -> Callable[[Any, Any], None]:
    """A test that runs `check(self, folder, keys)` with each of ZERO, in one start of the ranks."""

    def test(self: Any, tmpdir: Any) -> None:
        for case, keys in ZERO.items():
            check(self, tmpdir.join(case), keys)

    test.__doc__ = check.__doc__
    return test


def start_with(model: nn.Module, keys: dict[str, Any]) -> Any:
    """An engine over `model`, with one group of what it trains."""
    trained = [param for param in model.parameters() if param.requires_grad]
    engine = deepspeed.initialize(
        model=model, model_parameters=trained, config=config(**keys), training_data=samples()
    )[0]
    engine.batches = deepspeed.utils.RepeatingLoader(engine.training_dataloader)
    return engine


class Adapted(nn.Module):
    """A layer that stays as it is, and a product of two small matrices that is added to it."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted_net(seed: int) -> nn.Module:
    """The base of all seeds is one; adapters differ."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, 3))
    torch.manual_seed(seed)
    for index in (0, 2):
        base = model[index]
        assert isinstance(base, nn.Linear)
        model[index] = Adapted(base)
    return model


class TestNames(DistributedTest):
    world_size = 2

    @in_all_cases
    def test_names_that_differ(self, tmpdir: Any, keys: dict[str, Any]) -> None:
        """Kills: missing or further names ignored, masters that do not follow what was loaded."""
        engine = start(config(**keys))
        train(engine, 1)
        engine.save_checkpoint(str(tmpdir))
        saved = weights(engine)

        torch.manual_seed(2)
        model = Net()
        model.add_module("head", nn.Linear(3, 3))
        del model.last  # of the file, and not of the model
        model.forward = lambda x: model.head(model.first(x)[:, :3])  # type: ignore[method-assign]
        other = start_with(model, keys)
        train(other, 1)
        before = look(other)
        with pytest.raises(
            CheckpointError,
            match=r"head.weight is missing; head.bias is missing; last.weight is not in",
        ):
            other.load_checkpoint(str(tmpdir), load_module_only=True)
        assert differences(before, look(other)) == []
        other.load_checkpoint(str(tmpdir), load_module_only=True, load_module_strict=False)
        now = weights(other)
        expected = {
            name: before[f"module.{name}"] if name.startswith("head") else saved[name]
            for name in now
        }
        assert differences(expected, now) == []
        masters = {
            name[7:]: value
            for name, value in by_name(other).items()
            if name.startswith("master.") and value is not None
        }
        assert differences({name: now[name].float() for name in masters}, masters) == []

    @in_all_cases
    def test_another_size(self, tmpdir: Any, keys: dict[str, Any]) -> None:
        """A shape that differs is never a name that differs."""
        engine = start(config(**keys))
        engine.save_checkpoint(str(tmpdir))
        torch.manual_seed(2)
        model = Net()
        model.last = nn.Linear(7, 4)
        other = start_with(model, keys)
        before = weights(other)
        with pytest.raises(
            CheckpointError, match=r"last.weight has shape \(3, 7\), this model's \(4, 7\)"
        ):
            other.load_checkpoint(str(tmpdir), load_module_only=True)
        with pytest.raises(
            CheckpointError, match=r"last.weight has shape .* custom_load_fn may load"
        ):
            other.load_checkpoint(str(tmpdir), load_module_only=True, load_module_strict=False)
        assert differences(before, weights(other)) == []

        def cut(src: dict[str, torch.Tensor], dst: nn.Module) -> None:
            dst.load_state_dict(
                {**src, "last.weight": dst.get_parameter("last.weight"), "last.bias": torch.ones(4)}
            )

        other.load_checkpoint(str(tmpdir), load_module_only=True, custom_load_fn=cut)
        own = {
            "last.weight": before["last.weight"],
            "last.bias": torch.ones(4).to(before["last.bias"]),
        }
        assert differences({**weights(engine), **own}, weights(other)) == []

    def test_own_function_for_some_names(self, tmpdir: Any) -> None:
        """Kills: masters of before the function; names checked although it knows better."""
        engine = start(config(**ZERO["stage2"]))
        train(engine, 1)
        engine.save_checkpoint(str(tmpdir))
        other = start(config(**ZERO["stage2"]), seed=2)
        first = weights(other)["first.weight"]

        def load(src: dict[str, torch.Tensor], dst: nn.Module) -> None:
            dst.load_state_dict(
                {name: value for name, value in src.items() if name != "first.weight"}, strict=False
            )

        other.load_checkpoint(str(tmpdir), load_module_only=True, custom_load_fn=load)
        expected = {**weights(engine), "first.weight": first}
        assert differences(expected, weights(other)) == []
        master = safe_get_full_fp32_param(other.module.first.weight)
        assert master is not None and torch.equal(master, first.float())


class TestFrozen(DistributedTest):
    world_size = 2

    @in_all_cases
    def test_adapters(self, tmpdir: Any, keys: dict[str, Any]) -> None:
        """Kills: base weights in the file, adapters that start again, frozen moments asked for."""
        engine = start_with(adapted_net(1), keys)
        train(engine, 2)
        engine.save_checkpoint(str(tmpdir), exclude_frozen_parameters=True)
        held = by_name(engine)
        went_on = train(engine, 2)
        adapters = sorted(
            name for name, param in engine.module.named_parameters() if param.requires_grad
        )
        dist.barrier()
        file = torch.load(
            Path(str(tmpdir), "global_step2", "mp_rank_00_model_states.pt"), weights_only=False
        )
        assert sorted(file["module"]) == adapters
        exported = get_fp32_state_dict_from_zero_checkpoint(str(tmpdir))
        assert sorted(exported) == adapters
        wanted = {name: held[f"master.{name}"] for name in adapters}
        assert (
            all(value is None for value in wanted.values()) or differences(wanted, exported) == []
        )
        engine.save_16bit_model(str(tmpdir), "adapters.bin", exclude_frozen_parameters=True)
        dist.barrier()
        assert sorted(torch.load(str(tmpdir.join("adapters.bin")), weights_only=True)) == adapters

        resumed = start_with(adapted_net(2), keys)
        train(resumed, 1)
        resumed.load_checkpoint(str(tmpdir), load_module_strict=False)
        assert differences(held, by_name(resumed)) == []
        assert differences(went_on, train(resumed, 2)) == []

    @in_all_cases
    def test_thawed_since(self, tmpdir: Any, keys: dict[str, Any]) -> None:
        """A parameter without a state: an error that names it, or its weights alone."""
        engine = start_with(adapted_net(1), keys)
        train(engine, 1)
        engine.save_checkpoint(str(tmpdir))
        thawed = start_with(adapted_net(2).requires_grad_(True), keys)
        train(thawed, 1)
        before = look(thawed)
        with pytest.raises(CheckpointError, match=r"0\.base\.(weight|bias)"):
            thawed.load_checkpoint(str(tmpdir))
        assert differences(before, look(thawed)) == []
        thawed.load_checkpoint(str(tmpdir), load_module_only=True)
        assert differences(weights(engine), weights(thawed)) == []
        thawed.load_checkpoint(str(tmpdir), load_optimizer_states=False)
        assert differences(weights(engine), weights(thawed)) == []
        train(thawed, 3)
        moved = weights(thawed)
        assert not torch.equal(moved["0.base.weight"], weights(engine)["0.base.weight"])

    @in_all_cases
    def test_frozen_since(self, tmpdir: Any, keys: dict[str, Any]) -> None:
        """State that is not needed any more is left alone; what is still trained goes on."""
        engine = start_with(adapted_net(1).requires_grad_(True), keys)
        train(engine, 2)
        engine.save_checkpoint(str(tmpdir))
        held = by_name(engine)
        frozen = start_with(adapted_net(2), keys)
        train(frozen, 1)
        frozen.load_checkpoint(str(tmpdir))
        assert differences(weights(engine), weights(frozen)) == []
        now = by_name(frozen)
        assert differences({name: held[name] for name in now}, now) == []

    def test_tied_and_frozen(self, tmpdir: Any) -> None:
        """Kills: one of two names of a frozen weight left in the file; names untied by loading."""
        for frozen in (False, True):
            model = Net()
            model.tied.requires_grad_(not frozen)
            engine = start_with(model, ZERO["stage2"])
            folder = str(tmpdir.join(str(frozen)))
            engine.save_checkpoint(folder, tag="t", exclude_frozen_parameters=True)
            dist.barrier()
            file = torch.load(Path(folder, "t", "mp_rank_00_model_states.pt"), weights_only=False)
            assert {"tied.weight", "again.weight"} & set(file["module"]) == (
                set() if frozen else {"tied.weight", "again.weight"}
            )
            engine.load_checkpoint(folder, load_module_strict=False)
            assert engine.module.again.weight is engine.module.tied.weight
            dist.barrier()

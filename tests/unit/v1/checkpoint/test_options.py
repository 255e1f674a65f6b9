"""Arguments of saving and loading; loading of some: other names, adapters, frozen since, ties."""

import os
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.checkpoint.files import CheckpointTagError, read_file
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as fp32_weights
from unit.common import DistributedTest
from unit.models import seeded
from unit.v1.looping import each
from unit.v1.zero.usage import Warnings

from . import runs
from .runs import BF16, WIDTH, Net, by_name, differences, look, refused, saved, start, train, zero

MODEL = "mp_rank_00_model_states.pt"
ZERO2 = {**BF16, **zero(2)}
ZERO: dict[str, dict[str, Any]] = {
    "stage0": {},
    "stage0-bf16": BF16,
    "stage1-accumulate": {**runs.ACCUMULATE, **zero(1)},
    "stage2": ZERO2,
}


def in_all_cases(check: Callable[[Any, Path, dict[str, Any]], None]) -> Callable[..., None]:
    """A test that runs `check(self, folder, keys)` with each of ZERO, in one start of the ranks."""

    @each(case=ZERO)
    def test(self: Any, tmp_path: Path, case: str) -> None:
        check(self, tmp_path / case, ZERO[case])

    test.__doc__ = check.__doc__
    return test


def weights(engine: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in engine.module.state_dict().items()}


def states(engine: Any, *others: str) -> dict[str, Any]:
    """Of `look`, optimizer state and what is named."""
    found = look(engine).items()
    return {key: value for key, value in found if key.startswith("state.") or key in others}


def content(*path: Any) -> Any:
    """What is in a file."""
    return torch.load(Path(*path), weights_only=False)


class TestOptions(DistributedTest):
    world_size = 2

    @in_all_cases
    def test_partial_loads(self, folder: Path, keys: dict[str, Any]) -> None:
        """Kills: weights loaded without their masters, a schedule whose rate nobody applies."""
        engine = saved(folder, 3, **keys)
        wanted, rates = weights(engine), engine.get_lr()

        module_only = start(seed=2, **keys)
        train(module_only, 1)
        kept = ("counters", "schedule", "random", "data")
        before = states(module_only, *kept)
        module_only.load_checkpoint(folder, load_module_only=True)
        assert differences(wanted, weights(module_only)) == []
        assert differences(before, states(module_only, *kept)) == []
        train(module_only, 1)  # steps from the loaded weights: masters followed
        now = weights(module_only)
        moved = [name for name in now if not torch.allclose(now[name], wanted[name], atol=0.05)]
        assert moved in ([], ["calls"])

        fresh = start(seed=3, **keys)
        moments = states(fresh)
        fresh.load_checkpoint(folder, load_optimizer_states=False)
        assert differences(wanted, weights(fresh)) == []
        assert differences(moments, states(fresh)) == []
        assert (fresh.global_steps, fresh.get_lr()) == (3, rates)

        unscheduled = start(seed=4, **keys)
        unscheduled.load_checkpoint(folder, load_lr_scheduler_states=False)
        assert unscheduled.lr_scheduler.state_dict() != engine.lr_scheduler.state_dict()

    def test_load_from_fp32_weights(self, tmp_path: Path) -> None:
        """Kills: masters always from the checkpoint, or always rounded up from bf16 weights."""
        engine = saved(tmp_path, 3, **ZERO2)
        for from_fp32 in (True, False):
            other = runs.loaded(tmp_path, **BF16, **zero(2, load_from_fp32_weights=from_fp32))
            assert differences(weights(engine), weights(other)) == []
            pairs = list(zip(engine.optimizer.groups, other.optimizer.groups, strict=True))
            rounded = [torch.cat(group.own_parts(group.flat)).float() for group, _ in pairs]
            for (group, own), low in zip(pairs, rounded, strict=True):
                assert torch.equal(own.master, group.master if from_fp32 else low)
            # Were they equal, both ways would pass.
            masters = [group.master for group, _ in pairs]
            assert not all(map(torch.equal, masters, rounded))

    def test_custom_load_fn(self, tmp_path: Path) -> None:
        """Kills: masters of before the function; names checked although it knows better."""
        engine = saved(tmp_path, **ZERO2)
        other, calls = start(seed=2, **ZERO2), []

        def load(src: dict[str, torch.Tensor], dst: nn.Module) -> None:
            calls.append(sorted(src))
            dst.load_state_dict(src)

        other.load_checkpoint(tmp_path, custom_load_fn=load)
        assert calls == [sorted(engine.module.state_dict())]
        assert differences(weights(engine), weights(other)) == []
        other = start(seed=2, **ZERO2)
        first = weights(other)["first.weight"]

        def load_some(src: dict[str, torch.Tensor], dst: nn.Module) -> None:
            some = {name: value for name, value in src.items() if name != "first.weight"}
            dst.load_state_dict(some, strict=False)

        other.load_checkpoint(tmp_path, load_module_only=True, custom_load_fn=load_some)
        assert differences({**weights(engine), "first.weight": first}, weights(other)) == []
        master = safe_get_full_fp32_param(other.module.first.weight)
        assert master is not None and torch.equal(master, first.float())

    @in_all_cases
    def test_exclude_frozen_parameters(self, folder: Path, keys: dict[str, Any]) -> None:
        engine = start(**keys)
        train(engine, 1)
        engine.save_checkpoint(folder, exclude_frozen_parameters=True)
        model = content(folder, "global_step1", MODEL)
        assert not [name for name in model["module"] if name.startswith("frozen")]
        assert not model["frozen_param_shapes"]
        other = start(seed=2, **keys)
        before = weights(other)
        with refused(r"frozen\.\w+ is missing.*load_module_strict=False"):
            other.load_checkpoint(folder)
        assert differences(before, weights(other)) == []  # refused before anything was changed
        other.load_checkpoint(folder, load_module_strict=False)
        frozen = {name: value for name, value in before.items() if name.startswith("frozen")}
        assert differences({**weights(engine), **frozen}, weights(other)) == []

    def test_client_state_and_tags(self, tmp_path: Path) -> None:
        engine = start(**ZERO2)
        train(engine, 1)
        nested = {"names": ("a", None, True)}
        mine = {"epoch": 3, "best": torch.tensor([1.5]), "nested": nested, "ds_version": "mine"}
        engine.save_checkpoint(tmp_path, tag="a", client_state=mine)
        engine.save_checkpoint(tmp_path, tag="b", save_latest=False)
        assert (tmp_path / "latest").read_text() == "a"
        path, found = engine.load_checkpoint(tmp_path)
        assert path == str(tmp_path / "a")
        assert differences(found, mine) == []
        path, found = engine.load_checkpoint(tmp_path, tag="b")
        assert path == str(tmp_path / "b") and set(found) == {"ds_version"}
        endless: list[Any] = []
        endless.append(endless)
        for state, why in (
            ({"module": 1}, "client_state: module are the engine's own keys"),
            ({"odd": Fraction(1, 3)}, "client_state cannot be loaded back: .*add_safe_globals"),
            ({"endless": endless}, "client_state cannot be loaded back: .*recursion"),
        ):
            with pytest.raises(ValueError, match=why):
                engine.save_checkpoint(tmp_path, client_state=state)
        with pytest.raises(ValueError, match=r"tag: 'a/b' is no name of a folder"):
            engine.save_checkpoint(tmp_path, tag="a/b")
        # One rank's None is an error of all: the others must not wait for it.
        for nowhere in ("", None, str(tmp_path) if dist.get_rank() == 0 else None):
            with pytest.raises(ValueError, match="every rank must give the folder"):
                engine.save_checkpoint(nowhere)

    def test_ranks_agree_on_the_tag(self, tmp_path: Path) -> None:
        """Kills: files of one checkpoint in two folders; a mode that nobody looks at."""
        own = f"r{dist.get_rank()}"
        engine = start(**ZERO2, checkpoint={"tag_validation": "Fail"})
        # An AssertionError, which upstream's callers catch, and a CheckpointError.
        assert issubclass(CheckpointTagError, AssertionError)
        fails = r"tag: ranks save under different tags \['r0', 'r1'\].*\"Fail\""
        with pytest.raises(CheckpointTagError, match=fails):
            engine.save_checkpoint(tmp_path, tag=own)
        dist.barrier()
        for mode in ("Warn", "Ignore"):
            engine = start(**ZERO2, checkpoint={"tag_validation": mode})
            with Warnings() as said:
                engine.save_checkpoint(tmp_path, tag=own)
            told = "".join(said.texts)
            if mode == "Warn":
                assert "different tags ['r0', 'r1']; this one uses rank 0's, 'r0'" in told
            else:
                assert "different tags" not in told
            names = {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")}
            assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / "r0")
            assert {"r0", "latest"} <= names and "r1" not in names
            dist.barrier()

    def test_nothing_there_to_load(self, tmp_path: Path) -> None:
        # Kills: a run that starts anew without a word, or with a word of each rank; a file, or the
        # folder of a tag, that is taken for an empty folder.
        engine = start(**ZERO2)
        engine.save_checkpoint(tmp_path, tag="mine", save_latest=False)
        instead = f"load_checkpoint({str(tmp_path)!r}, tag='mine')"
        cases = {
            tmp_path: "has no file 'latest'; give the tag that you mean: mine",
            tmp_path / "nowhere": "is not there",
            tmp_path / "mine": f"is one checkpoint: give {instead}",
        }
        for folder, why in cases.items():
            with Warnings() as said:
                assert engine.load_checkpoint(str(folder)) == (None, None)
            found = [f"starts anew: {folder} {why}" in text for text in said.texts]
            assert found == [True] * (dist.get_rank() == 0), said.texts
        runs.on_rank_0((tmp_path / "file").touch)
        with refused("file is a file; give the folder that"):
            engine.load_checkpoint(tmp_path / "file")

    def test_a_file_system_without_modes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Kills: a save that fails, or warns each time, because a script cannot be made executable.
        def forbidden(*args: Any, **kwargs: Any) -> None:
            raise PermissionError(1, "Operation not permitted")

        engine = start(**ZERO2)
        monkeypatch.setattr(os, "chmod", forbidden)
        with Warnings() as said:
            for _ in range(2):
                engine.save_checkpoint(tmp_path)
                runs.on_rank_0(lambda: (tmp_path / "zero_to_fp32.py").write_text(""))
        told = [text for text in said.texts if "zero_to_fp32.py is not executable" in text]
        assert len(told) == (dist.get_rank() == 0), said.texts
        assert engine.load_checkpoint(tmp_path)[0]

    def test_16bit_weights_and_those_of_a_derived_engine(self, tmp_path: Path) -> None:
        """Kills: weights taken from the model past a client's `module_state_dict`."""

        class Derived(DeepSpeedEngine):
            def module_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
                state = super().module_state_dict(*args, **kwargs)
                return {**state, "added": torch.ones(2)}

        engine = start(**ZERO2)
        train(engine, 1)
        assert engine.save_16bit_model(tmp_path / "out", "weights.bin")
        assert engine.save_16bit_model(tmp_path / "trained", exclude_frozen_parameters=True)
        whole = torch.load(tmp_path / "out" / "weights.bin", weights_only=True)
        assert differences(dict(whole), weights(engine)) == []
        trained = torch.load(tmp_path / "trained" / "pytorch_model.bin", weights_only=True)
        assert whole.keys() - trained.keys() == {"frozen.weight", "frozen.bias"}

        engine.__class__ = Derived
        engine.save_checkpoint(tmp_path, tag="whole")
        engine.save_16bit_model(tmp_path, "weights.bin")
        gathered = engine._zero3_consolidated_16bit_state_dict()
        assert (gathered is None) == (dist.get_rank() > 0)
        exported = torch.load(tmp_path / "weights.bin", weights_only=True)
        model = read_file(str(tmp_path / "whole" / MODEL))
        for found in (exported, model["module"], gathered or exported):
            assert torch.equal(found["added"], torch.ones(2))


def start_with(model: nn.Module, keys: dict[str, Any]) -> Any:
    """An engine over `model`, with one group of what it trains."""
    trained = [param for param in model.parameters() if param.requires_grad]
    return start(model=model, model_parameters=trained, **keys)


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
    first, last = nn.Linear(WIDTH, 7), nn.Linear(7, 3)
    torch.manual_seed(seed)
    return nn.Sequential(Adapted(first), nn.Tanh(), Adapted(last))


class TestNames(DistributedTest):
    world_size = 2

    @in_all_cases
    def test_names_that_differ(self, folder: Path, keys: dict[str, Any]) -> None:
        """Kills: missing or further names ignored, masters that do not follow what was loaded."""
        wanted = weights(saved(folder, **keys))
        model = seeded(Net, seed=2)
        model.add_module("head", nn.Linear(3, 3))
        del model.last  # of the file, and not of the model
        model.forward = lambda x: model.head(model.first(x)[:, :3])  # type: ignore[method-assign]
        other = start_with(model, keys)
        train(other, 1)
        before = look(other)
        with refused("head.weight is missing; head.bias is missing; last.weight is not in"):
            other.load_checkpoint(folder, load_module_only=True)
        assert differences(before, look(other)) == []
        own = {name: value for name, value in weights(other).items() if name.startswith("head")}
        other.load_checkpoint(folder, load_module_only=True, load_module_strict=False)
        now = weights(other)
        assert differences({name: {**wanted, **own}[name] for name in now}, now) == []
        masters = runs.of_kind(by_name(other), "master")
        assert differences({name: now[name].float() for name in masters}, masters) == []

    @in_all_cases
    def test_another_size(self, folder: Path, keys: dict[str, Any]) -> None:
        """A shape that differs is never a name that differs."""
        engine = saved(folder, 0, **keys)
        model = seeded(Net, seed=2)
        model.last = nn.Linear(7, 4)
        other = start_with(model, keys)
        before = weights(other)
        with refused(r"last.weight has shape \(3, 7\), this model's \(4, 7\)"):
            other.load_checkpoint(folder, load_module_only=True)
        with refused(r"last.weight has shape .* custom_load_fn may load"):
            other.load_checkpoint(folder, load_module_only=True, load_module_strict=False)
        assert differences(before, weights(other)) == []
        own = {"last.weight": before["last.weight"], "last.bias": torch.ones(4)}
        own["last.bias"] = own["last.bias"].to(own["last.weight"])

        def cut(src: dict[str, torch.Tensor], dst: nn.Module) -> None:
            dst.load_state_dict({**src, **own})

        other.load_checkpoint(folder, load_module_only=True, custom_load_fn=cut)
        assert differences({**weights(engine), **own}, weights(other)) == []


class TestFrozen(DistributedTest):
    world_size = 2

    @in_all_cases
    def test_adapters(self, folder: Path, keys: dict[str, Any]) -> None:
        """Kills: base weights in the file, adapters that start again, frozen moments asked for."""
        engine = start_with(adapted_net(1), keys)
        train(engine, 2)
        engine.save_checkpoint(folder, exclude_frozen_parameters=True)
        held = by_name(engine)
        went_on = train(engine, 2)
        trained = (name for name, p in engine.module.named_parameters() if p.requires_grad)
        adapters = sorted(trained)
        dist.barrier()
        assert sorted(content(folder, "global_step2", MODEL)["module"]) == adapters
        exported = fp32_weights(folder)
        assert sorted(exported) == adapters
        assert differences({name: held[f"master.{name}"] for name in adapters}, exported) == []
        engine.save_16bit_model(folder, "adapters.bin", exclude_frozen_parameters=True)
        dist.barrier()
        assert sorted(torch.load(folder / "adapters.bin", weights_only=True)) == adapters

        resumed = start_with(adapted_net(2), keys)
        train(resumed, 1)
        resumed.load_checkpoint(folder, load_module_strict=False)
        assert differences(held, by_name(resumed)) == []
        assert differences(went_on, train(resumed, 2)) == []

    @in_all_cases
    def test_thawed_since(self, folder: Path, keys: dict[str, Any]) -> None:
        """A parameter without a state: an error that names it, or its weights alone."""
        engine = start_with(adapted_net(1), keys)
        train(engine, 1)
        engine.save_checkpoint(folder)
        thawed = start_with(adapted_net(2).requires_grad_(True), keys)
        train(thawed, 1)
        before = look(thawed)
        with refused(r"0\.base\.(weight|bias)"):
            thawed.load_checkpoint(folder)
        assert differences(before, look(thawed)) == []
        for options in ({"load_module_only": True}, {"load_optimizer_states": False}):
            thawed.load_checkpoint(folder, **options)
            assert differences(weights(engine), weights(thawed)) == []
        train(thawed, 3)
        moved = weights(thawed)
        assert not torch.equal(moved["0.base.weight"], weights(engine)["0.base.weight"])

    @in_all_cases
    def test_frozen_since(self, folder: Path, keys: dict[str, Any]) -> None:
        """State that is not needed any more is left alone; what is still trained goes on."""
        engine = start_with(adapted_net(1).requires_grad_(True), keys)
        train(engine, 2)
        engine.save_checkpoint(folder)
        held = by_name(engine)
        frozen = start_with(adapted_net(2), keys)
        train(frozen, 1)
        frozen.load_checkpoint(folder)
        assert differences(weights(engine), weights(frozen)) == []
        now = by_name(frozen)
        assert differences({name: held[name] for name in now}, now) == []

    def test_tied_and_frozen(self, tmp_path: Path) -> None:
        """Kills: one of two names of a frozen weight left in the file; names untied by loading."""
        names = {"tied.weight", "again.weight"}
        for frozen in (False, True):
            model = Net()
            model.tied.requires_grad_(not frozen)
            engine = start_with(model, ZERO2)
            folder = tmp_path / str(frozen)
            engine.save_checkpoint(folder, tag="t", exclude_frozen_parameters=True)
            dist.barrier()
            assert names & set(content(folder, "t", MODEL)["module"]) == (
                set() if frozen else names
            )
            engine.load_checkpoint(folder, load_module_strict=False)
            assert engine.module.again.weight is engine.module.tied.weight
            dist.barrier()

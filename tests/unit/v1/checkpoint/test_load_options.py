"""Loading some of a checkpoint: other names, adapters, parameters frozen or thawed since, ties."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.checkpoint.files import CheckpointError
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from unit.common import DistributedTest

from .runs import WIDTH, Net, by_name, config, differences, look, samples, start, train

BF16 = {"bf16": {"enabled": True}}
ZERO: dict[str, dict[str, Any]] = {
    "stage0": {},
    "stage0-bf16": BF16,
    "stage1-accumulate": {
        **BF16,
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": 1},
    },
    "stage2": {**BF16, "zero_optimization": {"stage": 2}},
}


def in_all_cases(check: Callable[[Any, Any, dict[str, Any]], None]) -> Callable[[Any, Any], None]:
    """A test that runs `check(self, folder, keys)` with each of ZERO, in one start of the ranks."""

    def test(self: Any, tmpdir: Any) -> None:
        for case, keys in ZERO.items():
            check(self, tmpdir.join(case), keys)

    test.__doc__ = check.__doc__
    return test


def weights(engine: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in engine.module.state_dict().items()}


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

"""What optimizers have after loading: state of their own, and the rates of their parameters."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import deepspeed
from deepspeed.checkpoint.files import CheckpointError
from deepspeed.runtime.zero import sharded_state
from unit.common import DistributedFixture, DistributedTest

from .known_gradients import LR, NAMES, grouped, made, start, train
from .runs import counts, differences
from .test_updates import AFTER, STEPS, Layout, begun

# Stage, and how its files are.
LAYOUTS = [*(Layout(stage, "two", 1) for stage in range(4)), Layout(2, "two", 1, keys="elastic")]


def share_counts(engine: Any) -> None:
    """Leave one step count to all states, as earlier versions did when they resharded."""
    first, *others = engine.optimizer.state.values()
    for own in others:
        own["step"] = first["step"]


class TestMemory(DistributedTest):
    world_size = 1

    @pytest.mark.parametrize("layout", LAYOUTS, ids=str)
    def test_a_file_with_one_count_for_all(self, tmpdir: Any, layout: Layout) -> None:
        # Kills: state that is taken from a file as it is.
        engine = begun(layout, "AdamW")
        train(engine, STEPS)
        share_counts(engine)
        engine.save_checkpoint(str(tmpdir))
        engine = begun(layout, "AdamW")
        engine.load_checkpoint(str(tmpdir))
        train(engine, AFTER)
        assert counts(engine) == {STEPS + AFTER}

    def test_is_checked(self, tmpdir: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        # Kills: a way of loading that forgets it, and nobody notices.
        engine = begun(LAYOUTS[2], "AdamW")
        train(engine, STEPS)
        share_counts(engine)
        engine.save_checkpoint(str(tmpdir))
        monkeypatch.setattr(
            sharded_state,
            "load_in_place",
            lambda optimizer, state: optimizer.load_state_dict(state),
        )
        with pytest.raises(AssertionError, match="'step'"):
            begun(LAYOUTS[2], "AdamW").load_checkpoint(str(tmpdir))

    @pytest.mark.parametrize("stage", [1, 2, 3])
    def test_of_a_program_stays_its_own(self, stage: int) -> None:
        # Kills: two engines that count and average in the same tensors.
        one, other = (begun(Layout(stage, "two", 1), "AdamW") for _ in range(2))
        train(one, STEPS)
        given = one.optimizer.state_dict()
        kept = copy.deepcopy(given["base_optimizer_state" if stage < 3 else "optimizer_state_dict"])
        other.optimizer.load_state_dict(given)
        train(other, AFTER)
        now = given["base_optimizer_state" if stage < 3 else "optimizer_state_dict"]
        assert differences(now, kept) == []
        assert (counts(one), counts(other)) == ({STEPS}, {STEPS + AFTER})


RATES = {"0.value": 2**-5, "1.value": 2**-6, "2.value": 2**-7, "3.value": 2**-8}
SCHEDULES: dict[str, Any] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
            lr_scheduler.LambdaLR(optimizer, lambda step: 2 / (3 + step)),
        ],
        milestones=[3],
    ),
}
DIVIDED = {
    "saved": [NAMES[:2], NAMES[2:]],
    "turned": [NAMES[2:], NAMES[:2]],
    "split": [NAMES[3:], NAMES[1:2], NAMES[:1], NAMES[2:3]],
}


def scheduled(grouping: list[list[str]], schedule: str, rates: dict[str, float]) -> Any:
    """An engine over these groups, each with the rate of its first parameter."""
    module = made()
    groups = [
        {**group, "lr": rates[names[0]]}
        for group, names in zip(grouped(module, grouping), grouping, strict=True)
    ]
    optimizer = torch.optim.AdamW(groups)
    config = {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 1},
    }
    return deepspeed.initialize(
        model=module,
        optimizer=optimizer,
        lr_scheduler=SCHEDULES[schedule](optimizer),
        config=config,
    )[0]


def rates_of(engine: Any, grouping: list[list[str]]) -> dict[str, float]:
    return {
        name: group["lr"]
        for names, group in zip(grouping, engine.optimizer.param_groups, strict=True)
        for name in names
    }


class TestRates(DistributedTest):
    world_size = 1

    @pytest.mark.parametrize("schedule", SCHEDULES)
    def test_follow_parameters_into_other_groups(self, tmpdir: Any, schedule: str) -> None:
        # Kills: base rates of a schedule by number of a group that is another now.
        pairs = {NAMES[0]: RATES[NAMES[0]], NAMES[2]: RATES[NAMES[2]]}
        engine = scheduled(DIVIDED["saved"], schedule, pairs)
        train(engine, 2)
        engine.save_checkpoint(str(tmpdir))
        train(engine, 3)
        wanted = rates_of(engine, DIVIDED["saved"])
        assert len(set(wanted.values())) == 2
        for name in ("turned", "split"):
            engine = scheduled(DIVIDED[name], schedule, dict.fromkeys(NAMES, 0.5))
            engine.load_checkpoint(str(tmpdir))
            train(engine, 3)
            assert rates_of(engine, DIVIDED[name]) == wanted, name

    def test_are_not_one_tensor(self, tmpdir: Any) -> None:
        # Kills: groups made of one, of which a schedule that writes in place changes all.
        def make(groups: Any) -> torch.optim.Optimizer:
            return torch.optim.AdamW(groups, lr=torch.tensor(LR), foreach=False)

        engine = start("one", 1, make)
        train(engine, 1)
        engine.save_checkpoint(str(tmpdir))
        engine = start("two", 1, make)
        engine.load_checkpoint(str(tmpdir))
        first, second = engine.optimizer.param_groups
        first["lr"].fill_(0.5)
        assert float(second["lr"]) == LR


class SavedWithTwoDecays(DistributedFixture):
    world_size = 1

    def run(self, class_tmpdir: Any) -> None:
        engine = decaying([["first"], ["second"]], [0.1, 0.0])
        engine.save_checkpoint(str(class_tmpdir))


def decaying(grouping: list[list[str]], decays: list[float]) -> Any:
    """An engine over two parameters of which two ranks have one each."""
    module = nn.Module()
    for name in ("first", "second"):
        module.register_parameter(name, nn.Parameter(torch.ones(8)))
    module.forward = lambda x: (x * module.first * module.second).sum()  # type: ignore[method-assign]
    groups = [
        {**group, "weight_decay": decay}
        for group, decay in zip(grouped(module, grouping), decays, strict=True)
    ]
    config = {
        "train_batch_size": 2,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": LR}},
    }
    engine = deepspeed.initialize(model=module, model_parameters=groups, config=config)[0]
    engine.backward(engine(torch.ones(8)))
    engine.step()
    return engine


class TestHyperparameters(DistributedTest):
    world_size = 2

    def test_that_differ_are_refused_by_every_rank(
        self, SavedWithTwoDecays: Any, class_tmpdir: Any
    ) -> None:
        # Kills: a group that decays on one rank and not on the other, each having one of the two.
        engine = decaying([["first", "second"]], [0.1])
        with pytest.raises(CheckpointError, match="first and second.*'weight_decay'"):
            engine.load_checkpoint(str(class_tmpdir))

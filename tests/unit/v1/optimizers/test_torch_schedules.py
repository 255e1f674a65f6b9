"""torch's schedules made on the optimizer that `deepspeed.initialize` returns, against plain torch
with the same schedule.
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import deepspeed
from deepspeed import comm as dist
from unit.common import DistributedTest
from unit.models import config_of, drawn, linears
from unit.one_process import OneProcess, mean_square, of_all_ranks, placed
from unit.v1.gathering import masters_of
from unit.v1.looping import each

WIDTH, ROWS = 5, 4
Schedule = Callable[[Any], Any]
SCHEDULES: dict[str, Schedule] = {
    "falls to nothing": lambda optimizer: lr_scheduler.LambdaLR(
        optimizer, [1, 0.5, 0, 0].__getitem__
    ),
    "cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
}
ZERO: dict[str, Any] = {"stage3_param_persistence_threshold": 0}


def batch(step: int, rank: int) -> torch.Tensor:
    return drawn(10 * step + rank, ROWS, WIDTH)


def engine_of(model: Any, kind: Any, stage: int, precision: str = "fp32", **zero: Any) -> Any:
    config = config_of(stage, ROWS, precision=precision, zero_optimization={**ZERO, **zero})
    return deepspeed.initialize(model=model, optimizer=kind(model.parameters()), config=config)[0]


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.2, momentum=0.9)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.05)


def step_schedule(schedule: Any) -> None:
    schedule.step(*(1.0,) * isinstance(schedule, lr_scheduler.ReduceLROnPlateau))


class TestTorchSchedules(DistributedTest):
    world_size = 2

    @each(stage=range(4), kind=(sgd, adamw), schedule=SCHEDULES)
    def test_train_as_one_process(self, stage: int, kind: Any, schedule: str) -> None:
        # Kills: a wrapper that torch does not take, a rate or a momentum that the update does not
        # see, a step that a schedule does not notice (which torch warns of).
        engine = engine_of(linears(2, WIDTH), kind, stage)
        one = OneProcess(plain := linears(2, WIDTH), kind(plain.parameters()), mean_square)
        assert isinstance(engine.optimizer, torch.optim.Optimizer)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*optimizer.step.*")
            schedules = [SCHEDULES[schedule](owner) for owner in (engine.optimizer, one.optimizer)]
            for step in range(3):
                engine.backward(mean_square(engine, batch(step, dist.get_rank())))
                engine.step()
                one.step(of_all_ranks(batch, step))
                for each_one in schedules:
                    step_schedule(each_one)
        rates = [each_one.get_last_lr() for each_one in schedules]
        assert rates[0] == rates[1]
        engine.destroy()
        for own, wanted in zip(engine.module.parameters(), one.params().values(), strict=True):
            torch.testing.assert_close(own, wanted, rtol=0, atol=1e-6)

    @each(stage=range(4), precision=("bf16", "fp16"), device=("none", "cpu"))
    def test_reach_the_masters(self, stage: int, precision: str, device: str) -> None:
        # Kills: a rate that the optimizer's own groups have, and those of the masters have not.
        if stage == 0 and device == "cpu":
            return
        engine = engine_of(
            linears(2, WIDTH), adamw, stage, precision, offload_optimizer={"device": device}
        )
        schedule = SCHEDULES["falls to nothing"](engine.optimizer)
        params = dict(engine.module.named_parameters())
        seen = [masters_of(params)]
        for step in range(4):
            engine.backward(mean_square(engine, placed(engine, batch(step, dist.get_rank()))))
            engine.step()
            if step < 3:
                schedule.step()
            seen.append(masters_of(params))
        pairs = zip(seen, seen[1:], strict=False)
        moved = [any(not torch.equal(a[name], b[name]) for name in a) for a, b in pairs]
        assert moved == [True, True, False, False]

    @pytest.mark.parametrize("stage", [1, 3])
    def test_have_nothing_else_of_torchs(self, stage: int) -> None:
        # Kills: hooks that are taken and never called, groups that nobody reduces, a copy that has
        # groups alone.
        optimizer = engine_of(linears(1, WIDTH), sgd, stage).optimizer
        for name in ("add_param_group", "register_step_pre_hook", "register_step_post_hook"):
            assert not hasattr(optimizer, name)
            with pytest.raises(AttributeError, match=rf"'{name}'; the torch optimizer that it has"):
                getattr(optimizer, name)
            assert hasattr(optimizer.optimizer, name)
        missing = {name for name in dir(torch.optim.Optimizer) if name.startswith("register_")}
        assert not any(hasattr(optimizer, name) for name in missing)
        assert optimizer.__getstate__() == vars(optimizer)
        assert optimizer.param_groups is optimizer.optimizer.param_groups

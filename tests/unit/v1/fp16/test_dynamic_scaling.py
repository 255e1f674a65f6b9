"""Loss scaling end to end: one scale, one overflow skips all, sums that fp16 cannot hold."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed.utils.logging import logger
from unit.common import DistributedTest
from unit.models import config_of, sgd
from unit.one_process import placed, train
from unit.v1.looping import each

LR = 0.25
RATES: dict[str, dict[str, float]] = {"SGD": {"lr": LR}, "AdamW": {"lr": LR, "eps": 1e-3}}
INF, NAN = float("inf"), float("nan")
STAGES = (0, 1, 2)


class Net(nn.Module):
    """Loss whose gradient is the mean of the inputs: exact in fp16 whatever the scale."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(5.0))
        self.other = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mean over rows of `x`, shape `[rows, 5]`."""
        return (x * self.weight).sum(1).mean() + self.other.sum() * 0.125


def make_engine(stage: int, optimizer: str = "SGD", accumulation: int = 1, **fp16: Any) -> Any:
    scaling = {"initial_scale_power": 4, "loss_scale_window": 2, "hysteresis": 1, **fp16}
    more: dict[str, Any] = {"optimizer": {"type": optimizer, "params": RATES[optimizer]}}
    more["zero_optimization"] = {"reduce_bucket_size": 5}
    config = config_of(stage, 1, accumulation, fp16={"enabled": True, **scaling}, **more)
    return deepspeed.initialize(model=Net(), config=config)[0]


def one_step(engine: Any, step: int, bad_rank: int | None = None, bad: float = INF) -> None:
    """One row per rank; rank r's is 1 + r, in every second step 2 + r, and `bad` on `bad_rank`."""
    value = bad if bad_rank == dist.get_rank() else 1.0 + dist.get_rank() + step % 2
    train(engine, [placed(engine, torch.full((1, 5), value))])


def full_state(engine: Any) -> list[torch.Tensor]:
    """All that a skipped step must leave: parameters, masters, moments, step counts."""
    params = list(engine.module.parameters())
    state = [param.detach().clone() for param in params]
    state += [safe_get_full_fp32_param(param).clone() for param in params]
    for key in ("exp_avg", "exp_avg_sq"):
        state += [safe_get_full_optimizer_state(param, key).clone() for param in params]
    for values in engine.optimizer.state.values():
        state += [torch.as_tensor(value).clone() for value in values.values()]
    return state


def bit_equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


class TestDefaultScale(DistributedTest):
    world_size = 1

    def test_an_fp16_loss_is_divided_behind_its_cast(self) -> None:
        # Kills: a division in fp16, whose gradient is the scale: 2^16 is infinite there.
        engine = make_engine(2, accumulation=2, initial_scale_power=16)
        for _ in range(2):
            output = engine(placed(engine, torch.full((1, 5), 2.0**-16)))
            assert output.dtype == torch.float16
            engine.backward(output)
            engine.step()
        assert engine.skipped_steps == 0 and engine.optimizer.loss_scale == 2.0**16


class TestDynamicScaling(DistributedTest):
    """Two ranks, all stages."""

    world_size = 2

    @each(stage=STAGES)
    def test_growth_unscales_with_the_scale_that_was_used(self, stage: int) -> None:
        # Kills: asking the scaler for its scale after update_scale: on the step where it doubles
        # the update is half as large.
        engine = make_engine(stage)
        weight = torch.arange(5.0)
        scales = []
        for step in range(6):
            scales.append(engine.optimizer.loss_scale)
            one_step(engine, step)
            gradient = 1.5 + step % 2  # the mean of both ranks' rows
            weight -= LR * gradient
            found = safe_get_full_fp32_param(engine.module.weight)
            assert torch.equal(found, weight), (step, scales)
            norm = (5 * gradient**2 + 4 * 0.125**2) ** 0.5
            assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-6)
        grown = [after / before for before, after in zip(scales, scales[1:], strict=False)]
        assert 2.0 in grown, "no step in this test made the scale grow"
        assert engine.skipped_steps == 0

    @each(stage=STAGES, bad=((0, INF), (1, INF), (1, NAN)))
    def test_overflow_on_one_rank_skips_on_both(self, stage: int, bad: tuple[int, float]) -> None:
        # Kills: a decision from the local gradient only (ranks part), an update before the
        # decision, a moment that is touched, a random number that is drawn, a skip that nobody
        # counts; a comparison with infinity, which nan passes.
        engine = make_engine(stage, "AdamW")
        one_step(engine, 0)
        before, random_before = full_state(engine), torch.get_rng_state()
        scale = engine.optimizer.loss_scale
        one_step(engine, 1, *bad)
        assert bit_equal(before, full_state(engine))
        assert torch.equal(random_before, torch.get_rng_state())
        assert engine.optimizer.overflow and not engine.was_step_applied()
        assert engine.skipped_steps == 1 and engine.global_steps == 2
        assert engine.optimizer.loss_scale == scale / 2
        # Kills: inf that stays behind in a gradient buffer and spoils the next step.
        one_step(engine, 2)
        assert engine.was_step_applied() and not engine.optimizer.overflow
        assert not bit_equal(before, full_state(engine))
        assert all(torch.isfinite(value.float()).all() for value in full_state(engine))

    @each(stage=STAGES)
    def test_overflow_in_an_early_micro_batch_skips(self, stage: int) -> None:
        # Kills: looking at the boundary micro-batch only.
        engine = make_engine(stage, "AdamW", accumulation=3)
        for micro in range(3):
            one_step(engine, micro)
        before = full_state(engine)
        for micro, bad_rank in enumerate((1, None, None)):
            one_step(engine, micro, bad_rank)
        assert bit_equal(before, full_state(engine)) and engine.skipped_steps == 1

    @each(stage=STAGES)
    def test_a_skip_is_logged_with_both_scales(
        self, stage: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Kills: silence, and a line with the scale after the change only.
        engine = make_engine(stage)
        said: list[str] = []
        logger.setLevel(logging.INFO)
        monkeypatch.setattr(logger, "handle", lambda record: said.append(record.getMessage()))
        one_step(engine, 0, bad_rank=1)
        if dist.get_rank() == 0:
            lines = [line for line in said if "skipped" in line]
            assert len(lines) == 1 and "loss scale 16 -> 8" in lines[0], said

    @each(stage=STAGES)
    def test_the_schedule_waits_for_applied_steps(self, stage: int) -> None:
        # Kills: a learning rate that moves on although nothing was learned.
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        config = config_of(stage, 1, fp16={"enabled": True, "initial_scale_power": 4})
        more = {"optimizer": optimizer, "lr_scheduler": schedule}
        engine = deepspeed.initialize(model=model, config=config, **more)[0]
        for step, (bad_rank, rate) in enumerate(((None, 0.5), (0, 0.5), (None, 0.25))):
            one_step(engine, step, bad_rank)
            assert engine.get_lr() == [rate]

    @each(stage=STAGES, setting=[(False, [16, 16, 8, 4]), (True, [16, 16, 16, 8])])
    def test_hysteresis(self, stage: int, setting: tuple[bool, list[float]]) -> None:
        # Kills: halving at the first overflow, and a clean step that refills (or doesn't) against
        # the setting.
        consecutive, scales = setting
        fp16 = {"hysteresis": 2, "consecutive_hysteresis": consecutive}
        engine = make_engine(stage, loss_scale_window=100, **fp16)
        seen = []
        for step, bad_rank in enumerate((0, None, 1, 0)):
            one_step(engine, step, bad_rank)
            seen.append(engine.optimizer.loss_scale)
        assert seen == scales
        assert engine.skipped_steps == 3

    @each(stage=STAGES)
    def test_overflow_at_the_minimum_raises_on_all_ranks(self, stage: int) -> None:
        # Kills: skipping for ever, and one rank that raises while the other waits for it.
        engine = make_engine(stage, initial_scale_power=1, min_loss_scale=1)
        one_step(engine, 0, bad_rank=1)
        assert engine.optimizer.loss_scale == 1
        with pytest.raises(RuntimeError, match="fp16.min_loss_scale"):
            one_step(engine, 1, bad_rank=1)

    @each(stage=STAGES)
    def test_static_scale_skips_and_stays(self, stage: int) -> None:
        # Kills: a static scale under which a non-finite gradient is applied.
        engine = make_engine(stage, "AdamW", loss_scale=64)
        one_step(engine, 0)
        before = full_state(engine)
        one_step(engine, 1, bad_rank=0)
        assert bit_equal(before, full_state(engine))
        assert engine.optimizer.loss_scale == 64 and engine.skipped_steps == 1


class TestOtherPrecisions(DistributedTest):
    """Without loss scaling the decision is the same."""

    world_size = 2

    @each(stage=STAGES, precision=("fp32", "bf16", "bf16+fp32"))
    def test_a_bad_gradient_skips_on_both(self, stage: int, precision: str) -> None:
        # Kills: a check that only fp16 has.
        dtype, _, sums_in = precision.partition("+")
        more: dict[str, Any] = {"data_types": {"grad_accum_dtype": sums_in}} if sums_in else {}
        more["optimizer"] = {"type": "AdamW", "params": RATES["AdamW"]}
        config = config_of(stage, 1, 1, dtype, zero_optimization={"reduce_bucket_size": 5}, **more)
        engine = deepspeed.initialize(model=Net(), config=config)[0]
        for step, bad_rank in enumerate([None, 1, None]):
            before = [param.detach().clone() for param in engine.module.parameters()]
            one_step(engine, step, bad_rank)
            unchanged = bit_equal(before, [param.detach() for param in engine.module.parameters()])
            assert unchanged == (bad_rank is not None), step
        assert engine.skipped_steps == 1


TINY_LR = 2.0**-16


class TestLargeSums(DistributedTest):
    """On two to four ranks, whose sum is 2^16 or more; fp16 ends just below."""

    world_size = [2, 3, 4]

    @each(stage=STAGES, factor=(None, 1.0))
    def test_a_mean_that_is_divided_first(self, stage: int, factor: float | None) -> None:
        # Kills: summing before any division: the sum is infinite, and every step is skipped; a
        # configured factor that is overruled; with 1 the sum overflows, as was asked for.
        more: dict[str, Any] = {} if factor is None else {"gradient_predivide_factor": factor}
        # Summed by the collective; host backends sum slices in fp32 otherwise.
        more["zero_optimization"] = {"reduce_scatter": False}
        more["fp16"] = {"enabled": True, "loss_scale": 1.0}
        config = config_of(stage, 1, optimizer=sgd(TINY_LR), **more)
        model = Net()
        nn.init.zeros_(model.weight)
        engine = deepspeed.initialize(model=model, config=config)[0]
        gradient = 2.0**16 / (dist.get_world_size() // 2 * 2)
        train(engine, [placed(engine, torch.full((1, 5), gradient))])
        assert engine.skipped_steps == int(factor is not None)
        if factor is None:
            weight = model.weight.detach().float()
            assert torch.equal(weight, torch.full((5,), -TINY_LR * gradient))
        engine.destroy()

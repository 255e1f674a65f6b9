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
from unit.v1.looping import each

LR = 0.25
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


def config_of(stage: int, optimizer: str = "SGD", **fp16: Any) -> dict[str, Any]:
    params = {"lr": LR} if optimizer == "SGD" else {"lr": LR, "eps": 1e-3}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": optimizer, "params": params},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 5},
        "fp16": {
            "enabled": True,
            "initial_scale_power": 4,
            "loss_scale_window": 2,
            "hysteresis": 1,
            **fp16,
        },
    }


def make_engine(stage: int, optimizer: str = "SGD", **fp16: Any) -> Any:
    engine, _, _, _ = deepspeed.initialize(model=Net(), config=config_of(stage, optimizer, **fp16))
    return engine


def rows(step: int, bad_rank: int | None = None) -> torch.Tensor:
    """One row per rank; rank r's is 1 + r, and inf on `bad_rank`."""
    value = float("inf") if bad_rank == dist.get_rank() else 1.0 + dist.get_rank() + step % 2
    return torch.full((1, 5), value, dtype=torch.float16)


def one_step(engine: Any, step: int, bad_rank: int | None = None) -> None:
    engine.backward(engine(rows(step, bad_rank)))
    engine.step()


def expected_gradient(step: int) -> float:
    """Mean over ranks of `rows`."""
    world = dist.get_world_size()
    return sum(1.0 + rank + step % 2 for rank in range(world)) / world


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
    return len(left) == len(right) and all(
        torch.equal(a, b) for a, b in zip(left, right, strict=True)
    )


class Captured(logging.Handler):
    """What the project's logger said."""

    def __init__(self) -> None:
        super().__init__(level=logging.DEBUG)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the line."""
        self.lines.append(record.getMessage())

    def __enter__(self) -> Captured:
        self.level_before = logger.level
        logger.setLevel(logging.INFO)
        logger.addHandler(self)
        return self

    def __exit__(self, *exc: object) -> None:
        logger.removeHandler(self)
        logger.setLevel(self.level_before)


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
            gradient = expected_gradient(step)
            weight -= LR * gradient
            assert torch.equal(safe_get_full_fp32_param(engine.module.weight), weight), (
                step,
                scales,
            )
            assert engine.get_global_grad_norm() == pytest.approx(
                (5 * gradient**2 + 4 * 0.125**2) ** 0.5, rel=1e-6
            )
        grown = [after / before for before, after in zip(scales, scales[1:], strict=False)]
        assert 2.0 in grown, "no step in this test made the scale grow"
        assert engine.skipped_steps == 0

    @each(stage=STAGES, bad_rank=(0, 1))
    def test_overflow_on_one_rank_skips_on_both(self, stage: int, bad_rank: int) -> None:
        # Kills: a decision from the local gradient only (ranks part), an update before the
        # decision, a moment that is touched, a random number that is drawn, a skip that nobody
        # counts.
        engine = make_engine(stage, "AdamW")
        one_step(engine, 0)
        before, random_before = full_state(engine), torch.get_rng_state()
        scale = engine.optimizer.loss_scale
        one_step(engine, 1, bad_rank)
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
    def test_nan_is_an_overflow_too(self, stage: int) -> None:
        # Kills: a comparison with infinity, which nan passes.
        engine = make_engine(stage, "AdamW")
        one_step(engine, 0)
        before = full_state(engine)
        bad = torch.full((1, 5), float("nan") if dist.get_rank() == 1 else 1.0, dtype=torch.float16)
        engine.backward(engine(bad))
        engine.step()
        assert bit_equal(before, full_state(engine)) and engine.skipped_steps == 1

    @each(stage=STAGES)
    def test_overflow_in_an_early_micro_batch_skips(self, stage: int) -> None:
        # Kills: looking at the boundary micro-batch only.
        config = {**config_of(stage, "AdamW"), "gradient_accumulation_steps": 3}
        engine, _, _, _ = deepspeed.initialize(model=Net(), config=config)
        for micro in range(3):
            one_step(engine, micro)
        before = full_state(engine)
        for micro in range(3):
            one_step(engine, micro, bad_rank=1 if micro == 0 else None)
        assert bit_equal(before, full_state(engine)) and engine.skipped_steps == 1

    @each(stage=STAGES)
    def test_a_skip_is_logged_with_both_scales(self, stage: int) -> None:
        # Kills: silence, and a line with the scale after the change only.
        engine = make_engine(stage)
        with Captured() as log:
            one_step(engine, 0, bad_rank=1)
        if dist.get_rank() == 0:
            lines = [line for line in log.lines if "skipped" in line]
            assert len(lines) == 1 and "loss scale 16 -> 8" in lines[0], log.lines

    @each(stage=STAGES)
    def test_the_schedule_waits_for_applied_steps(self, stage: int) -> None:
        # Kills: a learning rate that moves on although nothing was learned.
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        config = {key: value for key, value in config_of(stage).items() if key != "optimizer"}
        engine, _, _, _ = deepspeed.initialize(
            model=model, optimizer=optimizer, lr_scheduler=schedule, config=config
        )
        one_step(engine, 0)
        assert engine.get_lr() == [0.5]
        one_step(engine, 1, bad_rank=0)
        assert engine.get_lr() == [0.5]
        one_step(engine, 2)
        assert engine.get_lr() == [0.25]

    @each(stage=STAGES, setting=[(False, [16, 16, 8, 4]), (True, [16, 16, 16, 8])])
    def test_hysteresis(self, stage: int, setting: tuple[bool, list[float]]) -> None:
        # Kills: halving at the first overflow, and a clean step that refills (or doesn't) against
        # the setting.
        consecutive, scales = setting
        engine = make_engine(
            stage, hysteresis=2, consecutive_hysteresis=consecutive, loss_scale_window=100
        )
        bad = [0, 1, 0]  # ranks that overflow, with one clean step after the first
        one_step(engine, 0, bad_rank=bad[0])
        seen = [engine.optimizer.loss_scale]
        one_step(engine, 1)
        seen.append(engine.optimizer.loss_scale)
        for step, rank in enumerate(bad[1:]):
            one_step(engine, 2 + step, bad_rank=rank)
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
        config = {key: value for key, value in config_of(stage, "AdamW").items() if key != "fp16"}
        if precision != "fp32":
            config["bf16"] = {"enabled": True}
        if precision == "bf16+fp32":
            config["data_types"] = {"grad_accum_dtype": "fp32"}
        engine, _, _, _ = deepspeed.initialize(model=Net(), config=config)
        dtype = torch.float32 if precision == "fp32" else torch.bfloat16
        for step, bad_rank in enumerate([None, 1, None]):
            before = [param.detach().clone() for param in engine.module.parameters()]
            engine.backward(engine(rows(step, bad_rank).to(dtype)))
            engine.step()
            unchanged = bit_equal(before, [param.detach() for param in engine.module.parameters()])
            assert unchanged == (bad_rank is not None), step
        assert engine.skipped_steps == 1


TINY_LR = 2.0**-16
NUMEL = 16


class Linear(nn.Module):
    """Its gradient is its input, exactly."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(NUMEL))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def engine_of(stage: int, **more: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": TINY_LR}},
        # Summed by the collective; host backends sum slices in fp32 otherwise.
        "zero_optimization": {"stage": stage, "reduce_scatter": False},
        "fp16": {"enabled": True, "loss_scale": 1.0},
        **more,
    }
    return deepspeed.initialize(model=Linear(), config=config)[0]


def gradient() -> float:
    """A power of two; all ranks' sum is 2^16 or more, and fp16 ends just below."""
    return 2.0**16 / (dist.get_world_size() // 2 * 2)


def step(engine: Any) -> None:
    engine.backward(engine(torch.full((NUMEL,), gradient(), dtype=torch.float16)))
    engine.step()


class TestLargeSums(DistributedTest):
    """On two to four ranks."""

    world_size = [2, 3, 4]

    @each(stage=(0, 1, 2))
    def test_the_mean_is_used(self, stage: int) -> None:
        # Kills: summing before any division: the sum is infinite, and every step is skipped.
        engine = engine_of(stage)
        step(engine)
        assert engine.skipped_steps == 0
        weight = next(engine.module.parameters())
        assert torch.equal(weight.detach().float(), torch.full((NUMEL,), -TINY_LR * gradient()))
        engine.destroy()

    @each(stage=(0, 1, 2))
    def test_the_users_factor_is_used(self, stage: int) -> None:
        # Kills: a configured factor that is overruled; with 1 the sum overflows, as was asked for.
        engine = engine_of(stage, gradient_predivide_factor=1.0)
        step(engine)
        assert engine.skipped_steps == 1
        engine.destroy()

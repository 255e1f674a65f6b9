"""A gradient that overflows on one stage: all skip the step, adapt the scale, go on."""

from typing import Any

import pytest
import torch

from deepspeed import comm as dist
from unit.common import DistributedTest
from unit.v1.contract.reference import LOSS_SCALE
from unit.v1.looping import each
from unit.v1.pipe.contract import runner
from unit.v1.pipe.contract.cases import PipeCase
from unit.v1.pipe.contract.runner import PipeRun

original_config = runner.pipe_config


def config_without_patience(case: PipeCase) -> dict[str, Any]:
    """Every overflow halves a dynamic scale."""
    config = original_config(case)
    config["fp16"]["hysteresis"] = 1
    return config


class OverflowRun(PipeRun):
    """One weight's gradient on one stage and rank is infinite in the steps that are told."""

    def __init__(self, case: PipeCase, stage: int) -> None:
        super().__init__(case)
        self.is_infinite = False
        if self.model.stage_id == stage and self.replica == case.replicas - 1:
            weight = next(param for param in self.params.values() if param.dim() >= 2)
            weight.register_hook(lambda grad: grad * float("inf") if self.is_infinite else grad)

    def state(self) -> tuple[Any, ...]:
        """What all ranks must agree on."""
        engine = self.engine
        return (
            engine.skipped_steps,
            engine.global_steps,
            engine.was_step_applied(),
            engine.optimizer.cur_scale,
        )

    def overflow(self, step: int, wanted: tuple[Any, ...]) -> None:
        """A step that changes the scale, and nothing else, on all ranks."""
        before = self.everywhere(self.masters())
        self.is_infinite = True
        self.train(step)
        self.is_infinite = False
        self.compare_tensors(
            step, "parameter", self.everywhere(self.masters()), before, dict.fromkeys(before, 0.0)
        )
        if self.state() != wanted:
            self.fail(
                step, f"skipped steps, steps, applied and scale are {self.state()}, not {wanted}"
            )

    def check(self) -> None:
        """Overflow twice, then train; an AssertionError tells what any rank found."""
        scales = [LOSS_SCALE / 2, LOSS_SCALE / 4] if self.pipe_case.adaptive else [LOSS_SCALE] * 2
        for step, scale in enumerate(scales):
            self.overflow(step, (step + 1, step + 1, False, scale))
        before = self.everywhere(self.masters())
        self.train(2)
        after = self.everywhere(self.masters())
        if self.state() != (2, 3, True, scales[-1]) or all(
            torch.equal(before[name], after[name]) for name in before
        ):
            self.fail(2, f"the step after the skipped ones is not applied: {self.state()}")
        self.engine.destroy()
        failures: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(failures, self.failures)
        assert not any(failures), failures


class TestFourRanks(DistributedTest):
    world_size = 4

    @each(settings=((2, 0, False), (2, 1, True), (4, 0, True), (4, 1, False)))
    def test_all_stages_skip(
        self, settings: tuple[int, int, bool], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Kills: a stage that decides by its own gradients or its own replicas', a scale that adapts
        # on that stage only.
        monkeypatch.setattr(runner, "pipe_config", config_without_patience)
        pipe, zero, adaptive = settings
        for stage, schedule in zip(
            (0, pipe - 1, 1), ("1f1b", "interleaved", "zero_bubble"), strict=True
        ):
            case = PipeCase(
                zero, "fp16", 3, True, False, True, False, "huge", 4,
                pipe=pipe, schedule=schedule, tied=True, adaptive=adaptive,
            )  # fmt: skip
            OverflowRun(case, stage).check()

"""The ledger finds faults planted in the library, says what they did, and raises on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepspeed
from deepspeed import comm as dist
from deepspeed.runtime.engine_parts.losses import Losses
from deepspeed.runtime.gradients.bucket_hooks import BucketHooks
from deepspeed.runtime.gradients.ledger.gradient_ledger import GradientLedgerError
from deepspeed.runtime.gradients.reduction import GradientContext
from deepspeed.runtime.optimizers.settings import StepSettings
from deepspeed.runtime.optimizers.step_outcome import Outcomes
from deepspeed.runtime.zero.stage_1_and_2 import Bucketed
from unit.common import DistributedTest
from unit.models import config_of
from unit.v1.contract import test_contract_bites as bites
from unit.v1.contract.matrix import Case
from unit.v1.contract.runner import CaseRun

BF16 = Case(2, "bf16", 3, False, False, True, False, "huge", 2)
FAULT = Callable[[pytest.MonkeyPatch], None]


def on_rank(rank: int, change: Callable[[Bucketed, int, list[Any]], None]) -> FAULT:
    """One rank's message is changed; `change` gets reduction, micro-batch, and gradients."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = Bucketed.average_tensor

        def average_tensor(self: Bucketed, index: int, grads: list[Any]) -> None:
            if dist.get_rank() == rank:
                change(self, self.context.tracker.micro_steps % self.context.tracker.steps, grads)
            original(self, index, grads)

        patch.setattr(Bucketed, "average_tensor", average_tensor)

    return plant


def double_the_second(reduction: Bucketed, micro: int, grads: list[Any]) -> None:
    if micro == 1:
        grads[:] = [None if grad is None else grad * 2 for grad in grads]


def drop_the_second(reduction: Bucketed, micro: int, grads: list[Any]) -> None:
    if micro == 1:
        grads[:] = [None] * len(grads)


def drop_biases_of_nine(reduction: Bucketed, micro: int, grads: list[Any]) -> None:
    grads[:] = [None if grad is not None and grad.shape == (9,) else grad for grad in grads]


def do_not_divide_the_loss(patch: pytest.MonkeyPatch) -> None:
    """engine.backward forgets the accumulation steps."""
    patch.setattr(Losses, "divided", lambda self, loss, scale_wrt_gas: loss)


def unscale_by_another_scale(patch: pytest.MonkeyPatch) -> None:
    """The loss scale that the step divides by is not the one that the loss was multiplied by."""
    original = Outcomes._used_scale
    patch.setattr(Outcomes, "_used_scale", lambda self: original(self) * 8)


def read_one_element_too_early(patch: pytest.MonkeyPatch) -> None:
    """What memory that was read too early does: NaN, though contributions are finite."""
    original = Bucketed.finish_gradients

    def finish_gradients(self: Bucketed) -> None:
        original(self)
        if dist.get_rank() == 0:
            self.groups[0].grad[0] = float("nan")

    patch.setattr(Bucketed, "finish_gradients", finish_gradients)


# By kind and text of the finding: fault, where, a parameter that must be named.
EMBED, WIDE, LIFT = "embed.weight", "wide.weight", "lift.bias"
SOMETIMES, BACK, TWICE = "sometimes.weight", "back.weight", "twice.bias"
FAULTS: dict[str, list[tuple[FAULT, Case, str]]] = {
    "divisor: divided by the number of ranks twice": [
        (bites.divide_twice, bites.STAGE_0, EMBED),
        (bites.divide_twice, bites.STAGE_1, EMBED),
    ],
    "divisor: not divided by the accumulation steps": [
        (do_not_divide_the_loss, bites.STAGE_1_FP32, EMBED),
        (do_not_divide_the_loss, bites.STAGE_0, EMBED),
    ],
    "divisor: effective divisor is 8 times": [(unscale_by_another_scale, bites.STAGE_2, EMBED)],
    "stale: previous step is used again": [
        (bites.keep_stale_buffers, bites.STAGE_0_ONCE, SOMETIMES)
    ],
    "stale: previous step was added": [(bites.add_to_the_last_step, bites.STAGE_1_FP32, LIFT)],
    "unexplained: differs from the right one": [
        (bites.leave_absent_as_it_was, bites.STAGE_2, "never"),
        (read_one_element_too_early, bites.STAGE_1_FP32, EMBED),
    ],
    "lost: everything but micro-batch 3 of 3": [
        (bites.keep_the_last_micro_batch, bites.STAGE_2, WIDE),
        (bites.keep_the_last_micro_batch, bites.OFFLOAD, WIDE),
    ],
    "lost: rank 0, all micro-batches, never arrived": [(bites.lose_own_part, bites.STAGE_1, BACK)],
    "lost: rank 0, micro-batch 2 of 3 never arrived": [(on_rank(0, drop_the_second), BF16, WIDE)],
    "lost: rank 1, all micro-batches, never arrived": [
        (on_rank(1, drop_biases_of_nine), bites.STAGE_1, TWICE)
    ],
    "lost: 3 of 3 was added after the reduction": [
        (bites.reduce_before_the_last_micro_batch, bites.ACCUMULATOR, WIDE)
    ],
    "lost: nothing arrived": [
        (bites.skip_a_small_gradient, bites.ACCUMULATOR, LIFT),
        (bites.skip_a_small_gradient, bites.LOCAL_ACCUMULATOR, LIFT),
        (bites.send_what_is_ready_only, bites.STAGE_1_FP32, EMBED),
    ],
    "doubled: rank 1, micro-batch 2 of 3 was counted twice": [
        (on_rank(1, double_the_second), BF16, WIDE)
    ],
}


def error_of(plant: FAULT, case: Case) -> GradientLedgerError:
    """What the ledger says of the case with the fault; the same on all ranks."""
    error: GradientLedgerError | None = None
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        try:
            CaseRun(case).run()
        except GradientLedgerError as raised:
            error = raised
    return agreed(error)


def agreed(error: GradientLedgerError | None) -> GradientLedgerError:
    """The error, which every rank must have, in the same words."""
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, str(error))
    assert error is not None and len(set(texts)) == 1, f"not the same on all ranks: {texts}"
    return error


class TestFaults(DistributedTest):
    world_size = 2
    exec_timeout = 120

    def test_every_fault_is_found_and_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Kills: a ledger that asks the optimizer instead of comparing, misses a kind, or names it
        # wrongly.
        monkeypatch.setenv("DS_VERIFY", "ledger")
        rows = [(*wanted.split(": "), *row) for wanted in FAULTS for row in FAULTS[wanted]]
        for kind, text, plant, case, parameter in rows:
            first = error_of(plant, case).findings[0]
            where = f"{getattr(plant, '__name__', plant)} on {case.name}: {first}"
            assert first.kind == kind and text in first.text, where
            assert parameter in first.parameters, where
            # Kills: blaming parameters that the fault leaves alone.
            assert ("never" in first.parameters) == (parameter == "never"), where


class TestWrongGroup(DistributedTest):
    """Two groups of two ranks that think they are the whole world."""

    world_size = 4
    exec_timeout = 120

    def test_group_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Kills: comparing only the mean over ranks, which is right; the optimizer's group.
        monkeypatch.setenv("DS_VERIFY", "ledger")
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        original = StepSettings.context

        def context(self: StepSettings, *args: Any) -> GradientContext:
            made = original(self, *args)
            made.dp_process_group = pairs[dist.get_rank() // 2]
            return made

        case = Case(0, "fp32", 3, False, False, True, False, "huge", 4)
        error = error_of(lambda patch: patch.setattr(StepSettings, "context", context), case)
        kinds = {(finding.kind, finding.text) for finding in error.findings}
        for pair in ([0, 1], [2, 3]):
            said = f"summed over ranks {pair} instead of [0, 1, 2, 3], and divided by 4"
            assert ("group", said) in kinds, error
        assert "rank(s) [0, 1, 2, 3]" in str(error)


class Recomputed(nn.Module):
    """A layer used by two reentrant checkpoints: its gradient comes twice per backward."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.shared = nn.Linear(8, 8)
        self.after = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.shared, self.before(x), use_reentrant=True)
        x = checkpoint(self.shared, x.tanh(), use_reentrant=True)
        return self.after(x).square().mean()


class TestLate(DistributedTest):
    world_size = 2

    def test_a_gradient_that_misses_its_bucket(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Kills: a ledger that does not know when buckets are sealed, or calls a resend late.
        sgd = {"type": "SGD", "params": {"lr": 0.1}}
        keys = {"optimizer": sgd, "verify": {"ledger": True}}
        config = config_of(2, 2, zero_optimization={"reduce_bucket_size": 72}, **keys)
        for forgets in (False, True):
            torch.manual_seed(0)
            engine, *_ = deepspeed.initialize(model=Recomputed(), config=config)
            error = None
            with pytest.MonkeyPatch.context() as patch:
                if forgets:
                    patch.setattr(BucketHooks, "late", lambda self: [])
                try:
                    engine.backward(engine(torch.randn(2, 8)))
                    engine.step()
                except GradientLedgerError as raised:
                    error = raised
            engine.destroy()
            if forgets:
                found = agreed(error).findings[0]
                assert found.kind == "late" and "after their bucket had been sealed" in found.text
                assert set(found.parameters) == {"shared.weight", "shared.bias"}
            else:
                assert error is None

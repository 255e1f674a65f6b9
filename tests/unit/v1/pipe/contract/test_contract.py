"""The pipeline's contract: losses, gradients, norm and parameters equal those of one process.

`make test` runs a subset with every pair of values; `-m contract` the whole product. The bounds,
and where they are zero, stand in `reference`, the faults found in `test_contract_bites`.
"""

import itertools
from typing import Any

import pytest
import torch

from deepspeed import comm as dist
from unit.common import DistributedTest
from unit.v1.contract.matrix import all_pairs, of_world, pairs_of, pairwise
from unit.v1.contract.reference import LOSS_SCALE
from unit.v1.contract.runner import run_cases
from unit.v1.gathering import from_all_ranks
from unit.v1.looping import each
from unit.v1.pipe.contract import reference, runner
from unit.v1.pipe.contract.cases import FACTORS, SHARES, PipeCase, pair_cases, product_cases
from unit.v1.pipe.contract.runner import PipeRun


class TestPairs(DistributedTest):
    """All pairs of values; one launched world runs all of its configurations."""

    world_size = [1, 2, 4]
    exec_timeout = 240

    def test(self) -> None:
        # Kills: what assumes a neighbour (a message to itself, chunks of one stage, a last stage
        # that is not the first); data ranks and stages mixed up, a loss divided twice or never,
        # ties not summed; what is right for a first and a last stage only; norms over one axis of
        # the grid.
        run_cases(of_world(pair_cases(), dist.get_world_size()), PipeRun)


@pytest.mark.contract
@pytest.mark.parametrize("share", range(SHARES))
class TestProduct(DistributedTest):
    """The whole product, cut into shares."""

    world_size = [1, 2, 4]
    exec_timeout = 900

    def test(self, share: int) -> None:
        # Kills: what only three or more settings together bring out.
        run_cases(of_world(product_cases(), dist.get_world_size())[share::SHARES], PipeRun)


def test_pairs_are_covered() -> None:
    # Kills: a cover that leaves a pair out, or whose cases say something else than its rows.
    rows = pairwise(FACTORS, [376])
    assert set().union(*(pairs_of(row, FACTORS) for row in rows)) == all_pairs(FACTORS)
    cases = pair_cases()
    assert {(case.pipe, case.replicas) for case in cases} == set(FACTORS["grid"])
    assert {(case.schedule, case.checkpoint) for case in cases} == set(FACTORS["plan"])
    assert {case.precision for case in cases} == {"fp32", "bf16", "bf16+fp32", "fp16"}
    assert {case.adaptive for case in cases if case.precision == "fp16"} == {False, True}
    assert len({case.name for case in cases}) == len(cases) == 25


def test_product_is_whole() -> None:
    # Kills: a product that drops a schedule, or turns that never bring a value to some schedule.
    cases = product_cases()
    wanted = "pipe world schedule precision adaptive stage dynamic tied clip".split()
    combinations = {tuple(getattr(case, name) for name in wanted) for case in cases}
    assert len(combinations) == len(cases) == 5 * 3 * 5 * 2**4
    turns = {(case.schedule, case.overlap, case.offload, case.accumulation) for case in cases}
    schedules = ("1f1b", "interleaved", "zero_bubble")
    switches = (True, False)
    assert turns == set(itertools.product(schedules, switches, switches, (1, 4, 7)))


def test_two_uses_are_one_weight() -> None:
    # Kills: a reference that is wrong about ties. In double precision, against a weight that the
    # layers really share.
    case = PipeCase(0, "fp32", 3, tied=True)
    apart, shared = (reference.Chain(tied=True).double() for _ in range(2))
    shared.layers[-1].weight = shared.layers[0].weight  # type: ignore[union-attr]  # both are modules
    for chain in (apart, shared):
        for micro in reference.batch(case, 0, 0):
            chain.backward(micro, 3, 1.0)
    named = apart.trainable().items()
    grads = {name: param.grad for name, param in named if param.grad is not None}
    total = reference.merged(grads, True)[reference.SHARED]
    torch.testing.assert_close(total, shared.layers[0].weight.grad, rtol=1e-12, atol=1e-15)  # type: ignore[union-attr]  # as above


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
        steps = (engine.skipped_steps, engine.global_steps)
        return (*steps, engine.was_step_applied(), engine.optimizer.cur_scale)

    def overflow(self, step: int, wanted: tuple[Any, ...]) -> None:
        """A step that changes the scale, and nothing else, on all ranks."""
        before = self.everywhere(self.masters())
        self.is_infinite = True
        self.train(step)
        self.is_infinite = False
        self.check_unchanged(step, before)
        if (state := self.state()) != wanted:
            self.fail(step, f"skipped steps, steps, applied and scale are {state}, not {wanted}")

    def check(self) -> None:
        """Overflow twice, then train; an AssertionError tells what any rank found."""
        scales = [LOSS_SCALE / 2, LOSS_SCALE / 4] if self.pipe_case.adaptive else [LOSS_SCALE] * 2
        for step, scale in enumerate(scales):
            self.overflow(step, (step + 1, step + 1, False, scale))
        before = self.everywhere(self.masters())
        self.train(2)
        after = self.everywhere(self.masters())
        trained = not all(torch.equal(before[name], after[name]) for name in before)
        if self.state() != (2, 3, True, scales[-1]) or not trained:
            self.fail(2, f"the step after the skipped ones is not applied: {self.state()}")
        self.engine.destroy()
        failures = from_all_ranks(self.failures)
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
        schedules = ("1f1b", "interleaved", "zero_bubble")
        for stage, schedule in zip((0, pipe - 1, 1), schedules, strict=True):
            keys = {"world": 4, "pipe": pipe, "schedule": schedule, "adaptive": adaptive}
            case = PipeCase(zero, "fp16", 3, True, tied=True, **keys)
            OverflowRun(case, stage).check()

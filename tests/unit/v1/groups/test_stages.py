"""Stages with different numbers of parameter groups: one norm, one collective, no deadlock."""

from __future__ import annotations

import copy

import pytest
import torch

import deepspeed
from deepspeed import comm as dist
from deepspeed.comm.watch import intent
from deepspeed.runtime.config import DeepSpeedConfigError
from deepspeed.runtime.gradients.norm import local_squared_norm
from deepspeed.runtime.zero.stage_1_and_2 import ZeroMasters
from unit.common import DistributedTest
from unit.models import config_of
from unit.one_process import mean_square
from unit.v1.groups.stages import (
    CUTS,
    ROWS,
    SYSTEMS,
    TOLERANCE,
    Reference,
    Stages,
    batch,
    engine_of,
    make_layers,
    master,
    start,
    train_step,
    world_collectives,
)
from unit.v1.looping import each

STEPS = 4


def check_training(mpu: Stages, system: str, cut: str) -> None:
    engine = start(mpu, system, CUTS[cut][mpu.stage])
    reference = Reference(cut, engine.model_dtype)
    num_groups = len(reference.aligned)
    tolerance = TOLERANCE[system]
    for step in range(STEPS):
        with world_collectives() as calls:
            train_step(engine, mpu, step)
        assert calls == [("all_reduce", num_groups, torch.float32)], f"step {step}: {calls}"
        norm, norms = reference.step(step, mpu.data_size)
        found, of_groups = float(engine.get_global_grad_norm()), engine.get_group_grad_norms()
        assert found == pytest.approx(norm, rel=tolerance), f"step {step}"
        assert of_groups == pytest.approx(norms, rel=2 * tolerance), f"step {step}"
    rights = reference.stages[mpu.stage].parameters()
    for param, right in zip(engine.module.parameters(), rights, strict=True):
        distance = (master(param) - right).norm().item()
        assert distance <= STEPS * tolerance * (0.1 + right.norm().item())
    engine.optimizer.load_state_dict(engine.optimizer.state_dict())
    engine.destroy()


class TestTwoStages(DistributedTest):
    """A stage per rank."""

    world_size = 2

    @each(system=SYSTEMS, cut=CUTS)
    def test_train(self, system: str, cut: str) -> None:
        # Kills: a collective per group (a deadlock here), a norm of the own stage, a norm that
        # counts a stage's groups only as far as the other has as many, an optimizer that cannot be
        # empty, state that such an optimizer cannot return.
        check_training(Stages(2), system, cut)

    @each(system=["stage 0", "stage 1", "BF16_Optimizer"])
    def test_overflow_on_one_stage_skips_on_both(self, system: str) -> None:
        # Kills: a decision from the own stage's gradients; a frozen stage that counts another
        # number of steps.
        mpu = Stages(2)
        engine = start(mpu, system, CUTS["a frozen stage"][mpu.stage])
        for step in range(3):
            handles = []
            if step == 1 and mpu.stage == 0:
                handles = [engine.module[0].weight.register_hook(lambda grad: grad * float("nan"))]
            train_step(engine, mpu, step)
            assert engine.was_step_applied() is (step != 1)
            for handle in handles:
                handle.remove()
        assert engine.skipped_steps == 1 and engine.global_steps == 3

    def test_optimizer_of_the_configuration(self) -> None:
        # Kills: torch's refusal to make an optimizer of nothing on a stage that trains nothing.
        mpu = Stages(2)
        layers = make_layers(mpu.stage).requires_grad_(mpu.stage == 0)
        config = config_of(1, ROWS, optimizer={"type": "AdamW", "params": {"lr": 0.01}})
        engine, optimizer, _, _ = deepspeed.initialize(model=layers, config=config, mpu=mpu)
        for step in range(3):
            train_step(engine, mpu, step)
        assert engine.get_global_grad_norm() > 0.0 and len(optimizer.param_groups) == 1

    def test_a_stage_that_cannot_be_trained_is_refused_on_all(self) -> None:
        # Kills: a stage that raises while the others wait for its number of groups.
        mpu = Stages(2)
        layers = make_layers(mpu.stage)
        trained = copy.deepcopy(layers) if mpu.stage == 1 else layers
        told = "another rank" if mpu.stage == 0 else "in group 0 of SGD are not parameters of"
        with pytest.raises(DeepSpeedConfigError, match=told):
            engine_of(layers, trained.parameters(), mpu)

    def test_a_stage_without_optimizer_is_refused_on_all(self) -> None:
        # Kills: ranks with an optimizer that wait for the norm of one without.
        mpu = Stages(2)
        layers = make_layers(mpu.stage)
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.1) if mpu.stage == 0 else None
        told = f"rank {dist.get_rank()} has {'one' if mpu.stage == 0 else 'none'}"
        config = config_of(0, ROWS)
        with pytest.raises(DeepSpeedConfigError, match=told):
            deepspeed.initialize(model=layers, optimizer=optimizer, config=config, mpu=mpu)

    def test_a_collective_per_group_is_noticed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # The mutant: what fix 3 replaced. Stages with 1 and 3 groups would wait for each other; the
        # intent check says so.
        def per_group(self: ZeroMasters) -> torch.Tensor:
            total = torch.zeros(1, device=self.device)
            for index in range(len(self.groups)):
                squared = local_squared_norm(self._norm_grads(index), self.device)
                dist.all_reduce(squared, group=self.norm_group)
                total += squared
            return total.sqrt_()

        monkeypatch.setattr(ZeroMasters, "scaled_global_norm", per_group)
        mpu = Stages(2)
        engine = start(mpu, "stage 1", CUTS["1 and 3 groups"][mpu.stage])
        intent.enable(timeout_s=3.0)
        with pytest.raises(intent.CollectiveMismatchError, match=r"(?s)all_reduce.*per_group"):
            for step in range(3):
                train_step(engine, mpu, step)
                dist.all_reduce(torch.zeros(2))  # what a training loop logs
        intent.disable()


class TestStagesOfTwo(DistributedTest):
    """Two stages by two data-parallel ranks, under the intent check."""

    world_size = 4

    @each(system=SYSTEMS, cut=["1 and 3 groups", "a frozen stage", "a stage with nothing"])
    def test_train(self, system: str, cut: str) -> None:
        # Kills: data-parallel replicas of a stage that are all counted, first replicas that are no
        # group's first rank.
        if system != "stage 2":
            check_training(Stages(2), system, cut)
            return
        intent.enable()
        check_training(Stages(2), system, cut)
        intent.disable()


class TestOneRankAlone(DistributedTest):
    """Without model parallelism nobody else trains anything."""

    world_size = 1

    @each(stage=[0, 1, 2])
    def test_an_optimizer_without_trainable_parameters_is_refused(self, stage: int) -> None:
        # Kills: a forgotten requires_grad that trains nothing without a word.
        layers = make_layers(0).requires_grad_(False)
        with pytest.raises(ValueError, match="no trainable parameter: check requires_grad"):
            engine_of(layers, layers.parameters(), zero_optimization={"stage": stage})

    def test_no_collective_where_nothing_is_to_be_summed(self) -> None:
        # Kills: a reduction over one rank, which costs a launch and a wait on devices.
        for stage in (0, 1, 2):
            layers = make_layers(0)
            engine = engine_of(layers, layers.parameters(), zero_optimization={"stage": stage})
            engine.backward(mean_square(engine, batch(0, 0, 0)))
            with world_collectives() as calls:
                engine.step()
            assert calls == [] and engine.get_global_grad_norm() > 0

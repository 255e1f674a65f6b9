"""Stages with different numbers of parameter groups: one norm, one collective, no deadlock.
A weight that two of them share: its gradient is summed over them once, and counted once.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.comm.watch import intent
from deepspeed.runtime.config import DeepSpeedConfigError
from deepspeed.runtime.gradients.accumulation import BackwardState
from deepspeed.runtime.gradients.norm import local_squared_norm
from deepspeed.runtime.zero.stage_1_and_2 import ZeroMasters
from deepspeed.utils import safe_get_full_grad
from unit.common import DistributedTest
from unit.models import config_of, drawn, seeded
from unit.one_process import OneProcess, mean_square, placed
from unit.v1.groups.stages import (
    CLIP,
    CUTS,
    LR,
    ROWS,
    SYSTEMS,
    TOLERANCE,
    WIDTH,
    Reference,
    Stages,
    batch,
    engine_of,
    inputs_of_all,
    loss_of_all,
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


ACCUMULATION = 2
MORE: dict[str, dict[str, Any]] = {
    **SYSTEMS,
    "stage 1, overlap": {
        "zero_optimization": {"stage": 1, "overlap_comm": True, "reduce_bucket_size": 8}
    },
    "stage 1, fp32 accumulation in fp16": {
        "zero_optimization": {"stage": 1},
        "fp16": {"enabled": True, "loss_scale": 16.0},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
    "BF16_Optimizer, from hooks": {
        **SYSTEMS["BF16_Optimizer"],
        "bf16": {"enabled": True, "immediate_grad_update": True},
    },
}
WITHOUT_STAGE_2 = [name for name in MORE if not name.startswith("stage 2")]


class Stage(nn.Module):
    """The shared matrix first on stage 0 and last on stage 1, as an embedding's that is both."""

    def __init__(self, stage: int, uses_shared: bool = True) -> None:
        super().__init__()
        shared = nn.Parameter(drawn(70, WIDTH, WIDTH) / 2)
        own = seeded(nn.Linear, WIDTH, WIDTH, seed=71 + stage)
        self.stage, self.uses_shared = stage, uses_shared
        if stage == 0:
            self.shared, self.own = shared, own
        else:
            self.own, self.shared = own, shared
            self.shared.ds_pipe_replicated = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.uses_shared:
            return self.own(x)
        if self.stage == 0:
            return self.own(x @ self.shared)
        return self.own(x).tanh() @ self.shared.t()


def start_shared(mpu: Stages, system: str, stage: Stage) -> Any:
    config = {"gradient_accumulation_steps": ACCUMULATION, **MORE[system]}
    engine = engine_of(stage, stage.parameters(), mpu, **config)
    engine._sequence.hold([stage.shared])
    return engine


def train_shared(engine: Any, mpu: Stages, step: int) -> dict[str, torch.Tensor]:
    """As the pipeline engine does it; returns the gradients that the optimizer will see."""
    for micro in range(ACCUMULATION):
        sequence = engine._begin_managed_backward()
        x = placed(engine, batch(2 * step + micro, mpu.stage, mpu.data_rank))
        loss = mean_square(engine.module, x) / ACCUMULATION
        (loss * sequence.loss_scale).backward()
        sequence.backward_epilogue()
        if engine.is_gradient_accumulation_boundary():
            dist.all_reduce(sequence.local_gradient(engine.module.shared), group=mpu.pipe_group)
            engine.allreduce_gradients()
        sequence.exit_backward()
        engine.tracker.state = BackwardState.IDLE
        if not engine.is_gradient_accumulation_boundary():
            engine.step()
    # A copy: without masters this is `param.grad` itself, which the step clips.
    named = engine.module.named_parameters()
    grads = {name: safe_get_full_grad(param).clone() for name, param in named}
    engine.step()
    return grads


def check_shared(system: str, uses: tuple[bool, bool] = (True, True)) -> None:
    mpu = Stages(2)
    stage = Stage(mpu.stage, uses[mpu.stage])
    engine = start_shared(mpu, system, stage)
    stages = nn.ModuleList(
        Stage(number, used).to(engine.model_dtype).float() for number, used in enumerate(uses)
    )
    stages[1].shared = stages[0].shared
    one = OneProcess(stages, LR, loss_of_all, CLIP)
    own = stages[mpu.stage]
    tolerance = TOLERANCE.get(system, 1e-5 if "16" not in system and "BF" not in system else 0.03)
    for step in range(4):
        grads = train_shared(engine, mpu, step)
        steps = range(ACCUMULATION * step, ACCUMULATION * (step + 1))
        one.backward([inputs_of_all(steps, mpu.data_size)])
        for name, grad in grads.items():
            right = own.get_parameter(name).grad
            wanted = torch.zeros_like(grad) if right is None else right
            distance = (grad.float() - wanted).norm().item()
            assert distance <= tolerance * wanted.norm().item() + 1e-7, f"step {step}, {name}"
        one.update()
        found = float(engine.get_global_grad_norm())
        assert found == pytest.approx(one.norm.item(), rel=tolerance), f"step {step}"
    for name, param in engine.module.named_parameters():
        wanted = own.get_parameter(name).detach()
        distance = (master(param) - wanted).norm().item()
        assert distance <= 4 * tolerance * (LR + wanted.norm().item()), name
    copies = [torch.empty_like(stage.shared) for _ in range(2)]
    dist.all_gather(copies, stage.shared.detach(), group=mpu.pipe_group)
    assert torch.equal(*copies), "the copies of the shared weight drifted apart"
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
            for group in self.groups:
                squared = local_squared_norm(self._counted.of(group), self.device)
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

    @each(system=WITHOUT_STAGE_2)
    def test_a_shared_weight(self, system: str) -> None:
        # Kills: counting the copy in the norm; summing after the reduction (or not); a bucket with
        # the shared weight that leaves from its hook with this stage's part; the sum of a buffer
        # that the optimizer does not read.
        check_shared(system)

    @each(system=["stage 0", "stage 1", "stage 1, overlap", "BF16_Optimizer"], user=[0, 1])
    def test_a_stage_without_a_gradient_of_it_takes_part(self, system: str, user: int) -> None:
        # Kills: a missing gradient that is None and not zero, so that the other stage waits or its
        # part is lost here.
        check_shared(system, (user == 0, user == 1))


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

    @each(system=WITHOUT_STAGE_2)
    def test_a_shared_weight(self, system: str) -> None:
        # Kills: what two ranks kill, with reductions to be early.
        check_shared(system)

    def test_other_buckets_still_leave_early(self) -> None:
        # Kills: holding back everything that follows the shared weight in the order of buckets, and
        # sending the held bucket early.
        mpu = Stages(2)
        engine = start_shared(mpu, "stage 1, overlap", Stage(mpu.stage))
        sequence, shared = engine._sequence, engine.module.shared
        buckets = enumerate(sequence.ipg_buckets)
        held = [index for index, bucket in buckets if shared in set(bucket.params)]
        assert held == [len(sequence.plans) - 1] and len(sequence.plans) > 1
        for step in range(2):
            train_shared(engine, mpu, step)
        sequence.tracker.advance()  # to the boundary
        engine._begin_managed_backward()
        mean_square(engine.module, batch(0, mpu.stage, mpu.data_rank)).backward()
        assert list(sequence.reduction.hooks.readiness.remaining()) == held

    def test_hold_in_the_middle_of_a_window_is_refused(self) -> None:
        # Kills: plans that change while gradients that the old ones counted are about.
        mpu = Stages(2)
        engine = start_shared(mpu, "stage 1", Stage(mpu.stage))
        engine._begin_managed_backward()
        mean_square(engine.module, batch(0, mpu.stage, mpu.data_rank)).backward()
        refused = r"hold\(params\) in the middle of an accumulation window"
        with pytest.raises(RuntimeError, match=refused):
            engine._sequence.hold([engine.module.own.weight])

    def test_frozen_parameters_have_no_local_gradient(self) -> None:
        # Kills: a gradient that is made for a parameter nobody trains.
        mpu = Stages(2)
        for system in ("stage 0", "stage 1"):
            stage = Stage(mpu.stage)
            stage.own.bias.requires_grad_(False)
            engine = start_shared(mpu, system, stage)
            with pytest.raises(ValueError, match="frozen"):
                engine._sequence.local_gradient(stage.own.bias)


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

"""A weight that two stages share: its gradient is summed over them once, and counted once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.runtime.gradients.accumulation import BackwardState
from deepspeed.utils import safe_get_full_grad
from unit.common import DistributedTest
from unit.models import drawn, seeded
from unit.one_process import OneProcess, mean_square, placed
from unit.v1.groups.stages import (
    CLIP,
    LR,
    SYSTEMS,
    TOLERANCE,
    WIDTH,
    Stages,
    batch,
    engine_of,
    loss_of_all,
    master,
)
from unit.v1.looping import each

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


def start(mpu: Stages, system: str, stage: Stage) -> Any:
    config = {"gradient_accumulation_steps": ACCUMULATION, **MORE[system]}
    engine = engine_of(stage, stage.parameters(), mpu, **config)
    engine._sequence.hold([stage.shared])
    return engine


def train_step(engine: Any, mpu: Stages, step: int) -> dict[str, torch.Tensor]:
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


class Reference:
    """Both stages in one process, with one shared matrix."""

    def __init__(self, dtype: torch.dtype, uses: tuple[bool, bool]) -> None:
        self.stages = nn.ModuleList(Stage(n, used).to(dtype).float() for n, used in enumerate(uses))
        self.stages[1].shared = self.stages[0].shared
        self.one = OneProcess(self.stages, LR, loss_of_all, CLIP)

    def step(self, step: int, data_size: int) -> tuple[float, list[dict[str, torch.Tensor]]]:
        indices = [(2 * step + m, r) for m in range(ACCUMULATION) for r in range(data_size)]
        self.one.backward(
            [[torch.cat([batch(n, stage, r) for n, r in indices]) for stage in range(2)]]
        )
        grads = [
            {
                name: torch.zeros_like(param) if param.grad is None else param.grad.clone()
                for name, param in stage.named_parameters()
            }
            for stage in self.stages
        ]
        self.one.update()
        return self.one.norm.item(), grads


def check_training(system: str, uses: tuple[bool, bool] = (True, True)) -> None:
    mpu = Stages(2)
    stage = Stage(mpu.stage, uses[mpu.stage])
    engine = start(mpu, system, stage)
    reference = Reference(engine.model_dtype, uses)
    tolerance = TOLERANCE.get(system, 1e-5 if "16" not in system and "BF" not in system else 0.03)
    for step in range(4):
        grads = train_step(engine, mpu, step)
        norm, right = reference.step(step, mpu.data_size)
        for name, grad in grads.items():
            wanted = right[mpu.stage][name]
            distance = (grad.float() - wanted).norm().item()
            assert distance <= tolerance * wanted.norm().item() + 1e-7, f"step {step}, {name}"
        found = float(engine.get_global_grad_norm())
        assert found == pytest.approx(norm, rel=tolerance), f"step {step}"
    for name, param in engine.module.named_parameters():
        wanted = reference.stages[mpu.stage].get_parameter(name).detach()
        distance = (master(param) - wanted).norm().item()
        assert distance <= 4 * tolerance * (LR + wanted.norm().item()), name
    copies = [torch.empty_like(stage.shared) for _ in range(2)]
    dist.all_gather(copies, stage.shared.detach(), group=mpu.pipe_group)
    assert torch.equal(*copies), "the copies of the shared weight drifted apart"
    engine.destroy()


class TestTwoStages(DistributedTest):
    """A stage per rank."""

    world_size = 2

    @each(system=WITHOUT_STAGE_2)
    def test_equals_one_process(self, system: str) -> None:
        # Kills: counting the copy in the norm; summing after the reduction (or not); a bucket with
        # the shared weight that leaves from its hook with this stage's part; the sum of a buffer
        # that the optimizer does not read.
        check_training(system)

    @each(system=["stage 0", "stage 1", "stage 1, overlap", "BF16_Optimizer"], user=[0, 1])
    def test_a_stage_without_a_gradient_of_it_takes_part(self, system: str, user: int) -> None:
        # Kills: a missing gradient that is None and not zero, so that the other stage waits or its
        # part is lost here.
        check_training(system, (user == 0, user == 1))


class TestStagesOfTwo(DistributedTest):
    """Two stages by two data-parallel ranks."""

    world_size = 4

    @each(system=WITHOUT_STAGE_2)
    def test_equals_one_process(self, system: str) -> None:
        # Kills: as above, with reductions to be early.
        check_training(system)

    def test_other_buckets_still_leave_early(self) -> None:
        # Kills: holding back everything that follows the shared weight in the order of buckets, and
        # sending the held bucket early.
        mpu = Stages(2)
        engine = start(mpu, "stage 1, overlap", Stage(mpu.stage))
        sequence, shared = engine._sequence, engine.module.shared
        buckets = enumerate(sequence.ipg_buckets)
        held = [index for index, bucket in buckets if shared in set(bucket.params)]
        assert held == [len(sequence.plans) - 1] and len(sequence.plans) > 1
        for step in range(2):
            train_step(engine, mpu, step)
        sequence.tracker.advance()  # to the boundary
        engine._begin_managed_backward()
        mean_square(engine.module, batch(0, mpu.stage, mpu.data_rank)).backward()
        assert list(sequence.reduction.hooks.readiness.remaining()) == held

    def test_hold_in_the_middle_of_a_window_is_refused(self) -> None:
        # Kills: plans that change while gradients that the old ones counted are about.
        mpu = Stages(2)
        engine = start(mpu, "stage 1", Stage(mpu.stage))
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
            engine = start(mpu, system, stage)
            with pytest.raises(ValueError, match="frozen"):
                engine._sequence.local_gradient(stage.own.bias)

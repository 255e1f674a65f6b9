"""Stages with other numbers of parameter groups train, and the one norm costs one collective."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed import comm as dist
from deepspeed.comm.watch import intent
from deepspeed.comm.watch.observation import CollectiveCall, group_size
from deepspeed.runtime.optimizers.master_weights import MasterWeights
from deepspeed.runtime.optimizers.replicated_optimizer import ModelParameters
from deepspeed.runtime.pipe.messages.failure import PipelinePeerError
from deepspeed.runtime.zero.stage_1_and_2 import ZeroMasters
from unit.common import DistributedTest
from unit.v1.contract.runner import run_cases
from unit.v1.gathering import noted
from unit.v1.pipe.contract.cases import PipeCase
from unit.v1.pipe.contract.runner import PipeRun, leave_together

# Layers of the stages, and into how many parameter groups each stage splits what it has.
SPLITS: dict[tuple[int, ...], tuple[int, ...]] = {
    (0, 9, 10): (3, 1),
    (0, 1, 10): (1, 3),
    # Four groups: one of them is empty; the third stage has a frozen layer only.
    (0, 3, 4, 5, 10): (4, 1, 1, 2),
}
# In elements; the norm has one per parameter group, and no gradient that is reduced is so small.
SMALL = 4


def small_reductions(call: CollectiveCall) -> list[tuple[int, ...]]:
    """Shapes of all small reductions, and of all reductions over the whole world."""
    if call.name not in ("all_reduce", "reduce"):
        return []
    tensor = call.argument("tensor")
    counts = tensor.numel() <= SMALL or group_size(call.group) == dist.get_world_size()
    return [tuple(tensor.shape)] if counts else []


class GroupsRun(PipeRun):
    """Steps with the groups of `SPLITS`; every step's small reductions are counted."""

    steps = 3

    def parameter_groups(self) -> list[dict[str, Any]]:
        """See `SPLITS`."""
        counts = SPLITS[self.pipe_case.parts]
        stage = self.model.stage_id
        matrices = [param for param in self.params.values() if param.dim() >= 2]
        vectors = [param for param in self.params.values() if param.dim() < 2]
        frozen = [param for param in self.model.parameters() if not param.requires_grad]
        empty = {"params": [] if self.case.stage else frozen}
        decayed = {"params": matrices, "weight_decay": 0.1}
        rest = {"params": vectors, "weight_decay": 0.0}
        if counts[stage] == 1:
            return [decayed if matrices else empty]
        first, others = {**decayed, "params": matrices[:1]}, {**decayed, "params": matrices[1:]}
        last = {4: [{"params": []}, rest], 3: [rest]}
        return [decayed, rest] if counts[stage] == 2 else [first, others, *last[counts[stage]]]

    def train(self, step: int) -> torch.Tensor:
        """One step; norm and losses are all that ranks tell each other in few numbers."""
        with noted(small_reductions) as shapes:
            loss = super().train(step)
        count = max(SPLITS[self.pipe_case.parts])
        wanted = [(count,), (self.case.accumulation, self.pipe_case.replicas)]
        if shapes != wanted:
            self.fail(step, f"reductions of {shapes} elements, not of {wanted}")
        norms, norm = self.engine.get_group_grad_norms(), float(self.engine.get_global_grad_norm())
        squares = sum(norm * norm for norm in norms)
        if len(norms) != count or not abs(squares - norm * norm) <= 1e-5 * norm * norm:
            self.fail(step, f"norms {norms} of the groups do not make up the norm {norm}")
        return loss


def case(
    parts: tuple[int, ...], world: int, stage: int, precision: str, clip: bool, **more: Any
) -> PipeCase:
    """Two micro-batches on the stages of `SPLITS`."""
    keys = {"world": world, "pipe": len(parts) - 1, "parts": parts, **more}
    return PipeCase(stage, precision, 2, clip, **keys)


CASES = {
    2: [
        case((0, 9, 10), 2, 0, "fp32", False),
        case((0, 1, 10), 2, 1, "fp32", True),
        case((0, 9, 10), 2, 0, "bf16+fp32", True, schedule="zero_bubble"),
    ],
    4: [
        case((0, 3, 4, 5, 10), 4, 0, "fp32", False),
        case((0, 3, 4, 5, 10), 4, 0, "fp32", False, tied=True),
        case((0, 3, 4, 5, 10), 4, 1, "bf16", True, offload=True),
        case((0, 3, 4, 5, 10), 4, 0, "fp16", True, adaptive=True),
        case((0, 3, 4, 5, 10), 4, 0, "bf16+fp32", False, schedule="zero_bubble"),
        case((0, 9, 10), 4, 0, "fp16", False),
        case((0, 1, 10), 4, 1, "fp32", True, overlap=True),
        case((0, 9, 10), 4, 1, "bf16+fp32", True, tied=True),
    ],
}


class TestTwoStages(DistributedTest):
    world_size = 2
    exec_timeout = 60

    def test_trains(self) -> None:
        # Kills: a collective per group; a norm that counts a stage's first group only, or differs
        # between stages.
        run_cases(CASES[2], GroupsRun)

    @pytest.mark.parametrize("stage", (0, 1))
    def test_a_collective_per_group_is_found(
        self, stage: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Kills: an intent check that is silent about what would hang, or make norms of losses.
        monkeypatch.setattr(ModelParameters, "scaled_global_norm", reduce_per_group)
        monkeypatch.setattr(ZeroMasters, "scaled_global_norm", reduce_per_group)
        run = GroupsRun(case((0, 9, 10), 2, stage, "fp32", False))
        intent.enable(timeout_s=5.0)
        refused = (intent.CollectiveMismatchError, PipelinePeerError)
        with pytest.raises(refused, match=r"(?s)all_reduce.*reduce_per_group"):
            run.train(0)
        intent.disable()
        leave_together()


class TestFourRanks(DistributedTest):
    world_size = 4
    exec_timeout = 90

    def test_trains(self) -> None:
        # Kills: a stage without trainable parameters, or with an empty group, that leaves the
        # others waiting.
        run_cases(CASES[4], GroupsRun)


def reduce_per_group(self: Any) -> torch.Tensor:
    """Fix 3 undone: as many collectives as this rank has groups."""
    total = torch.zeros(1)
    for index in range(len(self.optimizer.param_groups)):
        is_flat = isinstance(self, MasterWeights)
        parts = self._counted.of(self.groups[index]) if is_flat else self._counted[index]
        squared = sum((part.float().square().sum() for part in parts), torch.zeros(1))
        dist.all_reduce(squared, group=self.norm_group)
        total += squared
    return self._norm_of(total)

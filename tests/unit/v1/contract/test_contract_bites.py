"""The contract suite finds what it is there for: the library is broken on purpose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from deepspeed.comm.shard_ops import PendingShards
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.bf16_optimizer import Accumulated
from deepspeed.runtime.gradients import sink
from deepspeed.runtime.gradients.local_accumulator import LocalAccumulator
from deepspeed.runtime.gradients.readiness import ReadinessTracker
from deepspeed.runtime.gradients.reduce_rule import ReduceFactors, ReduceRule
from deepspeed.runtime.gradients.replicated import FlatGradients
from deepspeed.runtime.optimizers import master_weights, step_sequence
from deepspeed.runtime.sharding.publisher import Publisher
from deepspeed.runtime.zero import stage_1_and_2, zero_optimizer
from deepspeed.runtime.zero.stage_1_and_2 import Bucketed
from unit.common import DistributedTest
from unit.v1.contract.matrix import Case
from unit.v1.contract.runner import CaseRun, run_cases

STAGE_0 = Case(0, "fp32", 3, True, False, True, False, "huge", 2)
STAGE_0_ONCE = Case(0, "fp32", 1, False, False, True, False, "huge", 2)
STAGE_1 = Case(1, "bf16", 3, True, False, True, False, "tiny", 2)
STAGE_1_FP32 = Case(1, "fp32", 3, False, False, False, False, "exact", 2)
STAGE_2 = Case(2, "fp16", 3, True, True, True, False, "tiny", 2)
OFFLOAD = Case(2, "fp32", 3, True, True, True, True, "exact", 2)
ACCUMULATOR = Case(1, "bf16+fp32", 3, True, False, True, False, "huge", 2)
LOCAL_ACCUMULATOR = Case(1, "fp16+fp32", 3, False, False, True, False, "tiny", 2)
INSTANCES = Case(2, "fp32", 3, True, True, True, False, "tiny", 2, instances=2)
INSTANCES_ACCUMULATOR = Case(1, "bf16+fp32", 3, True, False, True, False, "huge", 2, instances=2)

# What the norm is summed as: an element per parameter group of the contract model.
NORM_GROUPS = 2


def divide_twice(patch: pytest.MonkeyPatch) -> None:
    """1/N applied before and after the collective."""
    original = ReduceRule.factors

    def factors(self: ReduceRule, *args: Any, **kwargs: Any) -> ReduceFactors:
        pre, post = original(self, *args, **kwargs)
        return ReduceFactors(pre / self.world, post)

    patch.setattr(ReduceRule, "factors", factors)


def keep_stale_buffers(patch: pytest.MonkeyPatch) -> None:
    """An unused parameter contributes what its place in the buffer held before."""

    def collect(self: FlatGradients) -> None:
        for view, param in zip(self.views, self.params, strict=True):
            if param.grad is not None and param.grad is not view:
                view.copy_(param.grad)
            param.grad = view

    patch.setattr(FlatGradients, "collect", torch.no_grad()(collect))


def leave_absent_as_it_was(patch: pytest.MonkeyPatch) -> None:
    """The same for buckets."""

    def fill(views: list[torch.Tensor], grads: list[torch.Tensor | None]) -> None:
        for view, grad in zip(views, grads, strict=True):
            view.copy_(grad if grad is not None else torch.full_like(view, 0.25))

    patch.setattr(Bucketed, "_fill", staticmethod(fill))


def keep_the_last_micro_batch(patch: pytest.MonkeyPatch) -> None:
    """Every write into the shard replaces."""
    original = sink.DeviceSink._accumulate

    def accumulate(
        self: Any, target: torch.Tensor, parts: list[torch.Tensor], factor: float, first: bool
    ) -> None:
        original(self, target, parts, factor, True)

    patch.setattr(sink.DeviceSink, "_accumulate", accumulate)


def add_to_the_last_step(patch: pytest.MonkeyPatch) -> None:
    """No write into the shard replaces."""

    def accumulate(
        self: Any, target: torch.Tensor, parts: list[torch.Tensor], factor: float, first: bool
    ) -> None:
        for part in parts:
            target.add_(part, alpha=factor)

    patch.setattr(sink.DeviceSink, "_accumulate", accumulate)


def lose_own_part(patch: pytest.MonkeyPatch) -> None:
    """The owner forgets its own contribution."""
    original = sink.DeviceSink.add

    def add(
        self: Any, bucket: int, group: Any, segments: Any, pieces: list[torch.Tensor], factor: float
    ) -> None:
        original(self, bucket, group, segments, pieces[1:] or pieces, factor)

    patch.setattr(sink.DeviceSink, "add", add)


def reduce_before_the_last_micro_batch(patch: pytest.MonkeyPatch) -> None:
    """Fix 4 undone: the boundary micro-batch joins after the reduction."""
    original = Accumulated.reduce_gradients
    patch.setattr(Accumulated, "backward_epilogue", lambda self: None)

    def reduce_gradients(self: Accumulated) -> None:
        original(self)
        self.update_hp_grads()

    patch.setattr(Accumulated, "reduce_gradients", reduce_gradients)


def skip_a_small_gradient(patch: pytest.MonkeyPatch) -> None:
    """One bias of nine elements never joins the accumulator."""
    original = LocalAccumulator.absorb

    def absorb(self: LocalAccumulator, scale: float = 1.0) -> None:
        for group in self._groups:
            for param in group.params:
                if param.shape == (9,):
                    param.grad = None
        original(self, scale)

    patch.setattr(LocalAccumulator, "absorb", absorb)


def norm_of_this_rank_only(patch: pytest.MonkeyPatch) -> None:
    """The norm of the owned shards, not of the model."""
    patch.setattr(master_weights, "reduce_squared_norm", lambda squared, group: squared)
    patch.setattr(stage_1_and_2.dist, "all_reduce", _unless_norm(stage_1_and_2.dist.all_reduce))


def _unless_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return None if tensor.shape == (NORM_GROUPS,) else original(tensor, *args, **kwargs)

    return all_reduce


def count_padding_in_the_norm(patch: pytest.MonkeyPatch) -> None:
    """Something in the padding."""
    original = Bucketed.finish_gradients

    def finish(self: Bucketed) -> None:
        original(self)
        for group in self.groups:
            padding = torch.ones_like(group.grad, dtype=torch.bool)
            for fragment in group.table.of_shard(group.shard_rank):
                padding[fragment.in_shard] = False
            group.grad[padding] = 1.0

    patch.setattr(Bucketed, "finish_gradients", finish)


def gather_nothing(patch: pytest.MonkeyPatch) -> None:
    """Ranks keep their own view of the others' shards."""
    patch.setattr(Publisher, "_gather", lambda self, gather: None)


def send_what_is_ready_only(patch: pytest.MonkeyPatch) -> None:
    """Buckets that miss a gradient at the end of backward are forgotten."""
    patch.setattr(ReadinessTracker, "remaining", lambda self: range(0))


def clip_by_the_scaled_norm(patch: pytest.MonkeyPatch) -> None:
    """The loss scale, or something like it, in the clipping factor."""
    original = step_sequence.clip_factor
    patch.setattr(step_sequence, "clip_factor", lambda norm, limit: original(norm * 1.01, limit))


def stay_inside_the_instance(patch: pytest.MonkeyPatch) -> None:
    """Buckets never go to the other instances."""
    patch.setattr(Bucketed, "_reduce_between_instances", lambda self, limit: None)


def cross_from_one_instance_twice(patch: pytest.MonkeyPatch) -> None:
    """The sum across is added to what it is the sum of."""
    original = PendingShards.sum_over

    def sum_over(self: PendingShards, group: Any) -> None:
        own = self.wait()[0].clone()
        original(self, group)
        self.wait()[0].add_(own)

    patch.setattr(PendingShards, "sum_over", sum_over)


def count_every_instance_in_the_norm(patch: pytest.MonkeyPatch) -> None:
    """Each copy of a shard counts."""
    patch.setattr(zero_optimizer, "_counts_elsewhere", lambda param: True)


def average_the_accumulator_inside(patch: pytest.MonkeyPatch) -> None:
    """BF16_Optimizer all-reduces over its instance (here: one rank) instead of all ranks."""
    patch.setattr(
        bf16_optimizer, "all_reduce_flat", lambda flats, numel, factors, group, dtype: None
    )


MUTATIONS = [
    (stay_inside_the_instance, [INSTANCES]),
    (cross_from_one_instance_twice, [INSTANCES]),
    (count_every_instance_in_the_norm, [INSTANCES]),
    (count_every_instance_in_the_norm, [INSTANCES_ACCUMULATOR]),
    (average_the_accumulator_inside, [INSTANCES_ACCUMULATOR]),
    (divide_twice, [STAGE_0]),
    (divide_twice, [STAGE_1]),
    (keep_stale_buffers, [STAGE_0_ONCE]),
    (leave_absent_as_it_was, [STAGE_2]),
    (keep_the_last_micro_batch, [STAGE_2]),
    (keep_the_last_micro_batch, [OFFLOAD]),
    (add_to_the_last_step, [STAGE_1_FP32]),
    (lose_own_part, [STAGE_1]),
    (reduce_before_the_last_micro_batch, [ACCUMULATOR]),
    (skip_a_small_gradient, [ACCUMULATOR]),
    (skip_a_small_gradient, [LOCAL_ACCUMULATOR]),
    (norm_of_this_rank_only, [STAGE_1_FP32]),
    (norm_of_this_rank_only, [ACCUMULATOR]),
    (count_padding_in_the_norm, [STAGE_1_FP32]),
    (gather_nothing, [STAGE_1]),
    (send_what_is_ready_only, [STAGE_1_FP32]),
    (clip_by_the_scaled_norm, [STAGE_0]),
    (clip_by_the_scaled_norm, [OFFLOAD]),
]


Mutation = Callable[[pytest.MonkeyPatch], None]


def assert_unbroken(
    mutations: Sequence[tuple[Mutation, Sequence[Case]]], run: Any = CaseRun
) -> None:
    """Cases of mutations pass as they are."""
    run_cases(sorted({case for _, cases in mutations for case in cases}, key=lambda c: c.name), run)


def assert_all_found(
    mutations: Sequence[tuple[Mutation, Sequence[Case]]], run: Any = CaseRun
) -> None:
    """Each mutation makes its cases deviate, and does nothing else."""
    survivors = []
    for mutate, cases in mutations:
        with pytest.MonkeyPatch.context() as patch:
            mutate(patch)
            try:
                run_cases(cases, run)
            except AssertionError as error:
                if "configurations deviate" not in str(error):
                    raise
                continue
        survivors.append(f"{mutate.__name__} on {cases[0].name}")
    if survivors:
        raise AssertionError(f"not found: {survivors}")


class TestContractBites(DistributedTest):
    """Mutations, all in one launched world."""

    world_size = 2
    exec_timeout = 180

    def test_unbroken_cases_pass(self) -> None:
        # Kills: cases below that fail for another reason than their mutation.
        assert_unbroken(MUTATIONS)

    def test_every_mutation_is_found(self) -> None:
        # Kills: a comparison that lets a wrong gradient, norm or parameter through.
        assert_all_found(MUTATIONS)

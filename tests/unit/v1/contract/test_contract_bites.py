"""The contract suite finds what it is there for: the library is broken on purpose."""

from __future__ import annotations

import functools
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


Mutation = Callable[[pytest.MonkeyPatch], None]


def instead_of(owner: Any, name: str) -> Callable[[Callable[..., Any]], Mutation]:
    """A mutation: the decorated stands for a function of `owner`, which it gets first."""

    def decorate(broken: Callable[..., Any]) -> Mutation:
        def mutate(patch: pytest.MonkeyPatch) -> None:
            original = getattr(owner, name)
            patch.setattr(owner, name, lambda *args, **kwargs: broken(original, *args, **kwargs))

        return functools.update_wrapper(mutate, broken)

    return decorate


@instead_of(ReduceRule, "factors")
def divide_twice(original: Any, self: ReduceRule, *args: Any, **kwargs: Any) -> ReduceFactors:
    """1/N applied before and after the collective."""
    pre, post = original(self, *args, **kwargs)
    return ReduceFactors(pre / self.world, post)


@instead_of(FlatGradients, "collect")
@torch.no_grad()
def keep_stale_buffers(original: Any, self: FlatGradients) -> None:
    """An unused parameter contributes what its place in the buffer held before."""
    for view, param in zip(self.views, self.params, strict=True):
        if param.grad is not None and param.grad is not view:
            view.copy_(param.grad)
        param.grad = view


@instead_of(Bucketed, "_fill")
def leave_absent_as_it_was(original: Any, self: Bucketed, views: Any, grads: Any) -> None:
    """The same for buckets."""
    for view, grad in zip(views, grads, strict=True):
        view.copy_(grad if grad is not None else torch.full_like(view, 0.25))


@instead_of(sink.Sums, "add")
def keep_the_last_micro_batch(original: Any, self: Any, *args: Any) -> None:
    """Every write into the shard replaces."""
    *given, _ = args
    original(self, *given, True)


@instead_of(sink.Sums, "add")
def add_to_the_last_step(
    original: Any, self: Any, target: torch.Tensor, parts: Any, factor: float, first: bool
) -> None:
    """No write into the shard replaces."""
    for part in parts:
        target.add_(part, alpha=factor)


@instead_of(sink.DeviceSink, "add")
def lose_own_part(
    original: Any, self: Any, bucket: int, group: Any, segments: Any, pieces: Any, *how: Any
) -> None:
    """The owner forgets its own contribution."""
    original(self, bucket, group, segments, pieces[1:] or pieces, *how)


def reduce_before_the_last_micro_batch(patch: pytest.MonkeyPatch) -> None:
    """Fix 4 undone: the boundary micro-batch joins after the reduction."""
    original = Accumulated.reduce_gradients
    patch.setattr(Accumulated, "backward_epilogue", lambda self: None)

    def reduce_gradients(self: Accumulated) -> None:
        original(self)
        self.update_hp_grads()

    patch.setattr(Accumulated, "reduce_gradients", reduce_gradients)


@instead_of(LocalAccumulator, "absorb")
def skip_a_small_gradient(original: Any, self: LocalAccumulator, scale: float = 1.0) -> None:
    """One bias of nine elements never joins the accumulator."""
    for group in self._groups:
        for param in group.params:
            if param.shape == (9,):
                param.grad = None
    original(self, scale)


def norm_of_this_rank_only(patch: pytest.MonkeyPatch) -> None:
    """The norm of the owned shards, not of the model."""
    patch.setattr(master_weights, "reduce_squared_norm", lambda squared, group: squared)

    @instead_of(stage_1_and_2.dist, "all_reduce")
    def unless_norm(original: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return None if tensor.shape == (NORM_GROUPS,) else original(tensor, *args, **kwargs)

    unless_norm(patch)


@instead_of(Bucketed, "finish_gradients")
def count_padding_in_the_norm(original: Any, self: Bucketed) -> None:
    """Something in the padding."""
    original(self)
    for group in self.groups:
        padding = torch.ones_like(group.grad, dtype=torch.bool)
        for fragment in group.table.of_shard(group.shard_rank):
            padding[fragment.in_shard] = False
        group.grad[padding] = 1.0


@instead_of(Publisher, "_gather")
def gather_nothing(original: Any, self: Publisher, gather: Any) -> None:
    """Ranks keep their own view of the others' shards."""


@instead_of(ReadinessTracker, "remaining")
def send_what_is_ready_only(original: Any, self: ReadinessTracker) -> range:
    """Buckets that miss a gradient at the end of backward are forgotten."""
    return range(0)


@instead_of(step_sequence, "clip_factor")
def clip_by_the_scaled_norm(original: Any, norm: Any, limit: Any) -> Any:
    """The loss scale, or something like it, in the clipping factor."""
    return original(norm * 1.01, limit)


@instead_of(Bucketed, "_reduce_between_instances")
def stay_inside_the_instance(original: Any, self: Bucketed, limit: Any) -> None:
    """Buckets never go to the other instances."""


@instead_of(PendingShards, "sum_over")
def cross_from_one_instance_twice(original: Any, self: PendingShards, group: Any) -> None:
    """The sum across is added to what it is the sum of."""
    own = self.wait()[0].clone()
    original(self, group)
    self.wait()[0].add_(own)


@instead_of(zero_optimizer, "_counts_elsewhere")
def count_every_instance_in_the_norm(original: Any, param: Any) -> bool:
    """Each copy of a shard counts."""
    return True


@instead_of(bf16_optimizer, "all_reduce_flat")
def average_the_accumulator_inside(original: Any, *args: Any) -> None:
    """BF16_Optimizer all-reduces over its instance (here: one rank) instead of all ranks."""


MUTATIONS = [
    (stay_inside_the_instance, [INSTANCES]),
    (cross_from_one_instance_twice, [INSTANCES]),
    (count_every_instance_in_the_norm, [INSTANCES, INSTANCES_ACCUMULATOR]),
    (average_the_accumulator_inside, [INSTANCES_ACCUMULATOR]),
    (divide_twice, [STAGE_0, STAGE_1]),
    (keep_stale_buffers, [STAGE_0_ONCE]),
    (leave_absent_as_it_was, [STAGE_2]),
    (keep_the_last_micro_batch, [STAGE_2, OFFLOAD]),
    (add_to_the_last_step, [STAGE_1_FP32]),
    (lose_own_part, [STAGE_1]),
    (reduce_before_the_last_micro_batch, [ACCUMULATOR]),
    (skip_a_small_gradient, [ACCUMULATOR, LOCAL_ACCUMULATOR]),
    (norm_of_this_rank_only, [STAGE_1_FP32, ACCUMULATOR]),
    (count_padding_in_the_norm, [STAGE_1_FP32]),
    (gather_nothing, [STAGE_1]),
    (send_what_is_ready_only, [STAGE_1_FP32]),
    (clip_by_the_scaled_norm, [STAGE_0, OFFLOAD]),
]
Mutations = Sequence[tuple[Mutation, Sequence[Case]]]


def assert_unbroken(mutations: Mutations, run: Any = CaseRun) -> None:
    """Cases of mutations pass as they are."""
    run_cases(sorted({case for _, cases in mutations for case in cases}, key=lambda c: c.name), run)


def assert_all_found(mutations: Mutations, run: Any = CaseRun) -> None:
    """Each mutation makes each of its cases deviate, and does nothing else."""
    survivors = []
    for mutate, case in ((mutate, case) for mutate, cases in mutations for case in cases):
        with pytest.MonkeyPatch.context() as patch:
            mutate(patch)
            try:
                run_cases([case], run)
            except AssertionError as error:
                # The step itself refuses gradients that nobody has sent.
                told = str(error)
                if "configurations deviate" not in told and "the step would not use" not in told:
                    raise
                continue
        survivors.append(f"{mutate.__name__} on {case.name}")
    assert not survivors, f"not found: {survivors}"


class TestContractBites(DistributedTest):
    """Mutations, all in one launched world."""

    world_size = 2
    exec_timeout = 180

    def test_every_mutation_is_found(self) -> None:
        # Kills: a comparison that lets a wrong gradient, norm or parameter through; cases that fail
        # for another reason than their mutation.
        assert_unbroken(MUTATIONS)
        assert_all_found(MUTATIONS)

"""The pipeline's contract finds what it is there for: the engine is broken on purpose."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from deepspeed.runtime.constants import PIPE_REPLICATED
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.buffers import BatchOutputs, MicroBatches, PipeBuffer
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.messages.channel import Channel
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.sharding.model_ranks import ModelRanks
from unit.common import DistributedTest
from unit.v1.contract.runner import run_cases
from unit.v1.contract.test_contract_bites import (
    Mutation,
    assert_all_found,
    assert_unbroken,
    instead_of,
    reduce_before_the_last_micro_batch,
)
from unit.v1.pipe.contract.cases import PipeCase
from unit.v1.pipe.contract.runner import PipeRun, leave_together


def case(stage: int, precision: str, clip: bool, schedule: str = "1f1b", **more: Any) -> PipeCase:
    """Two stages by two data-parallel ranks."""
    values = {"accumulation": 4, "clip": clip, "world": 4, "pipe": 2, **more}
    return PipeCase(stage, precision, schedule=schedule, **values)


PLAIN = case(0, "fp32", False)
TIED = case(0, "fp32", False, tied=True)
TIED_SHARDED = case(1, "fp32", True, tied=True, dynamic=True)
HALF = case(1, "bf16", True)
ACCUMULATOR = case(0, "bf16+fp32", True)
ZERO_BUBBLE = case(0, "fp32", False, "zero_bubble")
INTERLEAVED = case(0, "fp32", False, "interleaved", accumulation=7)


def instead(kind: type[schedule.PipeInstruction]) -> Callable[[Callable[..., Any]], Mutation]:
    """A mutation of an instruction: the decorated function gets what is executed now, the engine
    and the instruction's arguments.
    """

    def decorate(execute: Any) -> Mutation:
        @functools.wraps(execute)
        def mutate(patch: pytest.MonkeyPatch) -> None:
            run = PipelineEngine._INSTRUCTION_MAP[kind]

            def changed(self: PipelineEngine, **how: Any) -> None:
                execute(run, self, **how)

            patch.setitem(PipelineEngine._INSTRUCTION_MAP, kind, changed)

        return mutate

    return decorate


@instead_of(PipelineEngine, "_backward_roots")
def sum_over_micro_batches(original: Any, self: PipelineEngine, *where: Any) -> list[Any]:
    """The loss is divided by nothing."""
    grads, chunk = original(self, *where), where[-1]
    return [grad * self.micro_batches for grad in grads] if self._is_last_part(chunk) else grads


@instead_of(PipeBuffer, "input_grads")
def divide_on_every_stage(original: Any, self: PipeBuffer) -> tuple[torch.Tensor, ...]:
    """Each stage divides what it hands back by the micro-batches."""
    return tuple(grad / 4 for grad in original(self))


@instead(schedule.ReduceTiedGrads)
def leave_ties_apart(original: Any, self: PipelineEngine) -> None:
    """The gradient of a shared weight stays what each stage has of it."""


@instead(schedule.ReduceTiedGrads)
def reduce_ties_twice(original: Any, self: PipelineEngine) -> None:
    original(self)
    original(self)


def reduce_ties_late(patch: pytest.MonkeyPatch) -> None:
    """After the reduction over data-parallel ranks has taken what it needs."""
    instructions = PipelineEngine._INSTRUCTION_MAP
    tie, reduce = instructions[schedule.ReduceTiedGrads], instructions[schedule.ReduceGrads]
    patch.setitem(instructions, schedule.ReduceTiedGrads, lambda self: None)
    patch.setitem(instructions, schedule.ReduceGrads, lambda self: (reduce(self), tie(self)))


@instead_of(PipelineModule, "_make_equal")
def count_every_copy(original: Any, self: Any, key: str, comm: Any, owner: int) -> None:
    """Each stage's copy of a shared weight counts in the norm."""
    original(self, key, comm, owner)
    for param in comm["module"].parameters():
        if hasattr(param, PIPE_REPLICATED):
            delattr(param, PIPE_REPLICATED)


def norm_over_data_ranks(patch: pytest.MonkeyPatch) -> None:
    """Each stage has a norm of its own."""
    patch.setattr(ModelRanks, "norm_group", property(lambda self: self.replicas))


@instead_of(ModelRanks, "of")
def average_over_the_world(original: Any, *of: Any) -> ModelRanks:
    """Gradients are divided by all ranks, stages included."""
    return dataclasses.replace(original(*of), num_replicas=4)


@instead_of(PipelineEngine, "_backward_roots")
def skip_the_last_micro_batch(
    original: Any, self: PipelineEngine, buffer: PipeBuffer, micro_batch: int, chunk: int
) -> list[torch.Tensor | None]:
    """The loss of the last one is left out of backward."""
    grads = original(self, buffer, micro_batch, chunk)
    is_last = micro_batch == self.micro_batches - 1 and self._is_last_part(chunk)
    return [torch.zeros_like(grad) for grad in grads if grad is not None] if is_last else grads


@instead(schedule.BackwardWeightPass)
def skip_the_last_weights(original: Any, self: PipelineEngine, **kwargs: Any) -> None:
    """Zero bubble: the last weight pass is forgotten."""
    if kwargs["micro_batch"] == self.micro_batches - 1:
        self.pipe_buffers[kwargs["buffer_id"]].split = None
    original(self, **kwargs)


@instead_of(Channel, "recv")
def receive_in_half(original: Any, self: Channel) -> Any:
    """A buffer of bf16 for activations of fp32 (upstream's other way round)."""

    def rounded(tensor: torch.Tensor) -> torch.Tensor:
        half = tensor.detach()
        half = half.bfloat16().to(tensor.dtype) if tensor.is_floating_point() else half
        return half.requires_grad_(tensor.requires_grad)

    return torch.utils._pytree.tree_map_only(torch.Tensor, rounded, original(self))


@instead_of(BatchOutputs, "mean_loss")
def sum_of_data_ranks_losses(original: Any, self: BatchOutputs, count: int) -> Any:
    """The mean loss is over micro-batches only."""
    return original(self, count) * 2


@instead_of(MicroBatches, "next")
def labels_of_the_one_before(original: Any, self: MicroBatches) -> tuple[Any, Any]:
    """First and last stage read in another order."""
    inputs, labels = original(self)
    return inputs, labels.roll(1)


MUTATIONS: list[tuple[Mutation, Sequence[PipeCase]]] = [
    (sum_over_micro_batches, [PLAIN]),
    (sum_over_micro_batches, [INTERLEAVED]),
    (divide_on_every_stage, [HALF]),
    (leave_ties_apart, [TIED]),
    (leave_ties_apart, [TIED_SHARDED]),
    (reduce_ties_twice, [TIED]),
    (reduce_ties_late, [TIED_SHARDED]),
    (count_every_copy, [TIED]),
    (count_every_copy, [TIED_SHARDED]),
    (norm_over_data_ranks, [HALF]),
    (norm_over_data_ranks, [ACCUMULATOR]),
    (average_over_the_world, [PLAIN]),
    (skip_the_last_micro_batch, [PLAIN]),
    (skip_the_last_micro_batch, [INTERLEAVED]),
    (skip_the_last_weights, [ZERO_BUBBLE]),
    (reduce_before_the_last_micro_batch, [ACCUMULATOR]),
    (receive_in_half, [PLAIN]),
    (sum_of_data_ranks_losses, [PLAIN]),
    (labels_of_the_one_before, [PLAIN]),
]


@instead(schedule.SendActivation)
def let_go_when_sent(original: Any, self: PipelineEngine, **kwargs: Any) -> None:
    """A buffer is released as soon as its activations have been sent."""
    original(self, **kwargs)
    self.pipe_buffers[kwargs["buffer_id"]].release()


@instead_of(PipelineEngine, "_reserve_pipe_buffers")
def one_buffer_for_all(original: Any, self: PipelineEngine, num_buffers: int) -> None:
    """The next micro-batch takes the buffer of one whose backward is to come."""
    self.pipe_buffers = [PipeBuffer()] * num_buffers


class TestContractBites(DistributedTest):
    """Mutations, all in one launched world."""

    world_size = 4
    exec_timeout = 120

    def test_unbroken_cases_pass(self) -> None:
        # Kills: cases below that fail for another reason than their mutation.
        assert_unbroken(MUTATIONS, PipeRun)

    def test_every_mutation_is_found(self) -> None:
        # Kills: a comparison that lets a wrong loss, gradient, norm or parameter through.
        assert_all_found(MUTATIONS, PipeRun)

    @pytest.mark.parametrize("mutate", (let_go_when_sent, one_buffer_for_all))
    def test_a_buffer_that_is_let_go_early_is_noticed(
        self, mutate: Mutation, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Kills: a buffer that is used again without a word, and with it a micro-batch's gradient.
        mutate(monkeypatch)
        with pytest.raises(AssertionError, match=r"PipeBufferError|PipelineShapeError"):
            run_cases([PLAIN], PipeRun)
        leave_together()

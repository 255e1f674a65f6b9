"""The pipeline's contract finds what it is there for: the engine is broken on purpose."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from deepspeed.comm.parallel_map import ParallelMap
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
    reduce_before_the_last_micro_batch,
)
from unit.v1.pipe.contract.cases import PipeCase
from unit.v1.pipe.contract.runner import PipeRun, leave_together


def case(stage: int, precision: str, clip: bool, schedule: str = "1f1b", **more: Any) -> PipeCase:
    """Two stages by two data-parallel ranks."""
    values = {
        "overlap": False,
        "reduce_scatter": True,
        "offload": False,
        "bucket": "huge",
        "accumulation": 4,
        **more,
    }
    return PipeCase(stage, precision, clip=clip, world=4, pipe=2, schedule=schedule, **values)


PLAIN = case(0, "fp32", False)
TIED = case(0, "fp32", False, tied=True)
TIED_SHARDED = case(1, "fp32", True, tied=True, dynamic=True)
HALF = case(1, "bf16", True)
ACCUMULATOR = case(0, "bf16+fp32", True)
ZERO_BUBBLE = case(0, "fp32", False, "zero_bubble")
INTERLEAVED = case(0, "fp32", False, "interleaved", accumulation=7)


def instead(
    patch: pytest.MonkeyPatch, kind: type[schedule.PipeInstruction], execute: Callable[..., None]
) -> None:
    """Execute an instruction otherwise; `execute` gets what is executed now."""
    original = PipelineEngine._INSTRUCTION_MAP[kind]

    def replaced(self: PipelineEngine, **kwargs: Any) -> None:
        execute(original, self, **kwargs)

    patch.setitem(PipelineEngine._INSTRUCTION_MAP, kind, replaced)


def sum_over_micro_batches(patch: pytest.MonkeyPatch) -> None:
    """The loss is divided by nothing."""
    original = PipelineEngine._backward_roots

    def roots(
        self: PipelineEngine, buffer: PipeBuffer, micro_batch: int, chunk: int
    ) -> list[torch.Tensor | None]:
        grads = original(self, buffer, micro_batch, chunk)
        return [grad * self.micro_batches for grad in grads] if self._is_last_part(chunk) else grads  # type: ignore[operator]

    patch.setattr(PipelineEngine, "_backward_roots", roots)


def divide_on_every_stage(patch: pytest.MonkeyPatch) -> None:
    """Each stage divides what it hands back by the micro-batches."""
    original = PipeBuffer.input_grads
    patch.setattr(
        PipeBuffer, "input_grads", lambda self: tuple(grad / 4 for grad in original(self))
    )


def leave_ties_apart(patch: pytest.MonkeyPatch) -> None:
    """The gradient of a shared weight stays what each stage has of it."""
    instead(patch, schedule.ReduceTiedGrads, lambda original, self: None)


def reduce_ties_twice(patch: pytest.MonkeyPatch) -> None:
    """And again."""

    def twice(original: Callable[..., None], self: PipelineEngine) -> None:
        original(self)
        original(self)

    instead(patch, schedule.ReduceTiedGrads, twice)


def reduce_ties_late(patch: pytest.MonkeyPatch) -> None:
    """After the reduction over data-parallel ranks has taken what it needs."""
    instead(patch, schedule.ReduceTiedGrads, lambda original, self: None)
    tied = PipelineEngine._exec_reduce_tied_grads

    def reduce_then_tie(original: Callable[..., None], self: PipelineEngine) -> None:
        original(self)
        tied(self)

    instead(patch, schedule.ReduceGrads, reduce_then_tie)


def count_every_copy(patch: pytest.MonkeyPatch) -> None:
    """Each stage's copy of a shared weight counts in the norm."""
    original = PipelineModule._make_equal

    def make_equal(self: PipelineModule, key: str, comm: dict[str, Any], owner: int) -> None:
        original(self, key, comm, owner)
        for param in comm["module"].parameters():
            if hasattr(param, PIPE_REPLICATED):
                delattr(param, PIPE_REPLICATED)

    patch.setattr(PipelineModule, "_make_equal", make_equal)


def norm_over_data_ranks(patch: pytest.MonkeyPatch) -> None:
    """Each stage has a norm of its own."""
    patch.setattr(ModelRanks, "norm_group", property(lambda self: self.replicas))


def average_over_the_world(patch: pytest.MonkeyPatch) -> None:
    """Gradients are divided by all ranks, stages included."""
    original = ModelRanks.of.__func__  # type: ignore[attr-defined]  # a class method's function

    def of(cls: type[ModelRanks], model: torch.nn.Module, parallel_map: ParallelMap) -> ModelRanks:
        ranks: ModelRanks = original(cls, model, parallel_map)
        return dataclasses.replace(ranks, num_replicas=4)

    patch.setattr(ModelRanks, "of", classmethod(of))


def skip_the_last_micro_batch(patch: pytest.MonkeyPatch) -> None:
    """The loss of the last one is left out of backward."""
    original = PipelineEngine._backward_roots

    def roots(
        self: PipelineEngine, buffer: PipeBuffer, micro_batch: int, chunk: int
    ) -> list[torch.Tensor | None]:
        grads = original(self, buffer, micro_batch, chunk)
        is_last = micro_batch == self.micro_batches - 1 and self._is_last_part(chunk)
        return [torch.zeros_like(grad) for grad in grads if grad is not None] if is_last else grads

    patch.setattr(PipelineEngine, "_backward_roots", roots)


def skip_the_last_weights(patch: pytest.MonkeyPatch) -> None:
    """Zero bubble: the last weight pass is forgotten."""

    def all_but_the_last(
        original: Callable[..., None], self: PipelineEngine, **kwargs: Any
    ) -> None:
        if kwargs["micro_batch"] == self.micro_batches - 1:
            self.pipe_buffers[kwargs["buffer_id"]].split = None
        original(self, **kwargs)

    instead(patch, schedule.BackwardWeightPass, all_but_the_last)


def receive_in_half(patch: pytest.MonkeyPatch) -> None:
    """A buffer of bf16 for activations of fp32 (upstream's other way round)."""
    original = Channel.recv

    def recv(self: Channel) -> Any:
        def rounded(tensor: torch.Tensor) -> torch.Tensor:
            half = (
                tensor.detach().bfloat16().to(tensor.dtype)
                if tensor.is_floating_point()
                else tensor
            )
            return half.requires_grad_(tensor.requires_grad)

        return torch.utils._pytree.tree_map_only(torch.Tensor, rounded, original(self))

    patch.setattr(Channel, "recv", recv)


def sum_of_data_ranks_losses(patch: pytest.MonkeyPatch) -> None:
    """The mean loss is over micro-batches only."""
    original = BatchOutputs.mean_loss
    patch.setattr(
        BatchOutputs, "mean_loss", lambda self, micro_batches: original(self, micro_batches) * 2
    )


def labels_of_the_one_before(patch: pytest.MonkeyPatch) -> None:
    """First and last stage read in another order."""
    original = MicroBatches.next

    def next_batch(self: MicroBatches) -> tuple[Any, Any]:
        inputs, labels = original(self)
        return inputs, labels.roll(1)

    patch.setattr(MicroBatches, "next", next_batch)


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


def let_go_when_sent(patch: pytest.MonkeyPatch) -> None:
    """A buffer is released as soon as its activations have been sent."""

    def send_and_release(
        original: Callable[..., None], self: PipelineEngine, **kwargs: Any
    ) -> None:
        original(self, **kwargs)
        self.pipe_buffers[kwargs["buffer_id"]].release()

    instead(patch, schedule.SendActivation, send_and_release)


def one_buffer_for_all(patch: pytest.MonkeyPatch) -> None:
    """The next micro-batch takes the buffer of one whose backward is to come."""

    def reserve(self: PipelineEngine, num_buffers: int) -> None:
        self.pipe_buffers = [PipeBuffer()] * num_buffers

    patch.setattr(PipelineEngine, "_reserve_pipe_buffers", reserve)


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

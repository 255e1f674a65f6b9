"""Writes into the model that lie beside the ordinary: memory that parameters exchange or share,
other shapes, and that no host waits for it.
"""

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.utils import safe_set_full_grad
from unit.common import DistributedTest
from unit.models import drawn
from unit.one_process import mean_square, own_loss, placed
from unit.v1.device.test_host_waits import UNCHECKED, batches, waited
from unit.v1.device.test_host_waits import Case as DeviceCase
from unit.v1.looping import each
from unit.v1.silent.changes import FACTORS, ROWS, SPAN, WIDTH, Case, Net, Run

STAGES, WARM_UP = (1, 2), 2


def case_of(stage: int, precision: str) -> Case:
    return Case("", stage, precision, accumulation=1, offload=False, optimizer="adamw")


@contextlib.contextmanager
def trained(case: Case) -> Iterator[Run]:
    run = Run(case)
    run.train(SPAN)
    yield run
    run.engine.destroy()


def exchange(model: nn.Module) -> None:
    model.a.bias.data, model.b.bias.data = model.b.bias.data, model.a.bias.data


class TestMemory(DistributedTest):
    world_size = 2

    @each(stage=STAGES, precision=FACTORS["precision"])
    def test_two_parameters_exchange_theirs(self, stage: int, precision: str) -> None:
        # Kills: a value that is copied back over that of another before that one is read.
        with trained(case_of(stage, precision)) as run:
            # Else values that are equal in any case would be exchanged.
            biases = [model.b.bias for model in run.both]
            with torch.no_grad():
                for bias in biases:
                    bias.add_(1.0)
            for model in run.both:
                exchange(model)
            run.check()
            if precision == "fp32":  # which computes with other memory after that than plain torch
                run.train(1)

    @each(stage=STAGES, precision=("fp32", "bf16"))
    def test_shared_by_two_is_refused(self, stage: int, precision: str) -> None:
        # Kills: two parameters of one memory that go apart without a word.
        with trained(case_of(stage, precision)) as run:
            run.model.a.bias.data = run.model.b.bias.data
            run.engine.backward(own_loss(run.engine, drawn(7, ROWS, WIDTH)))
            with pytest.raises(RuntimeError, match=r"a\.bias and b\.bias have the same memory"):
                run.engine.step()

    @each(stage=STAGES, precision=("fp32", "bf16"))
    def test_of_another_shape_is_refused(self, stage: int, precision: str) -> None:
        # Kills: a shape of as many elements, which is taken.
        with trained(case_of(stage, precision)) as run:
            run.engine.backward(own_loss(run.engine, drawn(7, ROWS, WIDTH)))
            weight = run.model.b.weight
            weight.data = weight.data.view(4, 16).clone()
            with pytest.raises(RuntimeError, match=r"b\.weight has the shape \(4, 16\).*\(8, 8\)"):
                run.engine.step()

    @each(stage=(0, 1, 2), precision=("fp32", "bf16"))
    def test_one_layer_that_is_converted_is_refused(self, stage: int, precision: str) -> None:
        # Kills: a look at the first parameter alone.
        with trained(case_of(stage, precision)) as run:
            loss = own_loss(run.engine, drawn(7, ROWS, WIDTH))
            run.model.o.double()
            with pytest.raises(RuntimeError, match=r"o\.\w+ is torch\.float64.*offload_states"):
                run.engine.backward(loss)
                run.engine.step()


class TestFrozen(DistributedTest):
    world_size = 2

    @each(stage=(0, 1, 2, 3), precision=("fp32", "bf16"))
    def test_with_a_gradient_that_was_set_is_stepped(self, stage: int, precision: str) -> None:
        # Kills: a gradient of safe_set_full_grad that is dropped where the parameter is frozen.
        with trained(case_of(stage, precision)) as run:
            for model in run.both:
                model.b.requires_grad_(False)
            run.backward()
            value = torch.full((8, 8), 0.5)
            run.reference.b.weight.grad = value
            safe_set_full_grad(run.model.b.weight, value.to(run.model.b.weight.dtype))
            run.step()
            run.check()


Change = Callable[[Any, int], object]


def freezes(model: Any, step: int) -> None:
    model[1].requires_grad_(step % 2 == 0)


def writes(model: Any, step: int) -> None:
    with torch.no_grad():
        model[2].weight.mul_(0.5)


def moves(model: Any, step: int) -> None:
    model[2].weight.data = model[2].weight.data.clone()


def device_case(stage: int) -> DeviceCase:
    return DeviceCase(stage, "bf16", UNCHECKED, waits=0)


def train_one(engine: Any, micro_batches: list[torch.Tensor]) -> None:
    for x in micro_batches:
        engine.backward(mean_square(engine, x))
        engine.step()


class TestOnADevice(DistributedTest):
    world_size = 2

    @each(stage=(0, 1, 2), change=(freezes, writes, moves))
    def test_the_host_waits_for_no_check(self, stage: int, change: Change) -> None:
        # Kills: a comparison that the host reads at once.
        with simulate():
            engine = device_case(stage).engine()
            with get_accelerator().count_host_waits() as waits:
                for step, micro_batches in enumerate(batches(WARM_UP + 4)):
                    inputs = [placed(engine, x) for x in micro_batches]
                    before, copies = waited(waits), waits.pageable_copies.total()
                    if step >= WARM_UP:
                        change(engine.module, step)
                    train_one(engine, inputs)
                    if step > WARM_UP:
                        assert waited(waits) == before, waits.by_place
                        assert waits.pageable_copies.total() == copies, waits.pageable_copies
            engine.destroy()


class TestStage3Loads(DistributedTest):
    world_size = 2

    @each(precision=("fp32", "bf16"))
    def test_outside_of_a_block_is_refused(self, precision: str) -> None:
        # Kills: torch's "size mismatch", of a placeholder's shape.
        with trained(case_of(3, precision)) as run:
            before = run.master("b.weight")
            state = Net(9).state_dict()
            remedy = "engine.load_checkpoint.*GatheredParameters"
            with pytest.raises(RuntimeError, match=f"load_state_dict: a.weight, a.bias.*{remedy}"):
                run.model.load_state_dict(state)
            with pytest.raises(RuntimeError, match=f"load_state_dict: b.weight.*{remedy}"):
                run.model.b.load_state_dict({"weight": state["b.weight"]}, strict=False)
            assert torch.equal(run.master("b.weight"), before)

    @each(precision=("fp32", "bf16"))
    def test_in_a_block_is_taken(self, precision: str) -> None:
        # Kills: a guard that does not ask whether the parameters are whole.
        with trained(case_of(3, precision)) as run:
            state = Net(9).state_dict()
            run.reference.load_state_dict(state)
            params = list(run.model.parameters())
            with deepspeed.zero.GatheredParameters(params, modifier_rank=0):
                if dist.get_rank() == 0:
                    run.model.load_state_dict(state)
            run.train(1)
            run.check()

    def test_a_copy_is_not_guarded(self) -> None:
        # Kills: a hook that goes with copies of the model.
        with trained(case_of(3, "fp32")) as run:
            with deepspeed.zero.GatheredParameters(list(run.model.parameters())):
                copied = copy.deepcopy(run.model)
            copied.load_state_dict(Net(9).state_dict())


class TestAskedForGradients(DistributedTest):
    world_size = 2

    @each(stage=(1, 2))
    def test_between_micro_batches_is_told_where_they_are_reduced(self, stage: int) -> None:
        # Kills: a word after the boundary's backward only; one while `.grad` sums micro-batches.
        run = Run(dataclasses.replace(case_of(stage, "fp32"), accumulation=2))
        told: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("deepspeed.runtime.gradients.asked.warn_once", told.append)
            run.engine.backward(own_loss(run.engine, drawn(7, ROWS, WIDTH)))
            has_sums = [param.grad is not None for param in run.model.parameters()]
            run.engine.step()
        assert all(has_sums) is (stage == 1) and bool(told) is (stage == 2), told
        run.engine.destroy()

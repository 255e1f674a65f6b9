"""Writes to parameters of stage 3 outside of `GatheredParameters`, where nobody would keep them:
refused at their own line, or else by the next block or step that finds them.
"""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from deepspeed import comm as dist
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.runtime.zero import GatheredParameters
from unit.common import DistributedTest
from unit.models import drawn, linears
from unit.one_process import OneProcess, mean_square, of_all_ranks
from unit.v1.looping import each
from unit.v1.zero.stage3.models import (
    LR,
    MIXED,
    SHARDED,
    config_of,
    distance,
    end_as_one_process,
    engine_of,
    loss_of,
    make_net,
    started,
    tokens_of,
    train,
    values_of,
)

BLOCKS: tuple[dict[str, Any], ...] = ({}, {"bf16": {"enabled": True}})
WIDTH = 6
Write = Callable[[Any], object]

# Every way that names what it writes to, by what the error begins with.
WRITES: tuple[tuple[str, Write], ...] = (
    ("mul_", lambda param: param.data.mul_(0.5)),
    ("mul_", lambda param: param.mul_(0.5)),
    ("copy_", lambda param: param.copy_(torch.zeros_like(param))),
    ("(add_|__iadd__)", lambda param: param.data.__iadd__(1)),
    ("__setitem__", lambda param: param.data.__setitem__(0, 1.0)),
    ("__setitem__", lambda param: param.__setitem__(0, 1.0)),
    ("zero_", lambda param: param.data.view(-1)[:2].zero_()),
    ("fill_", lambda param: param.data.chunk(2)[1].fill_(3.0)),
    ("normal_", lambda param: nn.init.normal_(param)),
    ("normal_", lambda param: nn.init.normal_(param.data)),
    ("_foreach_mul_", lambda param: torch._foreach_mul_([param.data], 2.0)),
    (r"\.data = ...", lambda param: setattr(param, "data", torch.zeros_like(param))),
)


class Double(nn.Module):
    """A parametrization."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


def parametrized() -> Any:
    model = linears(3, WIDTH)
    parametrize.register_parametrization(model[1], "weight", Double())
    return model


def batch(step: int, rank: int) -> torch.Tensor:
    return drawn(10 * step + rank, 4, WIDTH)


def written_behind(bias: Any) -> None:
    """Write by a tensor that was plain when it was taken, in a block."""
    with GatheredParameters(bias):
        alias = bias.data
    alias.mul_(0.5)


class TestWritesOutside(DistributedTest):
    world_size = 2

    def test_are_refused_where_they_are_made(self) -> None:
        # Kills: an edit that the next gather puts back without a word, of what persists or of what
        # stays whole for the next use; a refusal that has written, or that comes in a block.
        for zero in (MIXED, {**MIXED, "stage3_param_persistence_threshold": 0}):
            engine, model = started(**zero)
            train(engine, 1)
            loss = loss_of(engine, tokens_of(9, dist.get_rank()))
            param: Any = model.blocks[1].up.bias
            before = param.detach().clone()
            assert param.ds_status.name == "AVAILABLE" and before.numel()
            for name, write in WRITES:
                with pytest.raises(RuntimeError, match=rf"^{name}: blocks\.1\.up\.bias shows"):
                    with torch.no_grad():
                        write(param)
                assert torch.equal(param, before), name
            assert loss.isfinite()
            train(engine, 1, first=1)
            end_as_one_process(engine)

    def test_what_is_read_is_as_of_any_tensor(self) -> None:
        # Kills: results that refuse to be written to, or that are of another class; copies and
        # files that only this package can read; a move to another device and back that is refused.
        engine, model = started(**MIXED)
        bias: Any = model.blocks[0].up.bias
        value = bias.data
        kinds = (value + 1, value.clone(), copy.deepcopy(value), pickle.loads(pickle.dumps(value)))
        assert {type(one) for one in kinds} == {torch.Tensor}
        torch.zeros_like(value).copy_(value).mul_(2)
        model.to("cpu")
        bias.data = bias.data.clone()
        with pytest.raises(RuntimeError, match=r"cannot become torch\.float64"):
            model.blocks[0].up.double()
        with GatheredParameters(bias, modifier_rank=0):
            assert type(bias.data) is torch.Tensor
            bias.data.mul_(2)
        engine.destroy()

    @each(block=BLOCKS)
    def test_that_cannot_be_seen_are_told_by_the_next_block(self, block: dict[str, Any]) -> None:
        # Kills: a block that only reads, and is told that it has changed something; an edit that
        # stays in what is whole.
        model = make_net()
        engine = engine_of(model, {**config_of(3, **MIXED), **block})
        bias: Any = model.blocks[1].up.bias
        before = bias.detach().clone()
        for write in (written_behind, lambda param: torch._foreach_mul_([param], 0.5)):
            with torch.no_grad():
                write(bias)
            with pytest.raises(RuntimeError, match=r"1\.up\.bias changed before the block"):
                with GatheredParameters(list(model.parameters())):
                    assert not torch.equal(bias, before)
            assert torch.equal(bias, before)
            with GatheredParameters(list(model.parameters())):
                pass
        # Kills: an inner block that blames itself for what the outer one is about to keep.
        with GatheredParameters(bias, modifier_rank=0):
            bias.data.mul_(0.5)
            with GatheredParameters(bias):
                assert torch.equal(bias, before * 0.5)
        assert torch.equal(bias, before * 0.5)
        engine.destroy()

    def test_that_cannot_be_seen_are_told_by_the_next_step(self) -> None:
        # Kills: a step that puts the old values back without a word.
        for write in (written_behind, lambda param: torch._foreach_mul_([param], 0.5)):
            engine, model = started(1, **MIXED)
            train(engine, 1, accumulation=1)
            with torch.no_grad():
                write(model.blocks[1].up.bias)
            with pytest.raises(RuntimeError, match=r"1\.up\.bias changed while whole"):
                train(engine, 1, accumulation=1)
            engine.destroy()

    def test_on_a_device_are_told_one_step_later(self) -> None:
        # Kills: a host that waits for the device at each step, a comparison that nobody reads.
        with simulate():
            engine, model = started(1, **MIXED)
            train(engine, 1, accumulation=1)
            written_behind(model.blocks[1].up.bias)
            train(engine, 1, accumulation=1)
            with pytest.raises(RuntimeError, match=r"1\.up\.bias changed while whole"):
                train(engine, 1, accumulation=1)


class TestOtherMemory(DistributedTest):
    world_size = 2

    def test_set_is_a_write(self) -> None:
        # Kills: `set_`, for which torch asks no `__torch_function__`, that is taken and lost.
        engine, model = started(**MIXED)
        weight: Any = model.blocks[1].up.weight
        bias: Any = model.blocks[1].up.bias
        ones = torch.ones(weight.ds_shape)
        for target, told in (
            (weight, "is sharded"),
            (weight.data, "is sharded"),
            (weight.detach(), "is sharded"),
            (bias, "shows its elements"),
            (bias.data, "shows its elements"),
        ):
            with pytest.raises(TypeError, match=rf"set_: blocks\.1\.up\.\w+ {told}"):
                with torch.no_grad():
                    target.set_(ones)
        with GatheredParameters(weight, modifier_rank=0), torch.no_grad():
            weight.set_(ones)
        assert weight.shape == (0,)
        with GatheredParameters(weight):
            assert torch.equal(weight, ones)
        engine.destroy()

    def test_comparing_what_is_sharded_raises(self) -> None:
        # Kills: two parameters without elements that are equal.
        model = started(**SHARDED)[1]
        one, other = model.blocks[0].up.weight, model.blocks[1].up.weight
        for compare in (torch.equal, torch.allclose):
            for pair in ((one, other), (one.data, other.data), (torch.ones(0), one.detach())):
                with pytest.raises(RuntimeError, match=r"up\.weight is sharded"):
                    compare(*pair)

    def test_swapping_is_refused(self) -> None:
        # Kills: a unit that goes on with a tensor that is no parameter any more.
        for zero in (SHARDED, MIXED):
            engine, model = started(**zero)
            bias = model.blocks[0].up.bias
            for pair in ((bias, nn.Parameter(torch.ones(11))), (bias, model.blocks[1].up.bias)):
                for ordered in (pair, pair[::-1]):
                    with pytest.raises(RuntimeError, match=r"swap_tensors: blocks\.[01]\.up\.bias"):
                        torch.utils.swap_tensors(*ordered)
            train(engine)
            end_as_one_process(engine)

    @each(threshold=(0, 1000))
    def test_parametrizations_are_removed_in_a_block(self, threshold: int) -> None:
        # Kills: weights without what the parametrization did to them, with no word.
        model, plain = parametrized(), parametrized()
        zero = {"stage3_param_persistence_threshold": threshold}
        engine = engine_of(model, config_of(3, 1, **zero))
        one = OneProcess(plain, LR, mean_square)
        for step in range(4):
            if step == 2:
                with pytest.raises(TypeError, match=r"set_: 1\.parametrizations\.weight\.original"):
                    parametrize.remove_parametrizations(model[1], "weight")
                with GatheredParameters(list(model.parameters()), modifier_rank=0):
                    parametrize.remove_parametrizations(model[1], "weight")
                parametrize.remove_parametrizations(one.model[1], "weight")
            engine.backward(mean_square(engine, batch(step, dist.get_rank())))
            engine.step()
            one.step(of_all_ranks(batch, step))
        engine.destroy()
        assert distance(values_of(model), one.params()) < 1e-5

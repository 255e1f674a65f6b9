"""What is changed inside `GatheredParameters` and undone by its end, or thrown away."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.runtime.zero import GatheredParameters
from unit.common import DistributedTest
from unit.v1.gathering import collectives
from unit.v1.zero.stage3.models import (
    MIXED,
    SHARDED,
    config_of,
    engine_of,
    loss_of,
    make_net,
    tokens_of,
    train,
)

BLOCKS = [{}, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 4}}]


def made(block: dict[str, Any], **zero: Any) -> tuple[Any, Any]:
    model = make_net()
    return engine_of(model, {**config_of(3, 1, **(zero or MIXED)), **block}), model


def by_data(param: nn.Parameter, delta: torch.Tensor) -> None:
    param.data += delta
    param.data -= delta


def counted(param: nn.Parameter, delta: torch.Tensor) -> None:
    with torch.no_grad():
        param.add_(delta).sub_(delta)


def by_other_memory(param: nn.Parameter, delta: torch.Tensor) -> None:
    param.data = param.data + delta - delta


def by_a_copy(param: nn.Parameter, delta: torch.Tensor) -> None:
    param.data = param.data.clone()


def by_one_rank(param: nn.Parameter, delta: torch.Tensor) -> None:
    if dist.get_rank() == 1:
        counted(param, delta)


def values_of(params: list[Any]) -> list[torch.Tensor]:
    with GatheredParameters(params):
        return [param.detach().clone() for param in params]


def weights_of(engine: Any) -> list[torch.Tensor]:
    train(engine, 2, accumulation=1)
    engine.destroy()
    return [param.detach().clone() for param in engine.module.parameters()]


class TestUndone(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("block", BLOCKS)
    def test_nothing_has_changed(self, block: dict[str, Any]) -> None:
        # Kills: what rounding leaves that raises, or stays in what is whole between steps.
        engine, model = made(block)
        wanted = weights_of(made(block)[0])
        params = list(model.parameters())
        before, places = values_of(params), [param.data_ptr() for param in params]
        for edit in (by_data, counted, by_other_memory, by_a_copy, by_one_rank):
            torch.manual_seed(7)
            with GatheredParameters(params):
                for param in params:
                    edit(param, 0.1 * torch.randn_like(param))
                same = sum(map(torch.equal, params, before))
            assert (same < len(params)) == (edit is not by_a_copy) or edit is by_one_rank
            shown = [(param, value) for param, value in zip(params, before, strict=True)]
            assert all(torch.equal(param, value) for param, value in shown if param.numel())
            assert places == [param.data_ptr() for param in params], edit
            assert all(map(torch.equal, values_of(params), before)), edit
        assert sum(param.numel() > 0 for param in params) > 5
        assert all(map(torch.equal, weights_of(engine), wanted))

    @pytest.mark.parametrize("block", BLOCKS)
    def test_a_small_change_is_lost(self, block: dict[str, Any]) -> None:
        # Kills: a change by one rank in what another owns, a change of what stays whole, that pass
        # for rounding; a rank that raises alone; what stays whole and keeps the change.
        engine, model = made(block)
        weight, bias = model.blocks[1].up.weight, model.blocks[1].up.bias
        before = values_of([weight, bias])
        for rank, element in ((0, -1), (1, 0), (1, -1)):
            for param, name in ((weight, "weight"), (bias, "bias")):
                with pytest.raises(RuntimeError, match=rf"1\.up\.{name} changed .* discard=True"):
                    with GatheredParameters([weight, bias]), torch.no_grad():
                        if dist.get_rank() == rank:
                            param.view(-1)[element] += 0.05
        factor = 1.03 if block else 1.00001
        for param in (weight, bias):
            with pytest.raises(RuntimeError, match="changed inside the block"):
                with GatheredParameters(param):
                    param.data *= factor
            with pytest.raises(RuntimeError, match="changed inside the block"):
                with GatheredParameters(param):
                    param.data = param.data.view(-1)[:2]
        assert torch.equal(bias, before[1])
        assert all(map(torch.equal, values_of([weight, bias]), before))
        engine.destroy()

    def test_inside_a_forward(self) -> None:
        # Kills: memory of a running forward in which rounding stays.
        losses = []
        for edits in (False, True):
            engine, model = made(BLOCKS[1], **SHARDED)

            def edit(module: nn.Module, args: Any) -> None:
                with GatheredParameters(list(module.parameters())):
                    for param in module.parameters():
                        by_data(param, 0.3 * torch.randn_like(param))

            if edits:
                model.blocks[1].register_forward_pre_hook(edit)
            for index in range(3):
                loss = loss_of(engine, tokens_of(index, dist.get_rank()))
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            engine.destroy()
        assert losses[:3] == losses[3:]

    def test_an_outer_block_decides(self) -> None:
        # Kills: an inner block that refuses, or undoes, what an outer one is about to keep.
        engine, model = made({})
        weight = model.blocks[1].up.weight
        for added in (0.5, 1e-9):
            before = values_of([weight])[0]
            with GatheredParameters(weight, modifier_rank=0):
                weight.data += added
                with GatheredParameters(weight):
                    assert torch.equal(weight, before + added)
                with pytest.raises(RuntimeError, match=r"up\.weight are whole in an outer block"):
                    with GatheredParameters(weight, discard=True):
                        raise AssertionError("the block ran")
            assert torch.equal(values_of([weight])[0], before + added)
        with pytest.raises(RuntimeError, match="changed inside the block"):
            with GatheredParameters(weight):
                with GatheredParameters(weight):
                    weight.data.zero_()
        engine.destroy()

    def test_what_is_thrown_away(self) -> None:
        # Kills: a change that is thrown away and stays in what is whole between steps, ranks of
        # which some wait for others.
        engine, model = made(BLOCKS[1])
        wanted = weights_of(made(BLOCKS[1])[0])
        params = list(model.parameters())
        before = values_of(params)
        for fails in (False, True):
            try:
                with GatheredParameters(params, discard=True):
                    for param in params:
                        param.data = torch.full_like(param, float(dist.get_rank()))
                    if fails:
                        raise KeyError("in the block")
            except KeyError:
                assert fails
            assert all(map(torch.equal, values_of(params), before))
        with pytest.raises(ValueError, match="modifier_rank=1, discard=True"):
            GatheredParameters(params, modifier_rank=1, discard=True)
        with pytest.raises(RuntimeError, match=r"different parameters; rank 0: .*discard=True"):
            with GatheredParameters(params[0], discard=dist.get_rank() == 0):
                raise AssertionError("the block ran")
        assert all(map(torch.equal, weights_of(engine), wanted))

    def test_what_it_costs(self) -> None:
        # Kills: a second gather of each parameter that an adapter was merged into.
        engine, model = made({}, **SHARDED)
        params = [block.up.weight for block in model.blocks]

        def issued_by(edit: Callable[..., None] | None) -> list[str]:
            with collectives() as issued, GatheredParameters(params):
                for param in params:
                    if edit is not None:
                        edit(param, torch.ones_like(param))
            return sorted(issued)

        assert issued_by(by_data) == issued_by(None)
        assert len(issued_by(counted)) > len(issued_by(None))
        engine.destroy()

"""Adapters over a frozen base at stage 3, and edits of weights that are undone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.runtime.zero import GatheredParameters, Init
from unit.common import DistributedTest
from unit.models import drawn, seeded
from unit.one_process import OneProcess, mean_square
from unit.v1.gathering import collectives
from unit.v1.zero.stage3.models import (
    LR,
    MIXED,
    SHARDED,
    STEPS,
    Tensors,
    config_of,
    distance,
    engine_of,
    loss_of,
    make_net,
    tokens_of,
    train,
    values_of,
)

WIDTH = 7


class Adapted(nn.Module):
    """A frozen layer in bf16 and a trained product of two small matrices in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added = self.up(self.down(x.to(self.up.weight.dtype)))
        return self.base(x.to(self.base.weight.dtype)).to(x.dtype) + added.to(x.dtype)


def made() -> nn.Sequential:
    return seeded(lambda: nn.Sequential(Adapted(), Adapted(), Adapted()))


def batch(step: int, rank: int) -> torch.Tensor:
    return drawn(10 * step + rank, 4, WIDTH)


def one_process() -> Tensors:
    return OneProcess(made(), LR, mean_square).train(batch, STEPS)


def trained(
    stage: int, model: nn.Module | None = None, dtype: torch.dtype = torch.float32, **zero: Any
) -> Tensors:
    model = made() if model is None else model
    config = config_of(stage, 1, **zero)
    config["bf16"] = {"enabled": dtype == torch.bfloat16}
    engine = engine_of(model, config)
    for step in range(STEPS):
        loss = engine(batch(step, dist.get_rank()).to(dtype)).float().square().mean()
        engine.backward(loss)
        engine.step()
    engine.destroy()
    return values_of(model)


class TestDtypes(DistributedTest):
    world_size = 2

    def test_a_base_in_bf16_and_adapters_in_fp32(self) -> None:
        # Kills: a frozen base that is made fp32 (its products round otherwise, and take twice the
        # memory), a gather that takes one dtype's bytes for another's.
        wanted, stage2 = one_process(), trained(2)
        assert distance(stage2, wanted) < 1e-6
        with Init():
            cut = made()
        for model, zero in (
            (None, SHARDED),
            (None, {}),
            (cut, SHARDED),
            (None, {**SHARDED, "offload_param": {"device": "cpu"}}),
        ):
            found = trained(3, model, **zero)
            for name, value in found.items():
                assert value.dtype == wanted[name].dtype, name
                assert torch.equal(value, stage2[name]), (name, zero)

    def test_bf16_makes_all_of_it_bf16(self) -> None:
        # Kills: adapters that keep a dtype which the configuration does not name.
        stage2, stage3 = (trained(stage, dtype=torch.bfloat16, **SHARDED) for stage in (2, 3))
        for name, value in stage3.items():
            assert value.dtype == torch.bfloat16 and torch.equal(value, stage2[name]), name


class Late(nn.Module):
    """Around a layer, once it has been given something: a frozen layer of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.more = nn.ModuleDict()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((layer(x).tanh() for layer in self.more.values()), start=self.inner(x))


def layer_of(seed: int, rank: int) -> nn.Linear:
    """Other values on each rank: those of the first count."""
    torch.manual_seed(10 * seed + rank)
    return nn.Linear(WIDTH, WIDTH)


def give(model: nn.Sequential, step: int, rank: int) -> None:
    """Between steps: a layer around one that is there, more of it, a layer in place of another."""
    if step == 1:
        model[1] = Late(model[1])
    if step in (1, 3):
        model[1].more[str(step)] = layer_of(step, rank).requires_grad_(False)
    if step == 2:
        model[2].base = layer_of(step, rank).requires_grad_(False)


class TestLate(DistributedTest):
    world_size = 2

    def test_frozen_ones_are_taken_in(self) -> None:
        # Kills: a layer that each rank has with values of its own, one that stays whole, modules
        # around sharded ones that nobody gathers for.
        rank, world = dist.get_rank(), dist.get_world_size()
        plain = made()
        optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=LR)
        model = made()
        engine = engine_of(model, config_of(3, 1, **SHARDED, stage3_max_reuse_distance=0))
        for step in range(5):
            give(plain, step, 0)
            if step == 3:
                with deepspeed.zero.Init():
                    give(model, step, rank)
            else:
                give(model, step, rank)
            engine.backward(engine(batch(step, rank)).square().mean())
            engine.step()
            assert all(param.numel() == 0 for param in model.parameters()), step
            for other in range(world):
                (plain(batch(step, other)).square().mean() / world).backward()
            optimizer.step()
            optimizer.zero_grad()
        engine.destroy()
        assert distance(values_of(model), values_of(plain)) < 1e-6

    def test_trained_ones_are_refused(self) -> None:
        # Kills: an adapter that no optimizer trains, in silence.
        rank = dist.get_rank()
        model = made()
        engine = engine_of(model, config_of(3, 1))
        model[1] = Late(model[1])
        model[1].more["a"] = layer_of(1, rank)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"1\.more\.a\.weight, 1\.more\.a\.bias came"):
                engine(batch(0, rank))
        model[1].more["a"].requires_grad_(False)
        engine(batch(0, rank))
        engine.destroy()
        first, *_ = deepspeed.initialize(model=model, config=config_of(3, 1))
        model[0] = Late(model[0])
        model[0].more["a"] = layer_of(2, rank)
        told: list[Any] = [None, None]
        with torch.no_grad():
            dist.all_gather_object(told, first(batch(0, 0)))
        assert torch.equal(*told)
        first.destroy()


BLOCKS = [{}, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 4}}]


def made_mixed(block: dict[str, Any], **zero: Any) -> tuple[Any, Any]:
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


def gathered_values(params: list[Any]) -> list[torch.Tensor]:
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
        engine, model = made_mixed(block)
        wanted = weights_of(made_mixed(block)[0])
        params = list(model.parameters())
        before, places = gathered_values(params), [param.data_ptr() for param in params]
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
            assert all(map(torch.equal, gathered_values(params), before)), edit
        assert sum(param.numel() > 0 for param in params) > 5
        assert all(map(torch.equal, weights_of(engine), wanted))

    @pytest.mark.parametrize("block", BLOCKS)
    def test_a_small_change_is_lost(self, block: dict[str, Any]) -> None:
        # Kills: a change by one rank in what another owns, a change of what stays whole, that pass
        # for rounding; a rank that raises alone; what stays whole and keeps the change.
        engine, model = made_mixed(block)
        weight, bias = model.blocks[1].up.weight, model.blocks[1].up.bias
        before = gathered_values([weight, bias])
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
        assert all(map(torch.equal, gathered_values([weight, bias]), before))
        engine.destroy()

    def test_inside_a_forward(self) -> None:
        # Kills: memory of a running forward in which rounding stays.
        losses = []
        for edits in (False, True):
            engine, model = made_mixed(BLOCKS[1], **SHARDED)

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
        engine, model = made_mixed({})
        weight = model.blocks[1].up.weight
        for added in (0.5, 1e-9):
            before = gathered_values([weight])[0]
            with GatheredParameters(weight, modifier_rank=0):
                weight.data += added
                with GatheredParameters(weight):
                    assert torch.equal(weight, before + added)
                with pytest.raises(RuntimeError, match=r"up\.weight are whole in an outer block"):
                    with GatheredParameters(weight, discard=True):
                        raise AssertionError("the block ran")
            assert torch.equal(gathered_values([weight])[0], before + added)
        with pytest.raises(RuntimeError, match="changed inside the block"):
            with GatheredParameters(weight):
                with GatheredParameters(weight):
                    weight.data.zero_()
        engine.destroy()

    def test_what_is_thrown_away(self) -> None:
        # Kills: a change that is thrown away and stays in what is whole between steps, ranks of
        # which some wait for others.
        engine, model = made_mixed(BLOCKS[1])
        wanted = weights_of(made_mixed(BLOCKS[1])[0])
        params = list(model.parameters())
        before = gathered_values(params)
        for fails in (False, True):
            try:
                with GatheredParameters(params, discard=True):
                    for param in params:
                        param.data = torch.full_like(param, float(dist.get_rank()))
                    if fails:
                        raise KeyError("in the block")
            except KeyError:
                assert fails
            assert all(map(torch.equal, gathered_values(params), before))
        with pytest.raises(ValueError, match="modifier_rank=1, discard=True"):
            GatheredParameters(params, modifier_rank=1, discard=True)
        with pytest.raises(RuntimeError, match=r"different parameters; rank 0: .*discard=True"):
            with GatheredParameters(params[0], discard=dist.get_rank() == 0):
                raise AssertionError("the block ran")
        assert all(map(torch.equal, weights_of(engine), wanted))

    def test_what_it_costs(self) -> None:
        # Kills: a second gather of each parameter that an adapter was merged into.
        engine, model = made_mixed({}, **SHARDED)
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

"""How long what is whole is right: edits in forwards, blocks over passes, failing gathers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.runtime.zero.gathering import gather_unit
from deepspeed.verify import check_streams
from unit.common import DistributedTest
from unit.v1.zero.stage3.models import (
    LR,
    MIXED,
    SHARDED,
    STEPS,
    check_as_one_process,
    config_of,
    distance,
    end_as_one_process,
    engine_of,
    loss_of,
    make_net,
    tokens_of,
    train,
    trained,
    values_of,
)

WIDTH = 5
BOUNDED: dict[str, Any] = {**SHARDED, "stage3_max_reuse_distance": 0}


class Edited(nn.Module):
    """Layers, of which a forward changes the last one when it has run the second."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.norm = nn.LayerNorm(WIDTH)
        self.edit: Callable[[Edited], None] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(self.norm(x)).tanh()
            if index == 1 and self.edit is not None:
                self.edit(self)
        return x


def make_edited(edit: Callable[[Edited], None] | None = None) -> Edited:
    torch.manual_seed(0)
    model = Edited()
    model.edit = edit
    return model


def batch() -> torch.Tensor:
    return torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)


def of_rank_0(model: Edited) -> None:
    weight = dict(model.named_parameters())["layers.3.weight"]  # an attribute would gather it
    with GatheredParameters(weight, modifier_rank=0):
        if dist.get_rank() == 0:
            weight.data.mul_(1.5)


def in_place(name: str) -> Callable[[Edited], None]:
    def edit(model: Edited) -> None:
        module, _, own = name.rpartition(".")
        with torch.no_grad():
            getattr(model.get_submodule(module), own).mul_(0.5)

    return edit


def other_memory(model: Edited) -> None:
    weight = model.layers[3].weight
    weight.data = weight.data * 0.5


def evaluating(model: nn.Module, **zero: Any) -> Any:
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3, **zero}}
    return deepspeed.initialize(model=model, config=config)[0]


class TestEdits(DistributedTest):
    world_size = 2

    def test_an_edit_is_seen_without_an_optimizer(self) -> None:
        # Kills: what was gathered ahead of the edit, which only an optimizer hears of.
        for zero in (SHARDED, BOUNDED):
            model, plain = make_edited(of_rank_0), make_edited()
            plain.edit = lambda net: net.layers[3].weight.data.mul_(1.5)
            engine = evaluating(model, **zero)
            for turn in range(4):
                with torch.set_grad_enabled(turn == 3):
                    assert torch.equal(engine(batch()), plain(batch())), (zero, turn)
            engine.destroy()
            assert torch.equal(model.layers[3].weight, plain.layers[3].weight)

    def test_an_edit_that_would_be_lost_raises(self) -> None:
        # Kills: weights that are clamped, renormed or averaged in a forward, and are what they were
        # when they are gathered the next time.
        small = {"stage3_param_persistence_threshold": WIDTH, "stage3_unit_fusion_size": 0}
        for make in (evaluating, lambda model, **zero: engine_of(model, config_of(3, 1, **zero))):
            for edit in (in_place("layers.3.weight"), other_memory):
                engine = make(make_edited(edit), **BOUNDED)
                with pytest.raises(RuntimeError, match=r"layers\.3\.weight changed while whole"):
                    engine(batch())
                engine.module.edit = None
                engine(batch())
                assert not any(unit.is_whole for unit in engine.parameter_offload.units)
                engine.destroy()
        model = make_edited(in_place("norm.weight"))
        engine = engine_of(model, config_of(3, 1, **small))
        with torch.no_grad():
            engine(batch())
        model.edit = None
        engine.backward(engine(batch()).square().mean())
        with pytest.raises(RuntimeError, match=r"norm\.weight changed while whole"):
            engine.step()
        engine.destroy()


class TestBlocks(DistributedTest):
    world_size = 2

    def test_a_block_around_a_forward(self) -> None:
        # Kills: parameters that are hidden when the block ends, though their unit has stayed whole
        # for the backward that recomputes with them.
        for recompute in (False, True):
            model = make_net(recompute=recompute)
            engine = engine_of(model, config_of(3, **SHARDED))
            for index in range(2 * STEPS):
                with GatheredParameters([model.blocks[1].up.weight, model.embed.weight]):
                    loss = loss_of(engine, tokens_of(index, dist.get_rank()))
                engine.backward(loss)
                engine.step()
            end_as_one_process(engine)

    def test_an_edit_after_a_forward_inside_the_block(self) -> None:
        # Kills: a unit that has stayed whole, in which a recomputation finds the old value.
        for recompute in (False, True):
            model, plain = make_net(recompute=recompute), make_net(recompute=recompute)
            engine = engine_of(model, config_of(3, 1, **SHARDED))
            for index in range(3):
                weight = model.blocks[1].up.weight
                with GatheredParameters(weight, modifier_rank=1):
                    loss = loss_of(engine, tokens_of(index, dist.get_rank()))
                    if dist.get_rank() == 1:
                        weight.data.mul_(1.5)
                engine.backward(loss)
                engine.step()
                plain.zero_grad()
                losses = [loss_of(plain, tokens_of(index, rank)) / 2 for rank in (0, 1)]
                plain.blocks[1].up.weight.data.mul_(1.5)
                sum(losses).backward()  # type: ignore[union-attr]  # there are two
                with torch.no_grad():
                    for param in plain.parameters():
                        if param.grad is not None:
                            param -= LR * param.grad
            engine.destroy()
            for (name, found), wanted in zip(
                model.named_parameters(), plain.parameters(), strict=True
            ):
                assert torch.allclose(found, wanted, rtol=0, atol=1e-5), (recompute, name)

    def test_a_lost_edit_raises_on_all_ranks(self) -> None:
        # Kills: the rank that forgot modifier_rank raises, and the others wait for it.
        model = make_net()
        engine = engine_of(model, config_of(3, **SHARDED))
        weight = model.blocks[1].up.weight
        with pytest.raises(RuntimeError, match=r"blocks\.1\.up\.weight changed .* modifier_rank=0"):
            with GatheredParameters(weight):
                if dist.get_rank() == 1:
                    weight.data.mul_(2)
        engine.destroy()


class TestEmptied(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("recompute", [None, False, True])
    def test_everything_goes_and_comes_back(self, recompute: bool | None) -> None:
        # Kills: memory that is kept, in the pools or of what persists; a forward, a recomputation,
        # a backward or an update without what persists; a forward that loses what it is using.
        model = make_net(recompute=recompute)
        engine = engine_of(model, config_of(3, **MIXED))
        offload = engine.parameter_offload

        def empty() -> None:
            engine.empty_partition_cache()
            assert not any(param.numel() for param in model.parameters())
            assert all(param.ds_status.name == "NOT_AVAILABLE" for param in model.parameters())
            pools = (offload.resources.rows, offload.resources.whole)
            assert [pool.num_bytes for pool in pools] == [0, 0]
            assert [unit._own_memory for unit in offload.persistent_units] == [None]

        assert sum(param.numel() for param in model.parameters())
        for index in range(2 * STEPS):
            empty()
            handle = model.frozen.register_forward_pre_hook(
                lambda *_: engine.empty_partition_cache()
            )
            loss = loss_of(engine, tokens_of(index, dist.get_rank()))
            handle.remove()
            empty()
            with GatheredParameters(model.blocks[0].up.bias):
                engine.empty_partition_cache()
                assert model.blocks[0].up.bias.numel()
            loss.backward() if index // 2 else engine.backward(loss)
            empty()
            engine.step()
        engine.empty_partition_cache()
        with GatheredParameters(model.parameters()):
            values = values_of(model)
        engine.destroy()
        assert all(torch.equal(param, values[name]) for name, param in model.named_parameters())
        check_as_one_process(model)

    def test_with_streams(self) -> None:
        # Kills: memory that another stream still reads or fills when it is let go.
        wanted = trained(3)
        with simulate():
            model = make_net()
            engine = engine_of(model, config_of(3, **MIXED))
            with check_streams():
                for step in range(STEPS):
                    train(engine, 1, first=step)
                    with torch.no_grad():
                        engine(tokens_of(step, dist.get_rank()))
                    engine.empty_partition_cache()
            engine.destroy()
        assert distance(values_of(model), wanted) < 1e-5

    def test_what_a_block_shows_stays(self) -> None:
        # Kills: a block whose parameters go.
        model = make_net()
        engine = engine_of(model, config_of(3, **MIXED))
        bias = model.blocks[0].up.bias
        with GatheredParameters(bias, modifier_rank=0):
            engine.empty_partition_cache()
            bias.data.fill_(2.0)
        engine.empty_partition_cache()
        assert not bias.numel()
        with GatheredParameters(bias):
            assert bias.eq(2.0).all()
        train(engine, 1)
        assert bias.numel()
        with torch.no_grad():
            bias.zero_()
        with pytest.raises(RuntimeError, match=r"0\.up\.bias changed while whole"):
            engine.empty_partition_cache()
        engine.destroy()


class TestFailedGather(DistributedTest):
    world_size = 2

    def test_its_memory_is_not_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Kills: rows that nobody gives back, or that are given to the next gather while what was
        # issued before the failure still writes there; a unit that is on its way for ever.
        model = make_net()
        engine = engine_of(model, config_of(3, **BOUNDED))
        train(engine, 1)
        rows, fails = engine.parameter_offload.resources.rows, [""]
        original = gather_unit.gather_from_owners
        held: list[torch.Tensor] = []

        def gather(filled: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            pending = original(filled, *args, **kwargs)
            if fails[0]:
                held.append(filled)
                pending.wait()  # or the next gather takes what was sent for this one
            if fails[0] == "start":
                raise OSError("planted")
            if fails[0] == "wait":
                monkeypatch.setattr(pending, "wait", _raise)
            return pending

        monkeypatch.setattr(gather_unit, "gather_from_owners", gather)
        before = rows.num_bytes
        for step in range(1, STEPS):
            for fails[0] in ("wait", "start"):
                for _ in range(9):
                    with pytest.raises(OSError, match="planted"):
                        loss_of(engine, tokens_of(0, 0))
            fails[0] = ""
            train(engine, 1, first=step)
            used = {buffer.tensor.data_ptr() for buffer in rows.by_pointer.values()}
            assert not used & {tensor.data_ptr() for tensor in held}
        assert rows.num_bytes < 2 * before  # other sizes than before, perhaps
        end_as_one_process(engine)


def _raise() -> None:
    raise OSError("planted")

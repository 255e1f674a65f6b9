"""How long what is whole is right: adapters over a frozen base, edits in forwards and such that are
undone, blocks over passes, failing gathers.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepspeed
from deepspeed import comm as dist
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.runtime.zero import GatheredParameters, Init
from deepspeed.runtime.zero.gathering import gather_unit
from deepspeed.runtime.zero.gathering.coordinator import in_backward
from deepspeed.verify import check_streams
from unit import one_process
from unit.common import DistributedTest
from unit.models import drawn, linears, seeded
from unit.one_process import OneProcess, mean_square, of_all_ranks
from unit.v1.gathering import collectives, noted
from unit.v1.looping import each
from unit.v1.zero.stage3.models import (
    BOUNDED,
    LR,
    MIXED,
    SHARDED,
    STEPS,
    Tensors,
    check_as_one_process,
    config_of,
    distance,
    end_as_one_process,
    engine_of,
    loss_of,
    make_net,
    started,
    tokens_of,
    train,
    trained,
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


def adapted(
    stage: int, model: nn.Module | None = None, dtype: torch.dtype = torch.float32, **zero: Any
) -> Tensors:
    model = made() if model is None else model
    bf16 = {"enabled": dtype == torch.bfloat16}
    engine = engine_of(model, {**config_of(stage, 1, **zero), "bf16": bf16})
    batches = [batch(step, dist.get_rank()).to(dtype) for step in range(STEPS)]
    one_process.train(engine, batches, mean_square)
    engine.destroy()
    return values_of(model)


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
    return seeded(nn.Linear, WIDTH, WIDTH, seed=10 * seed + rank)


def give(model: nn.Sequential, step: int, rank: int) -> None:
    """Between steps: a layer around one that is there, more of it, a layer in place of another."""
    if step == 1:
        model[1] = Late(model[1])
    if step in (1, 3):
        model[1].more[str(step)] = layer_of(step, rank).requires_grad_(False)
    if step == 2:
        model[2].base = layer_of(step, rank).requires_grad_(False)


class TestAdapters(DistributedTest):
    world_size = 2

    def test_a_base_in_bf16_and_adapters_in_fp32(self) -> None:
        # Kills: a frozen base that is made fp32 (its products round otherwise, and take twice the
        # memory), a gather that takes one dtype's bytes for another's.
        wanted, stage2 = OneProcess(made(), LR, mean_square).train(batch, STEPS), adapted(2)
        assert distance(stage2, wanted) < 1e-6
        with Init():
            cut = made()
        for model, zero in (
            (None, SHARDED),
            (None, {}),
            (cut, SHARDED),
            (None, {**SHARDED, "offload_param": {"device": "cpu"}}),
        ):
            found = adapted(3, model, **zero)
            for name, value in found.items():
                assert value.dtype == wanted[name].dtype, name
                assert torch.equal(value, stage2[name]), (name, zero)
        # Kills: adapters that keep a dtype which the configuration does not name.
        stage2, stage3 = (adapted(stage, dtype=torch.bfloat16, **SHARDED) for stage in (2, 3))
        for name, value in stage3.items():
            assert value.dtype == torch.bfloat16 and torch.equal(value, stage2[name]), name

    def test_frozen_ones_are_taken_in_and_trained_ones_refused(self) -> None:
        # Kills: a layer that each rank has with values of its own, one that stays whole, modules
        # around sharded ones that nobody gathers for.
        rank = dist.get_rank()
        model, plain = made(), made()
        one = OneProcess(plain, LR, mean_square)
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
            one.step(of_all_ranks(batch, step))
        engine.destroy()
        assert distance(values_of(model), values_of(plain)) < 1e-6
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


BLOCKS = [{}, {"bf16": {"enabled": True}}]


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
    model = seeded(Edited)
    model.edit = edit
    return model


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


def loss_before_an_edit(plain: Any, index: int) -> torch.Tensor:
    """Of both ranks; its backward then sees other weights."""
    loss = sum(loss_of(plain, tokens_of(index, rank)) / 2 for rank in (0, 1))
    plain.blocks[1].up.weight.data.mul_(1.5)
    return loss  # type: ignore[return-value]  # there are two


class TestEdits(DistributedTest):
    world_size = 2

    @each(block=BLOCKS)
    def test_nothing_has_changed_and_a_small_change_is_lost(self, block: dict[str, Any]) -> None:
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

    def test_inside_a_forward_in_outer_blocks_and_thrown_away(self) -> None:
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

    def test_an_edit_is_seen_without_an_optimizer_and_one_that_would_be_lost_raises(self) -> None:
        # Kills: what was gathered ahead of the edit, which only an optimizer hears of.
        for zero in (SHARDED, BOUNDED):
            model, plain = make_edited(of_rank_0), make_edited()
            plain.edit = lambda net: net.layers[3].weight.data.mul_(1.5)
            engine = evaluating(model, **zero)
            for turn in range(4):
                with torch.set_grad_enabled(turn == 3):
                    assert torch.equal(engine(batch(0, 0)), plain(batch(0, 0))), (zero, turn)
            engine.destroy()
            assert torch.equal(model.layers[3].weight, plain.layers[3].weight)
        # Kills: weights that are clamped, renormed or averaged in a forward, and are what they were
        # when they are gathered the next time.
        small = {"stage3_param_persistence_threshold": WIDTH, "stage3_unit_fusion_size": 0}
        for make in (evaluating, lambda model, **zero: engine_of(model, config_of(3, 1, **zero))):
            for edit in (in_place("layers.3.weight"), other_memory):
                engine = make(make_edited(edit), **BOUNDED)
                with pytest.raises(RuntimeError, match=r"layers\.3\.weight changed while whole"):
                    engine(batch(0, 0))
                engine.module.edit = None
                engine(batch(0, 0))
                assert not any(unit.is_whole for unit in engine.parameter_offload.units)
                engine.destroy()
        model = make_edited(in_place("norm.weight"))
        engine = engine_of(model, config_of(3, 1, **small))
        with torch.no_grad():
            engine(batch(0, 0))
        model.edit = None
        engine.backward(engine(batch(0, 0)).square().mean())
        with pytest.raises(RuntimeError, match=r"norm\.weight changed while whole"):
            engine.step()

    def test_a_block_around_a_forward_and_an_edit_inside_the_block_on_all_ranks(self) -> None:
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
        # Kills: a unit that has stayed whole, in which a recomputation finds the old value.
        for recompute in (False, True):
            model = make_net(recompute=recompute)
            one = OneProcess(make_net(recompute=recompute), LR, loss_before_an_edit)
            engine = engine_of(model, config_of(3, 1, **SHARDED))
            for index in range(3):
                weight = model.blocks[1].up.weight
                with GatheredParameters(weight, modifier_rank=1):
                    loss = loss_of(engine, tokens_of(index, dist.get_rank()))
                    if dist.get_rank() == 1:
                        weight.data.mul_(1.5)
                engine.backward(loss)
                engine.step()
                one.step([index])
            engine.destroy()
            assert distance(values_of(model), one.params()) < 1e-5, recompute
        # Kills: the rank that forgot modifier_rank raises, and the others wait for it.
        engine, model = started(**SHARDED)
        weight = model.blocks[1].up.weight
        with pytest.raises(RuntimeError, match=r"blocks\.1\.up\.weight changed .* modifier_rank=0"):
            with GatheredParameters(weight):
                if dist.get_rank() == 1:
                    weight.data.mul_(2)


class Chain(nn.Module):
    """Four equal layers, recomputed in backward (`use_reentrant`) or not; `left_out` none of them
    or one.
    """

    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        self.layers = linears(4, WIDTH, bias=False)
        self.use_reentrant = use_reentrant
        self.left_out = -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if index == self.left_out:
                continue
            if self.use_reentrant is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x.square().mean()


def issued_by(left_out: int = -1, use_reentrant: bool | None = None, **zero: Any) -> list[str]:
    """For each of two steps, what a rank issues in forward and backward: gathers (G), forwards of a
    layer (F) and reductions (R). The second leaves out a layer.
    """
    letters = {"all_gather_into_tensor": "G", "reduce_scatter_tensor": "R"}
    keys = {f"stage3_{name}": value for name, value in zero.items()}
    found = []
    with simulate(), noted(lambda call: letters.get(call.name, "")) as notes:
        engine = engine_of(Chain(use_reentrant), config_of(3, 1, **{**BOUNDED, **keys}))
        for layer in engine.module.layers:
            layer.register_forward_pre_hook(lambda *_: None if in_backward() else notes.append("F"))
        for engine.module.left_out in (-1, left_out):
            notes.clear()
            loss = engine(torch.ones(1, WIDTH).requires_grad_())
            notes.append(" ")
            engine.backward(loss)
            found.append("".join(notes))
            engine.step()
        engine.destroy()
    return found


class TestOrder(DistributedTest):
    world_size = 2
    backend = "gloo"

    def test_the_next_gather_is_issued_before_the_present_reduction(self) -> None:
        ahead = ["GFGFGFGF GGRGRGRR", "GGFGFGFF GRGRGRR"]
        one_by_one = ["GFGFGFGF GRGRGRGR", "GFGFGFGF RGRGRGR"]
        numel = WIDTH * WIDTH
        for expected, keys in (
            # Kills: a unit that has to fit into the key; one for which there is no room beside the
            # one in use; a first backward, or one after another forward, that knows no order.
            (ahead, {}),
            (ahead, {"max_live_parameters": numel}),
            (ahead, {"use_reentrant": False}),
            ([ahead[0], "GGFGFGF GGRGRRR"], {"left_out": 1}),
            # Kills: units that stay for reuse, as the third does here, and leave the next no room.
            (
                [ahead[0], "GGFGFGFF RGRGRR"],
                {"max_reuse_distance": 8 * numel, "max_live_parameters": 2 * numel},
            ),
            # Kills: a key of 0, or a limit, that does not count.
            (one_by_one, {"prefetch_bucket_size": 0}),
            (one_by_one, {"max_live_parameters": numel - 1}),
        ):
            assert issued_by(**{"prefetch_bucket_size": 1, **keys}) == expected, keys


class TestEmptied(DistributedTest):
    world_size = 2

    @each(recompute=(None, False, True))
    def test_everything_goes_and_comes_back(self, recompute: bool | None) -> None:
        # Kills: memory that is kept, in the pool or of what persists; a forward, a recomputation,
        # a backward or an update without what persists; a forward that loses what it is using.
        model = make_net(recompute=recompute)
        engine = engine_of(model, config_of(3, **MIXED))
        offload = engine.parameter_offload

        def forget(*_: Any) -> None:
            engine.empty_partition_cache()

        def empty() -> None:
            engine.empty_partition_cache()
            assert not any(param.numel() for param in model.parameters())
            assert all(param.ds_status.name == "NOT_AVAILABLE" for param in model.parameters())
            assert not offload.resources.pool.num_bytes
            assert [unit._own_memory for unit in offload.persistent_units] == [None]

        assert sum(param.numel() for param in model.parameters())
        for index in range(2 * STEPS):
            empty()
            handle = model.frozen.register_forward_pre_hook(forget)
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

    def test_with_streams_and_in_a_block(self) -> None:
        # Kills: memory that another stream still reads or fills when it is let go.
        wanted = trained(3)
        with simulate():
            engine, model = started(**MIXED)
            with check_streams():
                for step in range(STEPS):
                    train(engine, 1, first=step)
                    with torch.no_grad():
                        engine(tokens_of(step, dist.get_rank()))
                    engine.empty_partition_cache()
            engine.destroy()
        assert distance(values_of(model), wanted) < 1e-5
        # Kills: a block whose parameters go.
        engine, model = started(**MIXED)
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
            torch._foreach_zero_([bias])
        with pytest.raises(RuntimeError, match=r"0\.up\.bias changed while whole"):
            engine.empty_partition_cache()

    def test_its_memory_is_not_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Kills: rows that nobody gives back, or that are given to the next gather while what was
        # issued before the failure still writes there; a unit that is on its way for ever.
        engine, model = started(**BOUNDED)
        train(engine, 1)
        pool, fails = engine.parameter_offload.resources.pool, [""]
        original = gather_unit.gather_from_owners
        held: list[torch.Tensor] = []

        def gather(filled: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            pending = original(filled, *args, **kwargs)
            assert all(filled.data_ptr() != one.data_ptr() for one in held), "used again"
            if fails[0]:
                held.append(filled)
                pending.wait()  # or the next gather takes what was sent for this one
            if fails[0] == "start":
                raise OSError("planted")
            if fails[0] == "wait":
                monkeypatch.setattr(pending, "wait", _raise)
            return pending

        monkeypatch.setattr(gather_unit, "gather_from_owners", gather)
        before = pool.num_bytes
        for step in range(1, STEPS):
            for fails[0] in ("wait", "start"):
                for _ in range(9):
                    with pytest.raises(OSError, match="planted"):
                        loss_of(engine, tokens_of(0, 0))
            fails[0] = ""
            train(engine, 1, first=step)
            used = {buffer.tensor.data_ptr() for buffer in pool.by_pointer.values()}
            assert not used & {tensor.data_ptr() for tensor in held}
        assert pool.num_bytes < 2 * before  # other sizes than before, perhaps
        end_as_one_process(engine)


def _raise() -> None:
    raise OSError("planted")

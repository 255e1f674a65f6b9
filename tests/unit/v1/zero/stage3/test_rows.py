"""What users of stage 3 hit most, each held by a test.

| | What goes wrong elsewhere | Held by |
|---|---|---|
| 1 | a recorded order that is stale | `test_another_order_every_time` |
| 2 | ranks that part, and hang | `test_divergence`; what may differ: `test_uneven` |
| 3 | experts that only some ranks run | `test_experts_chosen_by_each_rank`, |
| | | `test_a_leaf_that_some_ranks_pass_by`; found: `test_experts_are_one_unit` of `test_units` |
| 4 | a parameter used elsewhere | `Net.scale` of `models`, `test_a_sharded_parameter` |
| 5 | edits lost, duplicates | `test_no_edit_is_lost`, `test_edits`, `test_gathering`, |
| | | `TestEdits` of `test_lifetimes` |
| 6 | a gather during accumulation | `test_gathers_during_accumulation`, `TestBlocks` there |
| 7 | shape `(0,)` in code | `test_a_sharded_parameter`, `test_generation_gathers_once`; |
| | | Muon: `TestMuonIsNeverOffUnsaid` of `v1/optimizers/test_whole_parameters` |
| 8 | embeddings resized, adapters late | `TestLate` of `test_adapters`, |
| | | `test_resize_train_generate_save` of `clients/test_zero3_models` |
| 9 | adapters of another dtype | `TestDtypes` of `test_adapters` |
| 10 | wrappers that pass attributes on | `test_a_wrapper_that_passes_attributes_on` |
| 11 | frozen weights and recomputation | `test_frozen_blocks_that_are_recomputed`, |
| | | `test_frozen_behind_what_some_ranks_pass_by` of `test_uneven` |
| 12 | padding summed | the planted fault "padding is not zero" of `unit.verify`, |
| | | `TestPoison` of `test_training` |
| 13 | shards of another step | the planted fault "what is gathered stays over a step", |
| | | `TestCopiesAreNeverOld` and `test_memory` of `test_hybrid` |
| 14 | composite and packed models | `test_same_weights_as_without`, |
| | | `test_an_architecture_equals_plain_torch` of `clients/test_zero3_models` |
| 15 | loading | `test_each_rank_reads_what_it_owns` of `checkpoint/test_safetensors` |
| 16 | `generate()` slow, or hanging | `test_generation_gathers_once`, |
| | | `test_resize_train_generate_save`; a number of steps of each rank's own: |
| | | `test_every_kind_raises_on_all_ranks` of `test_divergence` |
| 17 | gathered memory kept | `test_nothing_is_whole_after_a_step...`, `test_memory_stays`, |
| | | `TestFailedGather` of `test_lifetimes` |
| 18 | saving whole, tied weights | `TestWhole` of `checkpoint/test_stage3` |
| 19 | buffers too small | `TestSameBits` and `TestCosts` of `offload/test_stage3_offload` |
| 20 | compiled models | `TestCompiled` of `test_training`, |
| | | `test_compiled_on_each_rank_by_its_branches` of `test_uneven` |
"""

from typing import Any

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.comm.watch import intent
from deepspeed.profiling.flops_profiler.report import get_module_params
from deepspeed.runtime.zero import GatheredParameters
from unit.common import DistributedTest
from unit.models import drawn, seeded
from unit.one_process import OneProcess, mean_square, of_all_ranks
from unit.v1.gathering import collectives
from unit.v1.zero.stage3.models import (
    LR,
    SHARDED,
    STEPS,
    Tensors,
    check_as_one_process,
    config_of,
    distance,
    engine_of,
    loss_of,
    make_net,
    reference,
    tokens_of,
    train,
    values_of,
)

WIDTH = 5
BOUNDED: dict[str, Any] = {**SHARDED, "stage3_max_reuse_distance": 0}


class Shuffled(nn.Module):
    """Blocks in an order, and as many, as `order` says."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.order: tuple[int, ...] = (0, 1, 2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = x + self.blocks[index](x).tanh()
        return x


class Experts(nn.Module):
    """One of several, chosen by the data."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.experts = Routed()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.experts(self.inlet(x))
        return out


class Routed(nn.Module):
    """Every rank may run another expert."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.each[int(x.detach().abs().sum() * 1000) % 3](x)
        return out


class Sometimes(nn.Module):
    """Gives back what it was given where the data wants nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, wanted: bool) -> torch.Tensor:
        return self.layer(x).tanh() if wanted else x


class Passing(nn.Module):
    """A layer that some ranks need nothing of, between others."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.between = Sometimes()
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wanted = bool(x.detach().sum() > 0)
        out: torch.Tensor = self.last(self.between(self.first(x), wanted))
        return out


class Wrapper(nn.Module):
    """Has every attribute of what it wraps."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args: Any) -> Any:
        return self.inner(*args)


def data_of(index: int, rank: int) -> torch.Tensor:
    return drawn(100 * index + rank, 4, WIDTH)


def one_process(model: nn.Module, orders: Any, steps: int = 5) -> Tensors:
    one = OneProcess(model, LR, mean_square)
    for step in range(steps):
        if orders:
            model.order = orders[step]  # type: ignore[assignment]  # of Shuffled
        one.step(of_all_ranks(data_of, step))
    return one.params()


def at_stage_3(model: nn.Module, orders: Any, steps: int = 5, **zero: Any) -> Tensors:
    engine = engine_of(model, config_of(3, 1, **zero))
    for step in range(steps):
        if orders:
            model.order = orders[step]  # type: ignore[assignment]  # of Shuffled
        engine.backward(engine(data_of(step, dist.get_rank())).square().mean())
        engine.step()
    engine.destroy()
    return values_of(model)


class TestRows(DistributedTest):
    world_size = 2

    def test_another_order_every_time(self) -> None:
        # Kills: an order that is trusted: a unit that is not there, or one that was gathered ahead
        # and is never let go.
        orders = ((0, 1, 2, 3), (3, 1, 0), (2, 2, 1, 3), (1,), (3, 2, 1, 0))
        wanted = one_process(seeded(Shuffled), orders)
        for zero in (SHARDED, BOUNDED, {**SHARDED, "stage3_prefetch_bucket_size": 40}):
            assert distance(at_stage_3(seeded(Shuffled), orders, **zero), wanted) < 1e-5, zero

    def test_experts_chosen_by_each_rank(self) -> None:
        # Kills: a unit per expert, which some ranks never enter.
        wanted = one_process(seeded(Experts), None)
        leaf = {**SHARDED, "leaf_module": {"classes": ["Routed"]}}
        assert distance(at_stage_3(seeded(Experts), None, **leaf), wanted) < 1e-5

    def test_a_leaf_that_some_ranks_pass_by(self) -> None:
        # Kills: a leaf that is gathered in backward only where something was computed with it,
        # while the others gather what comes next.
        taken = {step: {bool(data_of(step, r).sum() > 0) for r in (0, 1)} for step in range(5)}
        assert {True, False} in taken.values()
        wanted = one_process(seeded(Passing), None)
        leaf = {**BOUNDED, "leaf_module": {"classes": ["Sometimes"]}}
        intent.enable(timeout_s=10)
        try:
            assert distance(at_stage_3(seeded(Passing), None, **leaf), wanted) < 1e-5
        finally:
            intent.disable()

    def test_gathers_during_accumulation(self) -> None:
        # Kills: a gather that takes memory, or gradients, from an accumulation under way.
        model = make_net()
        engine = engine_of(model, config_of(3, **SHARDED))
        for index in range(2 * STEPS):
            loss = loss_of(engine, tokens_of(index, dist.get_rank()))
            with GatheredParameters([model.embed.weight, model.blocks[1].up.weight]):
                engine.backward(loss)
                assert model.blocks[1].up.weight.numel()
            engine.step()
            with GatheredParameters(model.parameters()):
                pass
        engine.destroy()
        assert distance(values_of(model), reference()) < 1e-5

    def test_frozen_blocks_that_are_recomputed(self) -> None:
        # Kills: a recomputation that finds the parameters of a frozen block gone.
        for recompute in (False, True):
            plain, model = make_net(), make_net(recompute=recompute)
            for net in (plain, model):
                net.blocks[0].requires_grad_(False)
                net.blocks[1].up.requires_grad_(False)
            engine = engine_of(model, config_of(3, 1, **BOUNDED))
            train(engine, 3, accumulation=1)
            engine.destroy()
            for step in range(3):
                plain.zero_grad()
                for rank in range(dist.get_world_size()):
                    (loss_of(plain, tokens_of(step, rank)) / dist.get_world_size()).backward()
                with torch.no_grad():
                    for param in plain.parameters():
                        if param.grad is not None:
                            param -= LR * param.grad
            assert distance(values_of(model), values_of(plain)) < 1e-5, recompute

    def test_a_wrapper_that_passes_attributes_on(self) -> None:
        # Kills: state that is looked for on modules, and found on the module inside.
        model = make_net()
        engine = engine_of(Wrapper(Wrapper(model)), config_of(3, **BOUNDED))
        train(engine)
        engine.destroy()
        check_as_one_process(model)

    def test_generation_gathers_once(self) -> None:
        # Kills: a gather for every token although the parameters are whole, numbers of
        # parameters that count placeholders.
        model = make_net()
        engine = engine_of(model, config_of(3, **BOUNDED))
        tokens = tokens_of(0, 0)
        with torch.no_grad(), GatheredParameters(model.parameters()):
            numel = sum(param.numel() for param in model.parameters())
            with collectives() as issued:
                outputs = [engine(tokens) for _ in range(3)]
        assert not issued and get_module_params(model) == numel
        assert all(torch.equal(output, make_net()(tokens)) for output in outputs)
        engine.destroy()

    def test_memory_stays(self) -> None:
        # Kills: memory of a pool that grows with the steps, or is kept for each unit.
        for zero, most in ((SHARDED, 8), (BOUNDED, 5)):
            engine = engine_of(make_net(depth=8), config_of(3, 1, **zero))
            whole = engine.parameter_offload.resources.whole
            sizes = []
            for step in range(6):
                train(engine, 1, accumulation=1, first=step)
                sizes.append(whole.num_bytes)
            assert len(set(sizes[1:])) == 1, sizes
            assert whole.num_bytes <= (most + 5) * max(
                unit.whole_bytes for unit in engine.parameter_offload.units
            )
            engine.destroy()

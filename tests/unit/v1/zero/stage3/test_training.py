"""Stage 3 trains as one process does, in all its modes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import DeepSpeedConfigError
from deepspeed import comm as dist
from deepspeed.comm.watch import intent
from deepspeed.profiling.flops_profiler.report import get_module_params
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.runtime.zero.gathering import gather_unit
from deepspeed.runtime.zero.gathering.saved_tensors import SavedTensors
from deepspeed.runtime.zero.parameters.zero_parameter import record_of
from unit.common import DistributedTest
from unit.models import seeded
from unit.one_process import OneProcess, mean_square, of_all_ranks
from unit.v1.gathering import collectives
from unit.v1.zero.stage3.models import (
    BOUNDED,
    LR,
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
    reference,
    same,
    started,
    tokens_of,
    train,
    trained,
    values_of,
)
from unit.v1.zero.stage3.test_uneven import WIDTH, Between, data_of

SETTINGS: tuple[dict[str, Any], ...] = (
    SHARDED,
    {},
    {**BOUNDED, "stage3_prefetch_bucket_size": 0},
    {**SHARDED, "stage3_prefetch_bucket_size": 100, "stage3_max_live_parameters": 60},
    {"stage3_param_persistence_threshold": 20, "reduce_bucket_size": 16},
    {**SHARDED, "overlap_comm": False, "allgather_partitions": False},
    {**SHARDED, "leaf_module": {"classes": ["Net"]}},
)


class TestTraining(DistributedTest):
    world_size = [1, 2, 3]

    def test_equals_one_process_and_stage_2(self) -> None:
        # Kills: a contribution lost or counted twice, padding that is summed, a stale gather, a
        # master that does not reach its shard.
        wanted, stage2 = reference(), trained(2)
        assert distance(stage2, wanted) < 1e-5
        # Every setting on two ranks or, unevenly cut, on three.
        settings = {1: SETTINGS[:1], 2: SETTINGS[::2], 3: SETTINGS[1::2]}
        for zero in settings[dist.get_world_size()]:
            found = trained(3, **zero)
            assert distance(found, wanted) < 1e-5, zero
            assert same(found, stage2), zero
        # Kills: recomputed activations that keep memory which is given to another unit.
        for recompute in (False, True) if dist.get_world_size() == 2 else ():
            found = trained(3, make_net(recompute=recompute), **SHARDED)
            assert distance(found, wanted) < 1e-5, recompute


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


class Routed(nn.Module):
    """Every rank may run another expert."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.each[int(x.detach().abs().sum() * 1000) % 3](x)
        return out


def make_experts() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Routed())


class DataDecides(Between):
    """A layer that some ranks need nothing of, between others."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # the data wants
        return super().forward(x, lambda place: bool(x.detach().sum() > 0))


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


ORDERS = ((0, 1, 2, 3), (3, 1, 0), (2, 2, 1, 3), (1,), (3, 2, 1, 0))


def one_process(model: Any) -> Tensors:
    one = OneProcess(model, LR, mean_square)
    for step in range(5):
        model.order = ORDERS[step]
        one.step(of_all_ranks(data_of, step))
    return one.params()


def at_stage_3(model: Any, **zero: Any) -> Tensors:
    engine = engine_of(model, config_of(3, 1, **zero))
    for step in range(5):
        model.order = ORDERS[step]
        engine.backward(engine(data_of(step, dist.get_rank())).square().mean())
        engine.step()
    engine.destroy()
    return values_of(model)


class TestOnTwoRanks(DistributedTest):
    world_size = 2

    def test_keys(self) -> None:
        # Kills: a key that is accepted and ignored, or does nothing.
        for key, value in (
            ("mics_hierarchical_params_gather", True),
            ("stage3_use_all_reduce_for_fetch_params", True),
            ("zero_quantized_weights", True),
        ):
            with pytest.raises(DeepSpeedConfigError, match=key.removeprefix("stage3_")):
                engine_of(make_net(), config_of(3, **{key: value}))
        with pytest.raises(DeepSpeedConfigError, match=r"verify\.poison.*stage 3 only"):
            engine_of(make_net(), {**config_of(2), "verify": {"poison": True}})

    def test_nothing_is_whole_after_a_step_and_other_ways_to_train(self) -> None:
        # Kills: a unit that stays after backward, an evaluation that makes the next step wrong.
        engine, model = started(**SHARDED)
        for step in range(STEPS):
            train(engine, 1, first=step)
            assert all(param.numel() == 0 for param in model.parameters())
            assert engine.parameter_offload.param_coordinator.live_numel == 0
            with torch.no_grad():
                engine.eval()(tokens_of(0, dist.get_rank()))
            engine.train()
            loss_of(engine, tokens_of(1, 0))  # a forward whose backward never comes
            assert all(not unit.holds for unit in engine.parameter_offload.units)
        end_as_one_process(engine)
        assert type(model.embed.weight) is nn.Parameter
        assert type(model.embed._parameters) is dict

        # Kills: memory of the first forward that the second one overwrites.
        def two(net: Any, at: tuple[int, int]) -> torch.Tensor:
            first, second = (loss_of(net, tokens_of(2 * at[0] + i, at[1])) for i in (0, 1))
            return first + 2 * second

        engine, model = started(1, **SHARDED)
        for step in range(STEPS):
            engine.backward(two(engine, (step, dist.get_rank())))
            engine.step()
        engine.destroy()
        wanted = OneProcess(make_net(), LR, two).train(lambda *at: at, STEPS)
        assert distance(values_of(model), wanted) < 1e-5
        # Kills: gradients lost while parameters are sharded, a backward that nobody announced.
        engine = engine_of(make_net(), config_of(3, **SHARDED))
        for step in range(STEPS):
            with engine.no_sync():
                loss_of(engine, tokens_of(2 * step, dist.get_rank())).backward()
            engine.tracker.advance()
            loss_of(engine, tokens_of(2 * step + 1, dist.get_rank())).backward()
            engine.step()
        end_as_one_process(engine)
        # Kills: memory that is made in inference mode, which training may not write to.
        engine = engine_of(make_net(), config_of(3, **SHARDED))
        for step in range(STEPS):
            with torch.inference_mode():
                engine.eval()(tokens_of(0, dist.get_rank()))
            engine.train()
            train(engine, 1, first=step)
        end_as_one_process(engine)
        # Kills: a ledger that takes placeholders for parameters, and so cries wolf or sees nothing;
        # masters on the host whose update does not come to the shards.
        checked = {**config_of(3, **SHARDED), "verify": {"ledger": True, "collectives": True}}
        on_host = {"stage3_param_persistence_threshold": 10, "offload_optimizer": {"device": "cpu"}}
        for config in (config_of(3, **on_host), checked):
            engine = engine_of(make_net(), config)
            train(engine)
            end_as_one_process(engine)

    def test_collectives_and_order_of_a_step(self) -> None:
        # Kills: a gather per parameter, a second gather of what is still whole, a reduction per
        # parameter group.
        model = make_net()
        trained = [param for param in model.parameters() if param.requires_grad]
        groups = [[p for p in trained if (p.dim() > 1) == is_matrix] for is_matrix in (True, False)]
        optimizer = torch.optim.SGD([{"params": group} for group in groups], lr=0.1)
        config = config_of(3, 1, **BOUNDED, allgather_partitions=False, reduce_scatter=False)
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        train(engine, 1, accumulation=1)
        with collectives() as issued:
            train(engine, 1, accumulation=1, first=1)
        units = engine.parameter_offload.units
        trainable = [unit for unit in units if any(p.requires_grad for p in unit.params)]
        # By broadcast: as many operations as ranks for each gather. The first block is used twice.
        assert issued.count("broadcast") <= 2 * (2 * len(units) + 2)
        assert issued.count("all_reduce") == len(trainable) + 1  # and the norm
        engine.destroy()
        # Kills: parameters that are dealt in turn, an order that no file of stage 3 has.
        orders = []
        for dealt in (False, True):
            engine = engine_of(make_net(), config_of(3, **SHARDED, round_robin_gradients=dealt))
            groups = range(len(engine.optimizer.groups))
            orders.append([engine.optimizer.masters.names(at) for at in groups])
            engine.destroy()
        assert orders[0] == orders[1]

    def test_leaves_what_it_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Kills: a unit that is let go more often than it was taken, or counted as whole without
        # being so, parameters that stay "read" by a block that was never entered.
        engine, model = started(**BOUNDED, stage3_prefetch_bucket_size=0)
        offload, original, left = engine.parameter_offload, gather_unit.gather_from_owners, [0]

        def gather(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                raise OSError("planted")
            return original(*args, **kwargs)

        monkeypatch.setattr(gather_unit, "gather_from_owners", gather)
        # `scale` is registered with a block, which has two units then.
        deepspeed.zero.register_external_parameter(model.blocks[1], model.scale.weight)
        for step in range(STEPS):
            for number in range(1, 7):
                left[0] = number
                with pytest.raises(OSError, match="planted"):
                    loss_of(engine, tokens_of(0, 0))
                with pytest.raises(OSError, match="planted"):
                    left[0] = 1
                    with GatheredParameters([model.embed.weight, model.scale.weight]):
                        raise AssertionError("the block ran")
                assert {unit.holds for unit in offload.units} == {0}, number
                assert {unit.num_read_apart for unit in offload.units} == {0}
                assert not any(record_of(param).readers for param in model.parameters())
            train(engine, 1, first=step)
            assert offload.param_coordinator.live_numel == 0
        end_as_one_process(engine)

    def test_what_is_let_go_is_nan(self) -> None:
        # Kills: a switch that poisons nothing, or memory that somebody still reads.
        zero = {"stage3_param_persistence_threshold": 10, "stage3_max_reuse_distance": 0}
        model = make_net(recompute=False)
        engine = engine_of(model, {**config_of(3, **zero), "verify": {"poison": True}})
        kept: dict[str, torch.Tensor] = {}
        block = model.blocks[0]
        hook = block.up.register_forward_hook(
            lambda module, args, output: kept.update(block=module.weight.data)
        )
        train(engine, 1)
        hook.remove()
        with GatheredParameters([model.scale.weight, model.embed.weight]):
            kept["script"] = model.embed.weight.data
            assert not kept["script"].isnan().any()
        assert all(tensor.isnan().all() for tensor in kept.values()), kept
        pool = engine.parameter_offload.resources.pool.by_pointer.values()
        assert pool and all(buffer.tensor.isnan().all() for buffer in pool)
        kept["small"] = model.blocks[0].norm.weight.data  # persists
        assert not kept["small"].isnan().any()
        engine.offload_states()
        assert kept["small"].isnan().all()
        engine.reload_states()
        train(engine, 1, first=1)
        end_as_one_process(engine)

    def test_nothing_is_packed_where_all_persists(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Kills: hooks on all that autograd saves, in a model of which nothing goes.
        monkeypatch.delattr(SavedTensors, "hooks")
        engine, _ = started()
        train(engine)
        end_as_one_process(engine)

    def test_another_order_every_time(self) -> None:
        # Kills: an order that is trusted: a unit that is not there, or one that was gathered ahead
        # and is never let go.
        wanted = one_process(seeded(Shuffled))
        for zero in (SHARDED, BOUNDED, {**SHARDED, "stage3_prefetch_bucket_size": 40}):
            assert distance(at_stage_3(seeded(Shuffled), **zero), wanted) < 1e-5, zero

    def test_experts_chosen_by_each_rank_and_a_leaf_that_some_pass_by(self) -> None:
        # Kills: a unit per expert, which some ranks never enter.
        wanted = one_process(seeded(make_experts))
        leaf = {**SHARDED, "leaf_module": {"classes": ["Routed"]}}
        assert distance(at_stage_3(seeded(make_experts), **leaf), wanted) < 1e-5
        # Kills: a leaf that is gathered in backward only where something was computed with it,
        # while the others gather what comes next.
        taken = {step: {bool(data_of(step, r).sum() > 0) for r in (0, 1)} for step in range(5)}
        assert {True, False} in taken.values()
        wanted = one_process(seeded(DataDecides))
        leaf = {**BOUNDED, "leaf_module": {"classes": ["Passing"]}}
        intent.enable(timeout_s=10)
        try:
            assert distance(at_stage_3(seeded(DataDecides), **leaf), wanted) < 1e-5
        finally:
            intent.disable()

    def test_gathers_during_accumulation_and_frozen_blocks_that_are_recomputed(self) -> None:
        # Kills: a gather that takes memory, or gradients, from an accumulation under way.
        engine, model = started(**SHARDED)
        for index in range(2 * STEPS):
            loss = loss_of(engine, tokens_of(index, dist.get_rank()))
            with GatheredParameters([model.embed.weight, model.blocks[1].up.weight]):
                engine.backward(loss)
                assert model.blocks[1].up.weight.numel()
            engine.step()
            with GatheredParameters(model.parameters()):
                pass
        end_as_one_process(engine)
        # Kills: a recomputation that finds the parameters of a frozen block gone.
        for recompute in (False, True):
            plain, model = make_net(), make_net(recompute=recompute)
            for net in (plain, model):
                net.blocks[0].requires_grad_(False)
                net.blocks[1].up.requires_grad_(False)
            engine = engine_of(model, config_of(3, 1, **BOUNDED))
            train(engine, 3, accumulation=1)
            engine.destroy()
            wanted = OneProcess(plain, LR, loss_of).train(tokens_of, 3)
            assert distance(values_of(model), wanted) < 1e-5, recompute

    def test_attributes_passed_on_and_generation_gathers_once(self) -> None:
        # Kills: state that is looked for on modules, and found on the module inside.
        model = make_net()
        engine = engine_of(Wrapper(Wrapper(model)), config_of(3, **BOUNDED))
        train(engine)
        engine.destroy()
        check_as_one_process(model)
        # Kills: a gather for every token although the parameters are whole, numbers of
        # parameters that count placeholders.
        engine, model = started(**BOUNDED)
        tokens = tokens_of(0, 0)
        with torch.no_grad(), GatheredParameters(model.parameters()):
            numel = sum(param.numel() for param in model.parameters())
            with collectives() as issued:
                outputs = [engine(tokens) for _ in range(3)]
        assert not issued and get_module_params(model) == numel
        assert all(torch.equal(output, make_net()(tokens)) for output in outputs)

    def test_memory_stays(self) -> None:
        # Kills: memory of a pool that grows with the steps, or is kept for each unit.
        for zero, most in ((SHARDED, 8), (BOUNDED, 5)):
            engine = engine_of(make_net(depth=8), config_of(3, 1, **zero))
            pool = engine.parameter_offload.resources.pool
            sizes = []
            for step in range(4):
                train(engine, 1, accumulation=1, first=step)
                sizes.append(pool.num_bytes)
            assert len(set(sizes[1:])) == 1, sizes
            assert pool.num_bytes <= (most + 5) * max(
                unit.whole_bytes for unit in engine.parameter_offload.units
            )
            engine.destroy()

"""Tiny layers at stage 3, gathered together: as one process, few collectives, bounded memory."""

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepspeed
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import set_z3_leaf_modules
from deepspeed.verify import check_streams
from unit.common import DistributedTest
from unit.models import drawn, linears, seeded
from unit.one_process import OneProcess, go_through, mean_square
from unit.v1.gathering import collectives
from unit.v1.zero.stage3.models import (
    LR,
    SHARDED,
    STEPS,
    Tensors,
    config_of,
    distance,
    engine_of,
    values_of,
)

WIDTH = 5
LAYERS = 16
# A tiny layer has 30 elements and is small, the wide one is not; twelve tiny ones fill a unit.
FUSED: dict[str, Any] = {"stage3_param_persistence_threshold": 0, "stage3_unit_fusion_size": 360}
BOUNDED: dict[str, Any] = {**FUSED, "stage3_max_reuse_distance": 0}
ON_HOST = {name: {"device": "cpu"} for name in ("offload_param", "offload_optimizer")}
SETTINGS: tuple[dict[str, Any], ...] = (
    FUSED,
    BOUNDED,
    {**BOUNDED, "stage3_prefetch_bucket_size": 400, "stage3_max_live_parameters": 400},
    {**FUSED, "stage3_unit_fusion_size": 800_000},
    {**BOUNDED, "stage3_module_granularity_threshold": 30},
    {**BOUNDED, **ON_HOST},
)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3), nn.Linear(3, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.up(x).relu())
        return out


class Many(nn.Module):
    """Tiny layers, of which some are frozen, unused, tied, used twice or read by others; recomputed
    (`use_reentrant`) one by one or `at_once`.
    """

    def __init__(self, recompute: bool | None = None, at_once: bool = False) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 12 * WIDTH)
        self.narrow = nn.Linear(12 * WIDTH, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
        self.pair = Pair()
        self.layers[3].requires_grad_(False)
        self.layers[13].weight = self.layers[2].weight
        self.register_buffer("shift", torch.ones(WIDTH))
        self.recompute, self.at_once = recompute, at_once
        self.order = list(range(LAYERS - 1))  # the last is not used

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.at_once:
            return self._layers(x)
        out: torch.Tensor = checkpoint(self._layers, x, use_reentrant=self.recompute)
        return out

    def _layers(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.wide(x)
        for index in [*self.order, self.order[0]]:
            x = x + self._run(self.layers[index], x).tanh()
            if index == 11:
                x = x + self.narrow(wide)
            if index == 14:
                x = x * self.layers[5].weight[0] + self.shift
        out: torch.Tensor = self.pair(x)
        return out

    def _run(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self.recompute is None or self.at_once:
            return layer(x)  # type: ignore[no-any-return]  # a module's result
        out: torch.Tensor = checkpoint(layer, x, use_reentrant=self.recompute)
        return out


def make_many(**kwargs: Any) -> Many:
    return seeded(Many, **kwargs)


def loss_of(model: Any, index: int, rank: int) -> torch.Tensor:
    """Other data on each rank; its layers run in another order in every fourth micro-batch."""
    inner = model.module if hasattr(model, "module") else model
    inner.order.sort(reverse=index % 4 == 2)
    # Reentrant checkpoints have no gradient otherwise.
    x = drawn(100 * index + rank, 4, WIDTH)
    x.requires_grad_(inner.recompute is True or index % 2 == 0)
    return mean_square(model, x)


def train(engine: Any, steps: int = STEPS, first: int = 0) -> None:
    numbers = range(2 * first, 2 * (first + steps))
    go_through(engine, numbers, lambda model, i: loss_of(model, i, dist.get_rank()))


def trained(stage: int, model: nn.Module | None = None, **zero: Any) -> Tensors:
    model = make_many() if model is None else model
    engine = engine_of(model, config_of(stage, **zero))
    train(engine)
    engine.destroy()
    return values_of(model)


def reference() -> Tensors:
    one = OneProcess(make_many(), LR, lambda model, at: loss_of(model, *at))
    return one.train(lambda *at: at, STEPS, 2)


class TestTraining(DistributedTest):
    world_size = [2, 3]

    def test_equals_one_process_and_stage_2(self) -> None:
        # Kills: a unit that goes while one of its modules still runs, or that is whole for the
        # first of them only; memory that the backward of the next module reads when it is gone;
        # gradients that are sent when the first of its modules is done.
        wanted, stage2 = reference(), trained(2)
        assert distance(stage2, wanted) < 1e-5
        # Every setting on some number of ranks.
        for zero in SETTINGS[dist.get_world_size() - 2 :: 2]:
            found = trained(3, **zero)
            assert distance(found, wanted) < 1e-5, zero
            if "offload_optimizer" not in zero:
                assert all(torch.equal(found[name], stage2[name]) for name in found), zero
        recompute = dist.get_world_size() == 2
        found = trained(3, make_many(recompute=recompute), **BOUNDED)
        assert distance(found, wanted) < 1e-5
        # Kills: a unit that goes, or one use of it, while what its recomputation saved is needed.
        model = make_many(recompute=recompute, at_once=True)
        engine = engine_of(model, {**config_of(3, **BOUNDED), "verify": {"poison": True}})
        train(engine)
        engine.destroy()
        assert distance(dict(model.named_parameters()), wanted) < 1e-5


class TestSteps(DistributedTest):
    world_size = 2

    def test_streams_and_a_module_on_its_own_stream(self) -> None:
        # Kills: a module that reads what another stream has gathered without waiting for it,
        # memory or shards on the host that are written while they are read.
        wanted = trained(3, **BOUNDED)
        with simulate(backward_streams=2), check_streams():
            assert distance(trained(3, **{**BOUNDED, **ON_HOST}), wanted) < 1e-5
        # Kills: a module that finds its unit whole and does not wait for what made it so.
        with simulate() as device, check_streams():
            engine = engine_of(Beside(), config_of(3, 1, **BOUNDED))
            with torch.no_grad():
                engine.eval()(torch.ones(2, WIDTH))
            device.synchronize()
            engine.destroy()

    def test_between_steps_and_a_lent_parameter(self) -> None:
        # Kills: a unit that stays after a forward without backward, after an evaluation or a
        # script, an edit of one of its parameters that gathers of the others do not see.
        model = make_many()
        engine = engine_of(model, config_of(3, **FUSED))
        coordinator = engine.parameter_offload.param_coordinator
        plain = make_many()
        train(engine, 1)
        for step in range(1, 3):
            with torch.no_grad():
                engine.eval()(torch.ones(1, WIDTH))
                assert coordinator.live_numel == 0
                model.layers[1](torch.ones(1, WIDTH))  # one of its modules alone
                assert coordinator.live_numel == 0
            engine.train()
            engine(torch.ones(1, WIDTH))
            train(engine, 1, first=step)
            assert coordinator.live_numel == 0
            assert all(param.numel() == 0 for param in model.parameters())
        with GatheredParameters(model.layers[7].weight, modifier_rank=1):
            model.layers[7].weight.data.fill_(0.125)
        with GatheredParameters(model.parameters()):
            plain.load_state_dict(model.state_dict())
            assert plain.layers[7].weight.unique().tolist() == [0.125]
        with torch.no_grad():
            inputs = torch.ones(2, WIDTH)
            plain.order = list(model.order)
            assert torch.equal(engine.eval()(inputs), plain(inputs))

        # Kills: a unit that is given away although a module has returned a view of it.
        class Lends(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(WIDTH, WIDTH)

            def forward(self) -> torch.Tensor:
                return self.layer.weight[1:]

        class Borrows(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.lends = nn.ModuleList([Lends(), Lends()])
                self.wide = nn.ModuleList([nn.Linear(WIDTH, 12 * WIDTH) for _ in range(2)])

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                lent = self.lends[0]()
                x = sum(wide(x)[:, :WIDTH] for wide in self.wide)
                out: torch.Tensor = x @ lent.t()
                return out

        model = seeded(Borrows)
        x = torch.ones(2, WIDTH)
        wanted = model(x).detach()
        engine = engine_of(model, {**config_of(3, **BOUNDED), "verify": {"poison": True}})
        for _ in range(2):
            found = engine(x)
            assert torch.equal(found.detach(), wanted)
            found.sum().backward()
            engine.zero_grad()

    def test_collectives_and_names(self) -> None:
        # Kills: a gather or a reduction for each layer, a unit that is gathered again when its
        # next module runs, a report that does not say which modules it is about.
        for zero, recompute in (
            (FUSED, None),
            (BOUNDED, None),
            (BOUNDED, False),
            ({**FUSED, **ON_HOST}, None),
        ):
            model = make_many(recompute=recompute)
            # One broadcast per rank is a gather.
            by_names = {"allgather_partitions": False, "reduce_scatter": False}
            engine = engine_of(model, config_of(3, 1, **zero, **by_names))
            units = engine.parameter_offload.units
            fused = [unit for unit in units if unit.is_fused]
            assert [unit.label for unit in fused] == [
                "the gather of layers.0 to layers.11",
                "the gather of layers.12 to pair.down",
            ]
            order = list(range(LAYERS - 1))
            for step in range(3):
                model.order = list(order)
                with collectives() as issued:
                    engine.backward(model_loss(engine, step))
                    engine.step()
                gathers = issued.count("broadcast") / dist.get_world_size()
                if step:
                    # The first layers' unit three times: layer 5's weight is read beside the
                    # others, which then go on, and layer 0 runs once more.
                    assert gathers <= 2 * (len(units) + 3) + 1, (zero, gathers)
                    assert issued.count("all_reduce") == len(units) + 1  # and the norm
            engine.destroy()


def model_loss(model: Any, step: int) -> torch.Tensor:
    loss: torch.Tensor = model(torch.full((2, WIDTH), 0.5 + step)).square().mean()
    return loss


class Beside(nn.Module):
    """Two layers of one unit, the second on a stream that has begun before the first."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 12 * WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        accelerator = get_accelerator()
        main, side = accelerator.current_stream(), accelerator.Stream()
        x = self.wide(x)[:, :WIDTH]
        copied = x.clone()
        side.wait_stream(main)
        here = self.layers[0](x)
        with accelerator.stream(side):
            there = self.layers[1](copied)
        main.wait_stream(side)
        out: torch.Tensor = here + there
        side.wait_stream(main)  # what it has made goes back to it
        return out


class Shifted(nn.Linear):
    """A layer with a frozen parameter of another dtype."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.shift = nn.Parameter(torch.ones(WIDTH, dtype=torch.bfloat16), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (super().forward(x) + self.shift).tanh()


class TestBounds(DistributedTest):
    world_size = 1

    def test_memory_stays_one_at_a_time_and_granularity(self) -> None:
        # Kills: a pool, a list or a table that grows with the steps.
        engine = engine_of(make_many(), config_of(3, 1, **BOUNDED))
        shared = engine.parameter_offload.resources
        held = []
        for step in range(16):
            engine.backward(model_loss(engine, step % 3))
            engine.step()
            if step in (6, 15):
                gc.collect()
                objects = sum(isinstance(found, torch.Tensor) for found in gc.get_objects())
                held.append((shared.pool.num_bytes, objects))
        assert held[0] == held[1], held
        # Kills: a unit that stays whole when the next one is used, in forward or in backward.
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        engine = engine_of(model, config_of(3, 1, **BOUNDED))
        offload = engine.parameter_offload
        assert [unit.numel for unit in offload.units] == [360, 120]
        live: list[int] = []

        def look(*_: Any) -> None:
            live.append(sum(unit.numel for unit in offload.units if unit.is_whole))

        for layer in model:
            layer.register_forward_pre_hook(look)
            layer.register_forward_hook(lambda layer, args, out: out.register_hook(look) and None)
        engine.backward(engine(torch.ones(2, WIDTH)).square().mean())
        assert len(live) == 2 * LAYERS and max(live) == 360, live
        engine.destroy()
        # Kills: a threshold that is compared with a module's elements, or that marks containers.
        units_of = {}
        for threshold in (1, 14, 40):
            zero = {**FUSED, "stage3_unit_fusion_size": 0}
            zero["stage3_module_granularity_threshold"] = threshold
            engine = engine_of(make_many(), config_of(3, **zero))
            units_of[threshold] = [unit.name for unit in engine.parameter_offload.units]
            engine.destroy()
        # 38 elements in 3 modules, 1,158 in 23.
        assert "pair.up" in units_of[1] and len(units_of[1]) == 2 + LAYERS + 2
        assert "pair" in units_of[14] and len(units_of[14]) == 2 + LAYERS + 1
        assert units_of[40][-1] == "pair" and "layers.0" in units_of[40]
        model = make_many()
        set_z3_leaf_modules(model, [Many])
        engine = deepspeed.initialize(model=model, config=config_of(3, **FUSED))[0]
        assert [unit.name for unit in engine.parameter_offload.units] == [""]

    def test_keys_and_two_dtypes(self) -> None:
        # Kills: a key that is accepted and ignored, a unit larger than what may be gathered ahead,
        # reduced at once or whole at a time; a marked module that is divided.
        for zero, largest in (
            (FUSED, 12 * 30),
            ({**FUSED, "stage3_prefetch_bucket_size": 240}, 240),
            ({**FUSED, "reduce_bucket_size": 250}, 240),
            ({**FUSED, "stage3_max_live_parameters": 269}, 240),
            ({**FUSED, "stage3_unit_fusion_size": 0}, 30),
            ({"stage3_param_persistence_threshold": 0}, 360 + 305 + (LAYERS - 1) * 30 + 5 + 38),
        ):
            engine = engine_of(make_many(), config_of(3, **zero))
            units = engine.parameter_offload.units
            found = max(unit.numel for unit in units if unit.name not in ("wide", "narrow"))
            assert found == largest, (zero, found)
            engine.destroy()
        engine = engine_of(make_many(), config_of(3))
        assert not engine.parameter_offload.units  # everything small stays whole
        engine.destroy()
        # Kills: two units of the same modules that make each other go.
        model = nn.Sequential(*(Shifted() for _ in range(8)))
        engine = engine_of(model, config_of(3, 1, **BOUNDED))
        gathers: list[str] = []
        for unit in engine.parameter_offload.units:
            unit.start = lambda start=unit.start, unit=unit: (  # type: ignore[method-assign]  # counts
                None if unit.is_whole or unit.is_on_its_way else gathers.append(unit.name),
                start(),
            )
        for step in range(3):
            gathers.clear()
            engine.backward(engine(torch.ones(2, WIDTH)).square().mean())
            engine.step()
            # Those that backward uses first stay from the second step on: the order is known then.
            assert len(gathers) == (4 if step == 0 else 3), gathers


class TestOneRank(DistributedTest):
    world_size = 1

    def test_the_shard_is_what_is_whole(self) -> None:
        # Kills: rows and whole memory beside the only rank's shard; autograd that keeps what is
        # let go; an edit that nobody would write to the masters and that stays in the shard.
        model, plain = linears(3, 8), OneProcess(linears(3, 8), LR, mean_square)
        engine = engine_of(model, config_of(3, 1, **SHARDED, stage3_max_reuse_distance=0))
        seen = set()

        def edit(layer: nn.Module, _: Any) -> None:
            before = layer.weight.data.clone()
            with pytest.raises(RuntimeError, match="changed inside"):
                with GatheredParameters(layer.weight):
                    layer.weight.data.mul_(2)
            with GatheredParameters(layer.weight, discard=True):
                layer.weight.data.mul_(2)
            assert torch.equal(layer.weight, before)

        model[1].register_forward_pre_hook(edit)
        for layer in model:
            layer.register_forward_hook(lambda layer, *_: seen.add(layer.weight.data_ptr()))
        for step in range(STEPS):
            engine.backward(mean_square(engine, drawn(step, 4, 8)))
            engine.step()
            plain.step([drawn(step, 4, 8)])
        assert seen == {layer.weight.ds_tensor.data_ptr() for layer in model}
        assert not engine.parameter_offload.resources.pool.by_pointer
        engine.offload_states()
        engine.reload_states()
        engine.backward(mean_square(engine, drawn(STEPS, 4, 8)))
        engine.step()
        plain.step([drawn(STEPS, 4, 8)])
        engine.destroy()
        assert all(map(torch.equal, model.parameters(), plain.model.parameters()))

    def test_an_update_waits_for_what_reads_the_shard(self) -> None:
        # Kills: shards that are written while a stream beside still reads them.
        with simulate() as device, check_streams():
            engine = engine_of(linears(3, 8), config_of(3, 1, **SHARDED))
            side = device.Stream()
            for step in range(STEPS):
                engine.backward(mean_square(engine, drawn(step, 4, 8)))
                side.wait_stream(device.current_stream())
                with torch.no_grad(), device.stream(side):
                    engine(drawn(9, 4, 8))
                engine.step()
            engine.destroy()

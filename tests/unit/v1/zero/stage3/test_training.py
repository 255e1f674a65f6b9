"""Training at stage 3 against one process, and against stage 2 bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import DeepSpeedConfigError
from deepspeed import comm as dist
from unit.common import DistributedTest
from unit.one_process import OneProcess
from unit.v1.gathering import collectives
from unit.v1.zero.stage3.models import (
    LR,
    SHARDED,
    STEPS,
    config_of,
    distance,
    end_as_one_process,
    engine_of,
    loss_of,
    make_net,
    reference,
    tokens_of,
    train,
    trained,
    values_of,
)

SETTINGS: tuple[dict[str, Any], ...] = (
    SHARDED,
    {},
    {**SHARDED, "stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0},
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
            assert all(torch.equal(found[name], stage2[name]) for name in found), zero

    @pytest.mark.world_size(2)
    def test_recomputation(self) -> None:
        # Kills: recomputed activations that keep memory which is given to another unit.
        wanted = reference()
        for recompute in (False, True):
            found = trained(3, make_net(recompute=recompute), **SHARDED)
            assert distance(found, wanted) < 1e-5, recompute


class TestSteps(DistributedTest):
    world_size = 2

    def test_nothing_is_whole_after_a_step_or_an_evaluation(self) -> None:
        # Kills: a unit that stays after backward, an evaluation that makes the next step wrong.
        model = make_net()
        engine = engine_of(model, config_of(3, **SHARDED))
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

    def test_round_robin_gradients_has_no_effect(self) -> None:
        # Kills: parameters that are dealt in turn, an order that no file of stage 3 has.
        orders = []
        for dealt in (False, True):
            engine = engine_of(make_net(), config_of(3, **SHARDED, round_robin_gradients=dealt))
            groups = range(len(engine.optimizer.groups))
            orders.append([engine.optimizer.masters.names(at) for at in groups])
            engine.destroy()
        assert orders[0] == orders[1]

    def test_several_forwards_one_backward(self) -> None:
        # Kills: memory of the first forward that the second one overwrites.
        def two(net: Any, at: tuple[int, int]) -> torch.Tensor:
            first, second = (loss_of(net, tokens_of(2 * at[0] + i, at[1])) for i in (0, 1))
            return first + 2 * second

        model = make_net()
        engine = engine_of(model, config_of(3, 1, **SHARDED))
        for step in range(STEPS):
            engine.backward(two(engine, (step, dist.get_rank())))
            engine.step()
        engine.destroy()
        wanted = OneProcess(make_net(), LR, two).train(lambda *at: at, STEPS)
        assert distance(values_of(model), wanted) < 1e-5

    def test_no_sync_and_plain_backward(self) -> None:
        # Kills: gradients lost while parameters are sharded, a backward that nobody announced.
        model = make_net()
        engine = engine_of(model, config_of(3, **SHARDED))
        for step in range(STEPS):
            with engine.no_sync():
                loss_of(engine, tokens_of(2 * step, dist.get_rank())).backward()
            engine.tracker.advance()
            loss_of(engine, tokens_of(2 * step + 1, dist.get_rank())).backward()
            engine.step()
        end_as_one_process(engine)

    def test_collectives_of_a_step(self) -> None:
        # Kills: a gather per parameter, a second gather of what is still whole, a reduction per
        # parameter group.
        model = make_net()
        optimizer = torch.optim.SGD(
            [
                {"params": [p for p in model.parameters() if p.requires_grad and p.dim() > 1]},
                {"params": [p for p in model.parameters() if p.requires_grad and p.dim() == 1]},
            ],
            lr=0.1,
        )
        config = config_of(3, 1, **SHARDED, allgather_partitions=False, reduce_scatter=False)
        config["zero_optimization"] |= {"stage3_max_reuse_distance": 0}
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        train(engine, 1, accumulation=1)
        with collectives() as issued:
            train(engine, 1, accumulation=1, first=1)
        units = engine.parameter_offload.units
        trainable = [u for u in units if any(p.requires_grad for p in u.params)]
        # By broadcast: as many operations as ranks for each gather. The first block is used twice.
        assert issued.count("broadcast") <= 2 * (2 * len(units) + 2)
        assert issued.count("all_reduce") == len(trainable) + 1  # and the norm
        engine.destroy()


class TestRefusals(DistributedTest):
    world_size = 1

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("mics_hierarchical_params_gather", True),
            ("stage3_use_all_reduce_for_fetch_params", True),
            ("offload_param", {"device": "nvme"}),
            ("zero_quantized_weights", True),
        ],
    )
    def test_keys(self, key: str, value: Any) -> None:
        # Kills: a key that is accepted and ignored.
        with pytest.raises(DeepSpeedConfigError, match=key.removeprefix("stage3_")):
            engine_of(make_net(), config_of(3, **{key: value}))

    def test_an_engine_that_only_evaluates_hands_the_model_on(self) -> None:
        # Kills: hooks of the first engine that gather its old shards.
        model = make_net()
        first = deepspeed.initialize(model=model, config=config_of(3, **SHARDED))
        with torch.no_grad():
            before = first[0](tokens_of(0, 0))
            assert torch.equal(before, make_net()(tokens_of(0, 0)))
        engine = engine_of(model, config_of(3, **SHARDED))
        train(engine)
        end_as_one_process(engine)

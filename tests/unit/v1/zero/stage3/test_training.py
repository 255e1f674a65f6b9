"""Stage 3 trains as one process does, in all its modes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import DeepSpeedConfigError
from deepspeed import comm as dist
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.runtime.zero.gathering import gather_unit
from deepspeed.runtime.zero.parameters.zero_parameter import record_of
from unit.common import DistributedTest
from unit.one_process import OneProcess
from unit.v1.gathering import collectives
from unit.v1.zero.stage3.models import (
    LR,
    SHARDED,
    STEPS,
    check_as_one_process,
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


class TestModes(DistributedTest):
    world_size = 2

    def test_inference_mode_between_steps(self) -> None:
        # Kills: memory that is made in inference mode, which training may not write to.
        model = make_net()
        engine = engine_of(model, config_of(3, **SHARDED))
        for step in range(STEPS):
            with torch.inference_mode():
                engine.eval()(tokens_of(0, dist.get_rank()))
            engine.train()
            train(engine, 1, first=step)
        end_as_one_process(engine)

    def test_gradients_are_checked(self) -> None:
        # Kills: a ledger that takes placeholders for parameters, and so cries wolf or sees nothing.
        config: dict[str, Any] = config_of(3, **SHARDED)
        config["verify"] = {"ledger": True, "collectives": True}
        model = make_net()
        engine = engine_of(model, config)
        train(engine)
        end_as_one_process(engine)

    def test_optimizer_on_the_host(self) -> None:
        # Kills: masters on the host whose update does not come to the shards.
        config = config_of(
            3, stage3_param_persistence_threshold=10, offload_optimizer={"device": "cpu"}
        )
        model = make_net()
        engine = engine_of(model, config)
        train(engine)
        end_as_one_process(engine)


class TestCompiled(DistributedTest):
    world_size = 2

    def test_same_gradients(self) -> None:
        # Kills: gathers that are traced into a graph, memory of parameters that a compiled
        # backward reads after it was given to another unit, a forward that stays compiled.
        bounded = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
        for zero, recompute in ((bounded, None), (bounded, False), ({}, None)):
            models = [make_net(recompute=recompute) for _ in range(2)]
            for model, compiled in zip(models, (False, True), strict=True):
                engine = engine_of(model, config_of(3, **zero))
                if compiled:
                    engine.compile(backend="aot_eager", compile_kwargs={"fullgraph": True})
                    # Where all persists, no hook is in the way of one graph.
                    parts = set(model.blocks) if zero else {model}
                    assert {m for m in model.modules() if "forward" in vars(m)} == parts
                train(engine)
                engine.destroy()
                assert not any("forward" in vars(module) for module in model.modules())
            assert all(map(torch.equal, *(model.parameters() for model in models))), zero
            check_as_one_process(models[1])


class TestFailedGather(DistributedTest):
    world_size = 2

    def test_leaves_what_it_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Kills: a unit that is let go more often than it was taken, or counted as whole without
        # being so, parameters that stay "read" by a block that was never entered.
        zero = {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
        model = make_net()
        engine = engine_of(model, config_of(3, **SHARDED, **zero))
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


class TestPoison(DistributedTest):
    world_size = 2

    def test_what_is_let_go_is_nan(self) -> None:
        # Kills: a switch that poisons nothing, or memory that somebody still reads.
        config: dict[str, Any] = config_of(
            3, stage3_param_persistence_threshold=10, stage3_max_reuse_distance=0
        )
        config["verify"] = {"poison": True}
        model = make_net(recompute=False)
        engine = engine_of(model, config)
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
        rows = engine.parameter_offload.resources.rows.by_pointer.values()
        assert rows and all(buffer.tensor.isnan().all() for buffer in rows)
        kept["small"] = model.blocks[0].norm.weight.data  # persists
        assert not kept["small"].isnan().any()
        engine.offload_states()
        assert kept["small"].isnan().all()
        engine.reload_states()
        train(engine, 1, first=1)
        end_as_one_process(engine)

    def test_only_at_stage_3(self) -> None:
        # Kills: a switch that is accepted and does nothing.
        with pytest.raises(DeepSpeedConfigError, match=r"verify\.poison.*stage 3 only"):
            engine_of(make_net(), {**config_of(2), "verify": {"poison": True}})

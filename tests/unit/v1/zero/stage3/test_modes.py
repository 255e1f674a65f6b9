"""Stage 3 together with modes of torch and with the checks that users switch on."""

from typing import Any

import pytest
import torch

import deepspeed
from deepspeed import DeepSpeedConfigError
from deepspeed import comm as dist
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.runtime.zero.gathering import gather_unit
from deepspeed.runtime.zero.parameters.zero_parameter import record_of
from unit.common import DistributedTest
from unit.v1.zero.stage3.models import (
    SHARDED,
    STEPS,
    check_as_one_process,
    config_of,
    end_as_one_process,
    engine_of,
    loss_of,
    make_net,
    tokens_of,
    train,
)


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

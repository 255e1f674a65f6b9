"""Training at stage 3 against one process, and against stage 2 bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.comm.watch.observation import add_observer, remove_observer
from unit.common import DistributedTest
from unit.v1.zero.stage3.models import (
    SHARDED,
    STEPS,
    check_as_one_process,
    config_of,
    distance,
    engine_of,
    loss_of,
    make_net,
    reference,
    tokens_of,
    train,
    trained,
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


class Counter:
    """Counts collectives by name."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def run(self, call: Any, proceed: Any) -> Any:
        """See `deepspeed.comm.watch.observation`."""
        self.counts[call.name] = self.counts.get(call.name, 0) + 1
        return proceed()


class TestTraining(DistributedTest):
    """Tied, frozen, unused and external parameters; a block that is used twice."""

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
    """What happens between and inside steps."""

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
        engine.destroy()
        wanted = reference()
        assert distance({n: p.detach() for n, p in model.named_parameters()}, wanted) < 1e-5
        assert type(model.embed.weight) is nn.Parameter
        assert type(model.embed._parameters) is dict

    def test_round_robin_gradients_has_no_effect(self) -> None:
        # Kills: parameters that are dealt in turn, an order that no file of stage 3 has.
        orders = []
        for dealt in (False, True):
            zero = {**SHARDED, "round_robin_gradients": dealt}
            engine = engine_of(make_net(), config_of(3, **zero))
            orders.append(
                [engine.optimizer.masters.names(at) for at in range(len(engine.optimizer.groups))]
            )
            engine.destroy()
        assert orders[0] == orders[1]

    def test_several_forwards_one_backward(self) -> None:
        # Kills: memory of the first forward that the second one overwrites.
        model, plain = make_net(), make_net()
        engine = engine_of(model, config_of(3, 1, **SHARDED))
        for step in range(STEPS):
            losses = [loss_of(engine, tokens_of(2 * step + i, dist.get_rank())) for i in (0, 1)]
            engine.backward(losses[0] + 2 * losses[1])
            engine.step()
            for rank in (0, 1):
                ours = [loss_of(plain, tokens_of(2 * step + i, rank)) for i in (0, 1)]
                ((ours[0] + 2 * ours[1]) / 2).backward()
            with torch.no_grad():
                for param in plain.parameters():
                    if param.grad is not None:
                        param -= 0.5 * param.grad
                        param.grad = None
        engine.destroy()
        wanted = {name: param.detach() for name, param in plain.named_parameters()}
        assert distance({n: p.detach() for n, p in model.named_parameters()}, wanted) < 1e-5

    def test_no_sync_and_plain_backward(self) -> None:
        # Kills: gradients lost while parameters are sharded, a backward that nobody announced.
        wanted = reference()
        model = make_net()
        engine = engine_of(model, config_of(3, **SHARDED))
        for step in range(STEPS):
            with engine.no_sync():
                loss_of(engine, tokens_of(2 * step, dist.get_rank())).backward()
            engine.tracker.advance()
            loss_of(engine, tokens_of(2 * step + 1, dist.get_rank())).backward()
            engine.step()
        engine.destroy()
        assert distance({n: p.detach() for n, p in model.named_parameters()}, wanted) < 1e-5

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
        import deepspeed

        config = config_of(3, 1, **SHARDED, allgather_partitions=False, reduce_scatter=False)
        config["zero_optimization"] |= {"stage3_max_reuse_distance": 0}
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        train(engine, 1, accumulation=1)
        counter = Counter()
        add_observer(counter)
        try:
            train(engine, 1, accumulation=1, first=1)
        finally:
            remove_observer(counter)
        units = engine.parameter_offload.units
        trainable = [u for u in units if any(p.requires_grad for p in u.params)]
        # By broadcast: as many operations as ranks for each gather. The first block is used twice.
        assert counter.counts["broadcast"] <= 2 * (2 * len(units) + 2)
        assert counter.counts["all_reduce"] == len(trainable) + 1  # and the norm
        engine.destroy()


class TestRefusals(DistributedTest):
    """What is not supported says so."""

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
        from deepspeed import DeepSpeedConfigError

        with pytest.raises(DeepSpeedConfigError, match=key.removeprefix("stage3_")):
            engine_of(make_net(), config_of(3, **{key: value}))

    def test_an_engine_that_only_evaluates_hands_the_model_on(self) -> None:
        # Kills: hooks of the first engine that gather its old shards.
        import deepspeed

        model = make_net()
        first = deepspeed.initialize(model=model, config=config_of(3, **SHARDED))
        with torch.no_grad():
            before = first[0](tokens_of(0, 0))
            assert torch.equal(before, make_net()(tokens_of(0, 0)))
        engine = engine_of(model, config_of(3, **SHARDED))
        train(engine)
        engine.destroy()
        check_as_one_process(model)

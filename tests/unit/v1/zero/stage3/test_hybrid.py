"""Stage 3 inside groups of ranks: several copies of the shards, and copies of gathered shards
for backward (`zero_hpz_partition_size`).
"""

import functools
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed import DeepSpeedConfigError
from deepspeed import comm as dist
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from deepspeed.utils.tensor_fragment import safe_get_local_fp32_param, safe_set_local_fp32_param
from deepspeed.verify import Budget, check_budgets, check_streams
from unit.common import DistributedTest
from unit.v1.gathering import from_all_ranks, masters_of, noted
from unit.v1.looping import each
from unit.v1.zero.stage3.models import (
    BOUNDED,
    SHARDED,
    Net,
    Tensors,
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

IN_PAIRS = {"mics_shard_size": 2}
NEAR = {"zero_hpz_partition_size": 2}
CHECKED = {"collectives": True, "ledger": True, "poison": True}
SHAPES: tuple[dict[str, Any], ...] = (
    BOUNDED,
    {**SHARDED, "stage3_prefetch_bucket_size": 100, "stage3_max_live_parameters": 60},
    {"stage3_param_persistence_threshold": 20, "reduce_bucket_size": 16},
    {**BOUNDED, "overlap_comm": False, "allgather_partitions": False, "reduce_scatter": False},
)


# What scripts do around and inside a pass; backward then sees what they wrote.


def edit(model: Net) -> None:
    weight = model.blocks[1].up.weight
    with deepspeed.zero.GatheredParameters(weight, modifier_rank=3):
        if dist.get_rank() == 3:
            weight.data.mul_(1.5)


def set_full(model: Net) -> None:
    weight = model.blocks[1].down.weight
    safe_set_full_fp32_param(weight, safe_get_full_fp32_param(weight) * 1.25)


def set_local(model: Net) -> None:
    """This rank's elements, and no other rank hears of it."""
    own = safe_get_local_fp32_param(model.blocks[1].up.weight)
    if dist.get_rank() == 2:
        safe_set_local_fp32_param(model.blocks[1].up.weight, own * 0.5)


def edited(zero: dict[str, Any], folder: Path) -> list[Tensors]:
    """Parameters after each change in or between passes, of which the next takes nothing."""
    engine, model = started(1, **zero)
    train(engine, 1, 1)
    engine.save_checkpoint(str(folder))
    train(engine, 1, 1, first=1)

    @torch.no_grad()
    def evaluate() -> None:
        engine(tokens_of(40, dist.get_rank()))

    seen = []
    changes: list[Callable[[], Any]] = [
        lambda: edit(model),
        lambda: set_full(model),
        lambda: engine.load_checkpoint(str(folder)),
        evaluate,
    ]
    for index, change in enumerate(changes):
        loss = loss_of(engine, tokens_of(10 + index, dist.get_rank()))
        change()
        engine.backward(loss)
        engine.step()
        set_local(model)
        with deepspeed.zero.GatheredParameters(model.parameters()):
            seen.append(values_of(model))
    engine.destroy()
    return seen


Counts = list[tuple[str, int]]


def counting() -> AbstractContextManager[Counts]:
    """The names of collectives, and over how many ranks they are."""
    return noted(lambda call: [(call.name, dist.get_world_size(group=call.group))])


def sizes_of(name: str, counts: Counts) -> dict[int, int]:
    """How often, by the number of ranks."""
    return dict(Counter(size for found, size in counts if found == name))


class TestInstances(DistributedTest):
    world_size = 4

    def test_changes_inside_and_between_passes_and_memory(self, tmp_path: Path) -> None:
        # Kills: a backward that takes copies of before an edit, a load or an update; copies that
        # are kept from one pass to the next, which do not see what a rank writes to its shard.
        wanted = edited(BOUNDED, tmp_path / "plain")
        found = edited({**BOUNDED, **NEAR}, tmp_path / "near")
        for index, (one, other) in enumerate(zip(wanted, found, strict=True)):
            assert same(other, one), index
        assert not same(wanted[0], wanted[1])
        # Kills: copies that only an optimizer's step makes old.
        model = make_net()
        engine = deepspeed.initialize(model=model, config=config_of(3, **BOUNDED, **NEAR))[0]
        whole = make_net()
        for _ in range(2):
            with torch.no_grad():
                assert torch.equal(engine(tokens_of(0, 0)), whole(tokens_of(0, 0)))
            loss_of(engine, tokens_of(0, 0))
            edit(model)
            whole.blocks[1].up.weight.data.mul_(1.5)
        # Kills: copies that are whole on each rank, copies of what persists, copies where the node
        # is all ranks.
        zero = {**BOUNDED, "stage3_param_persistence_threshold": 20}
        engine = engine_of(make_net(), config_of(3, **zero, **NEAR))
        train(engine, 1)
        offload = engine.parameter_offload
        for unit in offload.units:
            rows_numel = unit.table.rows_numel(unit.shard.element_size())
            assert unit._secondary._memory.numel() * 2 == rows_numel
        assert offload.persistent_units
        assert all(unit._secondary is None for unit in offload.persistent_units)
        engine.offload_states()  # or they stay on the device without the shards
        assert all(unit._secondary._memory is None for unit in offload.units)
        engine.reload_states()
        train(engine, 1)
        engine.destroy()
        engine = engine_of(make_net(), config_of(3, **zero, zero_hpz_partition_size=4))
        assert all(unit._secondary is None for unit in engine.parameter_offload.units)

    def test_equals_one_process_and_other_stages_checked_and_overflowing(self) -> None:
        # Kills: gradients summed over one instance only or scaled by its size, a copy of the shards
        # that drifts; rows that are another rank's, a copy that outlives a step.
        # What is checked below, and in `test_init`, accumulates.
        run = functools.partial(trained, accumulation=1)
        wanted, plain = reference(accumulation=1), run(3, **SHARDED)
        of_two = run(2, num_optimizer_instances=2)
        assert distance(plain, wanted) < 1e-5 and distance(of_two, wanted) < 1e-5
        for shape in SHAPES[::2]:
            assert same(run(3, **shape, **NEAR), plain), shape
        for shape, keys in zip(
            SHAPES[1::2], (IN_PAIRS, {"num_optimizer_instances": 2}), strict=True
        ):
            assert same(run(3, **shape, **keys), of_two), shape
        assert distance(run(3, **BOUNDED, mics_shard_size=1), wanted) < 1e-5
        # Kills: a recomputation with what has been let go.
        config = {**config_of(3, **BOUNDED, **NEAR), "verify": CHECKED}
        engine = engine_of(make_net(recompute=False), config)
        train(engine)
        for unit in engine.parameter_offload.units:
            assert unit._secondary._memory.isnan().all()  # forgotten by the update
        end_as_one_process(engine)
        # Kills: a decision to skip that an instance takes alone.
        model = make_net()
        fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}
        engine = engine_of(model, {**config_of(3, 1, **BOUNDED, **IN_PAIRS), "fp16": fp16})
        before = safe_get_full_fp32_param(model.head.weight)
        factor = float("inf") if dist.get_rank() == 3 else 1.0
        engine.backward(loss_of(engine, tokens_of(0, dist.get_rank())) * factor)
        engine.step()
        assert engine.skipped_steps == 1 and engine.optimizer.loss_scale == 2.0**3
        assert torch.equal(safe_get_full_fp32_param(model.head.weight), before)

    @each(keys=(IN_PAIRS, NEAR))
    def test_collectives_and_gathers_that_nobody_came_for(self, keys: dict[str, int]) -> None:
        # Kills: backward gathers over all ranks, forward gathers over a node whose copies are old;
        # an instance that gathers or reduces over all; a second collective across.
        few = Budget(queues=1, processors=1)
        with simulate(backward_streams=2), check_streams(), check_budgets(Budget(), few):
            # Nothing that backward uses is gathered in forward already.
            zero = {**BOUNDED, "stage3_prefetch_bucket_size": 0, **keys}
            engine = engine_of(make_net(), config_of(3, 1, **zero))
            train(engine, 1, 1)
            with counting() as forward:
                loss = loss_of(engine, tokens_of(1, dist.get_rank()))
            with counting() as backward:
                engine.backward(loss)
            with counting() as step:
                engine.step()
            units, plans = engine.parameter_offload.units, engine.optimizer.plans
            engine.destroy()
        assert len(units) > 5 and len(plans) > 4
        gathers = sizes_of("all_gather_into_tensor", forward)
        reductions = sizes_of("reduce_scatter_tensor", backward)
        sums = sizes_of("all_reduce", backward)
        again = 2  # the first block, and the tied weight
        if keys is NEAR:
            assert gathers == {4: len(units), 2: again}, gathers
            assert reductions == {4: len(plans)}
            assert sums in ({}, {4: 1})  # whether anything was late
        else:
            assert gathers == {2: len(units) + again}, gathers
            assert reductions == {2: len(plans)} and sums[2] == len(plans)
        assert set(sizes_of("all_gather_into_tensor", backward)) == {2}
        assert not sizes_of("all_gather_into_tensor", step)
        assert sizes_of("all_reduce", step) == {4: 1}  # the norm
        # Kills: an update, or an edit, of a shard that a gather begun ahead still reads: the norm
        # and the edit's broadcast are over other ranks.
        with simulate(backward_streams=2), check_streams():
            engine, model = started(1, **BOUNDED, **keys)
            for step in range(2):
                engine.backward(loss_of(engine, tokens_of(step, dist.get_rank())))
                if step == 1:
                    loss_of(engine, tokens_of(9, dist.get_rank()))  # its backward never comes
                engine.step()
            loss_of(engine, tokens_of(9, dist.get_rank()))
            edit(model)
            engine.destroy()

    @each(form=("Init", "MiCS_Init"))
    def test_init(self, form: str) -> None:
        # Kills: an instance with the values of its own first rank, cuts among all ranks.
        config = config_of(3, **BOUNDED, **IN_PAIRS)
        torch.manual_seed(dist.get_rank())
        with getattr(deepspeed.zero, form)(config_dict_or_path=config) as init:
            model = Net(recompute=True)
        assert init.num_partitions == 2
        weight = model.blocks[0].up.weight
        assert weight.ds_tensor.numel() == -(-weight.ds_numel // 2)
        with deepspeed.zero.GatheredParameters(model.parameters()):
            assert same(values_of(model), values_of(make_net()))
        # Kills: a collective that the checks of a group do not know, a contribution that is counted
        # once per instance, a recomputation with what has been let go.
        engine = engine_of(model, {**config, "verify": CHECKED if form == "Init" else {}})
        train(engine)
        end_as_one_process(engine)

    def test_edits_reach_all_copies_and_instances_that_disagree(self) -> None:
        # Kills: an edit that stays in the modifier's instance, a master that keeps the old value in
        # the other.
        engine, model = started(1, **BOUNDED, **IN_PAIRS)
        plain = make_net()
        edit(model)
        set_full(model)
        plain.blocks[1].up.weight.data.mul_(1.5)
        plain.blocks[1].down.weight.data.mul_(1.25)
        with deepspeed.zero.GatheredParameters(model.parameters()):
            assert same(values_of(model), values_of(plain))
        owned = {name: param for name, param in plain.named_parameters() if param.requires_grad}
        assert same(masters_of({name: model.get_parameter(name) for name in owned}), owned)
        train(engine, 1, 1)
        engine.destroy()
        values = values_of(model)
        assert all(same(other, values) for other in from_all_ranks(values))
        # Kills: ranks that compare what they enter with inside an instance only.
        engine, model = started(**BOUNDED, **IN_PAIRS)
        other = dist.get_rank() > 1
        chosen = model.scale.weight if other else model.blocks[0].up.weight
        for given in (chosen, [] if other else chosen):
            with pytest.raises(RuntimeError, match="different parameters"):
                deepspeed.zero.GatheredParameters(given).__enter__()
        engine.destroy()
        # Kills: a key that is accepted and ignored, shards of other ranks than the optimizer's.
        with deepspeed.zero.Init():
            model = Net()
        with pytest.raises(DeepSpeedConfigError, match=r"zero\.Init .* has cut .* \[0, 1, 2, 3\]"):
            engine_of(model, config_of(3, **IN_PAIRS))
        with pytest.raises(DeepSpeedConfigError, match="mics_shard_size above 0"):
            deepspeed.zero.MiCS_Init(config_dict_or_path=config_of(3))
        with pytest.raises(DeepSpeedConfigError, match=r"mics_shard_size: 3 .* use one of 1, 2, 4"):
            deepspeed.zero.Init(config_dict_or_path=config_of(3, mics_shard_size=3))

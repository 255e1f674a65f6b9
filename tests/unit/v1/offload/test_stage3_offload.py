"""`offload_param`: the bits of the device, copies behind one another on their own stream; partial
offload (`offload_optimizer.ratio`): numbers, norms, skips and files of either alone.
"""

from __future__ import annotations

import gc
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.zero.parameters.shards import ShardMemory
from deepspeed.runtime.zero.units.partial_offload import DevicePart, num_kept
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_get_full_optimizer_states,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from deepspeed.verify import check_streams
from unit.common import DistributedTest
from unit.v1.device.test_overlap import Order, on_stream
from unit.v1.gathering import masters_of
from unit.v1.zero.stage3.models import (
    SHARDED,
    STEPS,
    Tensors,
    config_of,
    distance,
    end_as_one_process,
    engine_of,
    loss_of,
    make_net,
    same,
    tokens_of,
    train,
    trained,
    values_of,
)
from unit.verify.zero3_scenarios import groups_of

PARAMS: dict[str, Any] = {"offload_param": {"device": "cpu"}}
BOTH: dict[str, Any] = {**PARAMS, "offload_optimizer": {"device": "cpu"}}
GATHERS: tuple[dict[str, Any], ...] = tuple(
    {
        **SHARDED,
        "stage3_param_persistence_threshold": threshold,
        "stage3_prefetch_bucket_size": ahead,
        "stage3_max_reuse_distance": 0,
    }
    for threshold, ahead in itertools.product((0, 100_000), (0, 50_000_000))
)


def adam_trained(precision: str, **zero: Any) -> Tensors:
    with deepspeed.zero.Init(config_dict_or_path=config_of(3, **zero)):
        model = make_net()
    optimizer = DeepSpeedCPUAdam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    config = {**config_of(3, **zero), precision: {"enabled": True}}
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    train(engine)
    engine.destroy()
    return values_of(model)


class TestOnStreams(DistributedTest):
    world_size = [1, 2]

    def test_silent_and_the_same_bits(self) -> None:
        # Kills: a unit gathered before its shard has arrived, a row filled while it is read, a
        # shard that is copied to the device before the host has written it.
        with simulate(backward_streams=2):
            wanted = trained(3)
        one, other = ((1, 2), (0, 3))[dist.get_world_size() - 1]  # each on some number
        for index in (one, other):
            gathers, (offload, schedule) = GATHERS[index], ((PARAMS, 0), (BOTH, 3))[index % 2]
            with simulate(schedule=schedule, backward_streams=2), check_streams():
                found = trained(3, **gathers, **offload)
            assert same(found, wanted), (gathers, offload)

    def test_half_precision_and_memory_that_is_not_locked(self) -> None:
        # Kills: the same for an optimizer that rounds into shards; a copy that is not waited for.
        optimizer = {"offload_optimizer": {"device": "cpu"}}
        with simulate(backward_streams=2):
            wanted = adam_trained("bf16", **GATHERS[1], **optimizer)
        pin = dist.get_world_size() > 1
        offload = {"offload_param": {"device": "cpu", "pin_memory": pin}, **optimizer}
        with simulate(backward_streams=2), check_streams():
            assert same(adam_trained("bf16", **GATHERS[1], **offload), wanted), pin

    def test_scripts_between_passes(self, tmp_path: Path) -> None:
        # Kills: a shard that the host writes while a copy of an evaluation reads it, edits, or what
        # is loaded, that reach no shard.
        def run(zero: dict[str, Any]) -> tuple[Tensors, list[torch.Tensor]]:
            model = make_net()
            engine = engine_of(model, config_of(3, 1, **GATHERS[1], **zero))
            seen = []

            def look() -> None:
                with torch.no_grad():
                    seen.append(engine(tokens_of(9, 0)))

            for step in range(2):
                engine.backward(loss_of(engine, tokens_of(step, dist.get_rank())))
                look()
                engine.step()
                look()
                if step == 0:
                    engine.save_checkpoint(tmp_path, tag=f"{bool(zero)}")
                weight = model.blocks[step].up.weight
                safe_set_full_fp32_param(weight, torch.full(weight.ds_shape, 0.1 * step))
                look()
                params = [model.head.weight, model.frozen.bias, model.blocks[step].norm.bias]
                with deepspeed.zero.GatheredParameters(params, modifier_rank=0), torch.no_grad():
                    for param in params:
                        param.mul_(0.5)
                with deepspeed.zero.GatheredParameters(params):
                    seen.append(params[0].clone())
                if step == 0:
                    engine.load_checkpoint(tmp_path, tag=f"{bool(zero)}")
                    look()
            engine.destroy()
            return values_of(model), seen

        with simulate():
            wanted, outputs = run({})
        offload = PARAMS if dist.get_world_size() == 1 else BOTH
        with simulate(), check_streams():
            found, seen = run(offload)
        assert same(found, wanted), offload
        assert all(map(torch.equal, seen, outputs)), offload


class TestCosts(DistributedTest):
    world_size = 2

    def test_one_copy_per_gather_and_no_wait_per_unit(self) -> None:
        # Kills: a shard that is copied for each parameter, a host that waits for a copy.
        for offload in (PARAMS, BOTH):
            waits_of = {}
            for depth in (2, 4):
                with simulate() as device:
                    model = make_net(depth=depth)
                    engine = engine_of(model, config_of(3, 1, **GATHERS[1], **offload))
                    train(engine, 2, accumulation=1)
                    order = Order()
                    with device.trace_streams(order), device.count_host_waits() as waits:
                        train(engine, 1, accumulation=1, first=2)
                    loads = len(on_stream(order.launches, "parameter load stream", "aten::copy_"))
                    units = engine.parameter_offload.units
                    # Forward and backward; the first block, the embedding that is the head too.
                    assert len(units) <= loads <= 2 * (len(units) + 2), loads
                    places = waits.inside("deepspeed/runtime/zero")
                    waits_of[depth] = sum(places.values())
                    engine.destroy()
            assert waits_of[2] == waits_of[4] <= 2, waits_of

    def test_the_device_holds_no_shards(self) -> None:
        # Kills: a copy of the shards that stays on the device; shards or masters of units that are
        # not page-locked.
        held = {}
        for offload in ({}, PARAMS, BOTH):
            with simulate() as device:
                before = device.memory_allocated()
                with deepspeed.zero.Init(config_dict_or_path=config_of(3, **offload)):
                    model = make_net(width=64)
                gc.collect()
                built = device.memory_allocated() - before
                engine = engine_of(model, config_of(3, 1, **GATHERS[0], **offload))
                records = [param._zero3 for param in model.parameters()]
                assert all(device.is_pinned(record.shard) == bool(offload) for record in records)
                train(engine, 2, accumulation=1)
                device.synchronize()
                held[len(offload)] = device.memory_allocated() - before
                pooled = engine.parameter_offload.resources.pool.num_bytes
                own = sum(record.shard.numel() for record in records) * 4
                if offload:
                    assert built < 0.1 * own, built
                if offload == BOTH:
                    free = engine.optimizer.reduction.buffers.free
                    reductions = sum(buffer.tensor.nbytes for buffer in free)
                    assert held[2] < pooled + reductions + 0.1 * own
                engine.destroy()


class TestPlaces(DistributedTest):
    world_size = 2

    def test_init_and_engine(self) -> None:
        # Kills: an argument that is not heard, an engine that leaves shards where they were.
        off = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
        for kwargs, memory in (
            ({"remote_device": "cpu"}, ShardMemory(True, False)),
            ({"remote_device": "cpu", "pin_memory": True}, ShardMemory(True, True)),
            ({"config_dict_or_path": off}, ShardMemory(True, True)),
            ({"config_dict_or_path": off, "remote_device": "none"}, ShardMemory(False, True)),
            ({}, ShardMemory(False, False)),
        ):
            context = deepspeed.zero.Init(**kwargs)
            assert context.memory == memory, kwargs
            assert context.device.type == get_accelerator().current_device_name().split(":")[0]
        wanted = trained(3, **GATHERS[1])
        for first, second in ((PARAMS, {}), ({}, PARAMS)):
            with simulate() as device:
                with deepspeed.zero.Init(config_dict_or_path=config_of(3, **first)):
                    model = make_net()
                engine = engine_of(model, config_of(3, **GATHERS[1], **second))
                pinned = {device.is_pinned(param.ds_tensor) for param in model.parameters()}
                assert pinned == {bool(second)}
                train(engine)
                engine.destroy()
            found = values_of(model)
            assert distance(found, wanted) < 1e-5


# Of 0.01 there is nothing to offload: one of the parts is empty.
RATIOS = (1.0, 0.6, 0.3, 0.01, 0.0)


def test_cut_in_parts() -> None:
    # Kills: a share of each group that is rounded by itself, a part that is empty where it need not
    # be.
    assert num_kept([[1] * 10], 0.3) == [7]
    assert num_kept([[4, 4], [4, 4]], 0.25) == [1, 2]
    assert num_kept([[10, 1, 1]], 0.5) == [1]
    assert num_kept([[3], [], [5, 5]], 1.0) == [0, 0, 0]
    assert num_kept([[3], [5, 5]], 0.0) == [1, 2]


def make_engine(ratio: float, optimizer: str = "sgd", zero: Any = None, **more: Any) -> Any:
    """With `ratio` of the optimizer on the host; units have parameters of two groups, on both sides
    of the cut.
    """
    model = make_net()
    part = {"device": "cpu", "ratio": ratio}
    config = {**config_of(3, **{**SHARDED, "offload_optimizer": part, **(zero or {})}), **more}
    client: Any = None
    if optimizer == "sgd":
        client = torch.optim.SGD(groups_of(model), lr=0.3, momentum=0.9)
    elif optimizer == "cpu adam" and ratio > 0.0:
        client = DeepSpeedCPUAdam(groups_of(model), lr=0.01)
    else:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.0}}
    more = {"model_parameters": groups_of(model), "config": config}
    return deepspeed.initialize(model=model, optimizer=client, **more)[0]


def micro_batch(engine: Any, index: int, broken: bool = False) -> None:
    loss = loss_of(engine, tokens_of(index, dist.get_rank()))
    engine.backward(loss * float("inf") if broken and dist.get_rank() == 1 else loss)
    engine.step()


def run(engine: Any, steps: range, broken: int = -1) -> tuple[Tensors, list[float]]:
    """Masters, momenta and norms; step `broken` is not finite on rank 1."""
    norms = []
    for step in steps:
        for micro in (0, 1):
            micro_batch(engine, 2 * step + micro, broken=step == broken and micro == 0)
        norms.append(engine.get_global_grad_norm())
    return values(engine), norms


def values(engine: Any) -> Tensors:
    """Masters and moments of what is trained."""
    params = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
    found = masters_of(params)
    for key in ("momentum_buffer", "exp_avg", "exp_avg_sq"):
        if any(key in state for state in engine.optimizer.state.values()):
            state = safe_get_full_optimizer_states(list(params.values()), key)
            found |= {f"{n} {key}": own.clone() for n, own in zip(params, state, strict=True)}
    return found


class TestSameNumbers(DistributedTest):
    world_size = [1, 2]

    def test_bit_for_bit_where_kernels_are_the_same(self) -> None:
        # Kills: an element that both parts or neither updates, gradients scaled twice, a part that
        # the norm or the learning rate does not reach.
        for clip in (0.0, 0.05):
            engine = make_engine(1.0, gradient_clipping=clip)
            wanted, norms = run(engine, range(STEPS))
            if dist.get_world_size() == 1:
                assert norms[0] > 0.05
            for ratio in RATIOS[2::2] if clip else RATIOS[1:]:
                engine = make_engine(ratio, gradient_clipping=clip)
                found, others = run(engine, range(STEPS))
                assert others == pytest.approx(norms, rel=1e-6)
                check = same(found, wanted) if not clip else distance(found, wanted) < 1e-6
                assert check, (ratio, clip)
                engine.destroy()

    def test_adam_in_half_precision_with_a_skip(self) -> None:
        # Kills: a part that steps where the other is skipped, steps counted apart, decay lost on
        # the way to the device's optimizer.
        for precision in ("bf16", "fp16"):
            more: dict[str, Any] = {precision: {"enabled": True}, "gradient_clipping": 0.5}
            if precision == "fp16":
                more["fp16"]["initial_scale_power"] = 8
            broken = 1 if dist.get_world_size() > 1 else -1
            wanted, norms = run(make_engine(1.0, "cpu adam", **more), range(STEPS), broken)
            for ratio in (0.5, 0.0):
                engine = make_engine(ratio, "cpu adam", **more)
                found, others = run(engine, range(STEPS), broken)
                assert others == pytest.approx(norms, rel=2e-2), (ratio, precision)
                assert distance(found, wanted) < 5e-3, (ratio, precision)
                assert engine.skipped_steps == int(broken > 0)
                engine.destroy()


class TestPartsOnStreams(DistributedTest):
    world_size = 2

    def test_silent_and_the_same_bits(self) -> None:
        # Kills: a bucket filled anew while a part of it is on its way to the host because another
        # part stays; a part rounded before it is updated; a device part that waits for the host's.
        overlap = {"overlap_comm": True, "reduce_scatter": False}
        bf16 = {"bf16": {"enabled": True}}
        for precision, kinds in (({}, ({"reduce_scatter": False}, PARAMS)), (bf16, (overlap,))):
            with simulate(backward_streams=2):
                wanted, _ = run(make_engine(1.0, **precision), range(2))
            for number, zero in enumerate(kinds):
                with simulate(schedule=number, backward_streams=2), check_streams():
                    engine = make_engine(0.5, zero=zero, **precision)
                    assert all(len(group.params) for group in engine.optimizer.groups)
                    found, _ = run(engine, range(2))
                    engine.destroy()
                assert same(found, wanted), (zero, precision)

    def test_where_the_parts_lie_and_when_they_step(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Kills: masters, gradients or moments of the device's part in host memory and the other way
        # round; a host that updates its part first while the device waits.
        order: list[str] = []
        for cls, name in ((DevicePart, "device"), (DeepSpeedCPUAdam, "host")):

            def noted(self: Any, *args: Any, step: Any = cls.step, name: str = name) -> Any:
                order.append(name)
                return step(self, *args)

            monkeypatch.setattr(cls, "step", noted)
        with simulate() as device:
            engine = make_engine(0.5, "cpu adam", bf16={"enabled": True})
            run(engine, range(1))
            sequence = engine.optimizer
            for group in sequence.groups:
                state = map(torch.as_tensor, sequence.state[group.masters[0]].values())
                tensors = [group.master, group.grad, *(value for value in state if value.dim())]
                assert len(tensors) == 4
                places = {device.on_accelerator(tensor) for tensor in tensors[:2]}
                assert places == {not group.offload}
            engine.destroy()
        assert order == ["device", "host"]


class TestScripts(DistributedTest):
    world_size = 1

    def test_setters_and_refusals(self) -> None:
        # Kills: a parameter of one part that setters do not reach, an optimizer that would train
        # one part otherwise, a stage that takes the key and offloads everything.
        engine = make_engine(0.5)
        run(engine, range(1))
        for name, param in engine.module.named_parameters():
            if param.requires_grad:
                value = torch.full(param.ds_shape, 0.25)
                safe_set_full_fp32_param(param, value)
                safe_set_full_optimizer_state(param, 2 * value, "momentum_buffer")
                assert torch.equal(safe_get_full_fp32_param(param), value), name
                found = safe_get_full_optimizer_state(param, "momentum_buffer")
                assert torch.equal(found, 2 * value), name
        engine.destroy()
        half = {"device": "cpu", "ratio": 0.5}
        for kind, stage, message in (
            ("Lamb", 3, "ratio: 0.5 with FusedLamb.*use 1.0, or Adam"),
            ("Adagrad", 3, "ratio: 0.5 with DeepSpeedCPUAdagrad"),
            ("Adam", 2, "ratio: 0.5 is not supported: .*or stage 3"),
        ):
            config = config_of(stage, offload_optimizer=half)
            config["optimizer"] = {"type": kind, "params": {"lr": 0.1}}
            with pytest.raises(deepspeed.DeepSpeedConfigError, match=message):
                deepspeed.initialize(model=make_net(), config=config)

    def test_as_one_process(self) -> None:
        # Kills: what all ratios have wrong together.
        part = {"device": "cpu", "ratio": 0.4}
        engine = engine_of(make_net(), config_of(3, **SHARDED, offload_optimizer=part))
        train(engine)
        end_as_one_process(engine)

"""`offload_param`: the bits of the device, copies behind one another on their own stream."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
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
from deepspeed.utils import safe_set_full_fp32_param
from deepspeed.verify import check_streams
from unit.common import DistributedTest
from unit.v1.zero.stage3.models import (
    SHARDED,
    Net,
    Tensors,
    config_of,
    distance,
    engine_of,
    loss_of,
    make_net,
    reference,
    same,
    tokens_of,
    train,
    trained,
    values_of,
)

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


class TestSameBits(DistributedTest):
    world_size = [2, 3]

    def test_fp32(self) -> None:
        # Kills: shards that do not follow the masters, or are gathered before they do.
        wanted = trained(3)
        assert distance(wanted, reference()) < 1e-5
        kinds = list(zip(GATHERS, (PARAMS, BOTH, BOTH, PARAMS), strict=True))
        for gathers, offload in kinds[dist.get_world_size() - 2 :: 2]:  # each on some number
            assert same(trained(3, **gathers, **offload), wanted), (gathers, offload)

    def test_bf16(self) -> None:
        # Kills: the same where an optimizer rounds into the shards itself.
        optimizer = {"offload_optimizer": {"device": "cpu"}}
        wanted = adam_trained("bf16", **optimizer)
        assert same(adam_trained("bf16", **GATHERS[0], **BOTH), wanted)


class TestOnStreams(DistributedTest):
    world_size = [1, 2]

    def test_silent_and_the_same_bits(self) -> None:
        # Kills: a unit gathered before its shard has arrived, a row filled while it is read, a
        # shard that is copied to the device before the host has written it.
        with simulate(backward_streams=2):
            wanted = trained(3)
        for index, gathers in enumerate(GATHERS):
            offload, schedule = ((PARAMS, 0), (BOTH, 3))[index % 2]
            with simulate(schedule=schedule, backward_streams=2), check_streams():
                found = trained(3, **gathers, **offload)
            assert same(found, wanted), (gathers, offload)

    def test_half_precision_and_memory_that_is_not_locked(self) -> None:
        # Kills: the same for an optimizer that rounds into shards; a copy that is not waited for.
        optimizer = {"offload_optimizer": {"device": "cpu"}}
        with simulate(backward_streams=2):
            wanted = adam_trained("bf16", **GATHERS[1], **optimizer)
        for pin in (True, False):
            offload = {"offload_param": {"device": "cpu", "pin_memory": pin}, **optimizer}
            with simulate(backward_streams=2), check_streams():
                assert same(adam_trained("bf16", **GATHERS[1], **offload), wanted), pin

    def test_scripts_between_passes(self) -> None:
        # Kills: a shard that the host writes while a copy of an evaluation reads it, edits that
        # reach no shard.
        def run(zero: dict[str, Any]) -> tuple[Tensors, list[torch.Tensor]]:
            model = make_net()
            engine = engine_of(model, config_of(3, 1, **GATHERS[1], **zero))
            seen = []
            for step in range(2):
                engine.backward(loss_of(engine, tokens_of(step, dist.get_rank())))
                with torch.no_grad():
                    seen.append(engine(tokens_of(9, 0)))
                engine.step()
                with torch.no_grad():
                    seen.append(engine(tokens_of(9, 0)))
                weight = model.blocks[step].up.weight
                safe_set_full_fp32_param(weight, torch.full(weight.ds_shape, 0.1 * step))
                with torch.no_grad():
                    seen.append(engine(tokens_of(9, 0)))
                params = [model.head.weight, model.frozen.bias, model.blocks[step].norm.bias]
                with deepspeed.zero.GatheredParameters(params, modifier_rank=0), torch.no_grad():
                    for param in params:
                        param.mul_(0.5)
                with deepspeed.zero.GatheredParameters(params):
                    seen.append(params[0].clone())
            engine.destroy()
            return values_of(model), seen

        with simulate():
            wanted, outputs = run({})
        for offload in (PARAMS, BOTH):
            with simulate(), check_streams():
                found, seen = run(offload)
            assert same(found, wanted), offload
            assert all(map(torch.equal, seen, outputs)), offload


class Launches:
    """Counts what is issued on the stream that shards are loaded on; see `StreamTracer`."""

    def __init__(self) -> None:
        self.loads = 0

    def launched(self, operator: str, stream: Any, accesses: Any) -> None:
        self.loads += stream.name == "parameter load stream" and operator.startswith("aten::copy_")

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


@contextmanager
def one_step(engine: Any, device: Any) -> Iterator[tuple[Launches, Any]]:
    launches = Launches()
    with device.trace_streams(launches), device.count_host_waits() as waits:
        yield launches, waits


class TestCosts(DistributedTest):
    world_size = 2

    def test_one_copy_per_gather_and_no_wait_per_unit(self) -> None:
        # Kills: a shard that is copied for each parameter, a host that waits for a copy.
        for offload in (PARAMS, BOTH):
            waits_of = {}
            for depth in (2, 6):
                with simulate() as device:
                    model = make_net(depth=depth)
                    engine = engine_of(model, config_of(3, 1, **GATHERS[1], **offload))
                    train(engine, 2, accumulation=1)
                    with one_step(engine, device) as (launches, waits):
                        train(engine, 1, accumulation=1, first=2)
                    units = engine.parameter_offload.units
                    # Forward and backward; the first block, the embedding that is the head too.
                    assert len(units) <= launches.loads <= 2 * (len(units) + 2), launches.loads
                    places = waits.inside("deepspeed/runtime/zero")
                    waits_of[depth] = sum(places.values())
                    engine.destroy()
            assert waits_of[2] == waits_of[6] <= 2, waits_of

    def test_the_device_holds_no_shards(self) -> None:
        # Kills: a copy of the shards that stays on the device; shards or masters of units that are
        # not page-locked.
        held = {}
        for offload in ({}, PARAMS, BOTH):
            with simulate() as device:
                before = device.memory_allocated()
                with deepspeed.zero.Init(config_dict_or_path=config_of(3, **offload)):
                    torch.manual_seed(0)
                    model = Net(width=64)
                gc.collect()
                built = device.memory_allocated() - before
                engine = engine_of(model, config_of(3, 1, **GATHERS[0], **offload))
                records = [param._zero3 for param in model.parameters()]
                assert all(device.is_pinned(record.shard) == bool(offload) for record in records)
                for step in range(2):
                    engine.backward(loss_of(engine, tokens_of(step, dist.get_rank())))
                    engine.step()
                device.synchronize()
                held[len(offload)] = device.memory_allocated() - before
                pools = engine.parameter_offload.resources
                pooled = pools.rows.num_bytes + pools.whole.num_bytes
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

    def test_checkpoints(self, tmp_path: Path) -> None:
        # Kills: weights that are loaded into masters and do not reach shards on the host.
        def resumed(first: dict[str, Any], second: dict[str, Any], tag: str) -> Tensors:
            engine = engine_of(make_net(), config_of(3, **GATHERS[1], **first))
            train(engine, 1)
            engine.save_checkpoint(str(tmp_path), tag=tag)
            engine.destroy()
            model = make_net()
            with torch.no_grad():
                for param in model.parameters():
                    param.fill_(0.25)
            other = engine_of(model, config_of(3, **GATHERS[1], **second))
            other.load_checkpoint(str(tmp_path), tag=tag)
            train(other, 1, first=1)
            other.destroy()
            return values_of(model)

        wanted = trained(3)
        for number, (first, second) in enumerate(((BOTH, BOTH), ({}, PARAMS), (PARAMS, {}))):
            assert same(resumed(first, second, str(number)), wanted), number
        with simulate():
            assert distance(resumed(PARAMS, BOTH, "streams"), wanted) < 1e-5

    def test_nvme_is_refused_by_name(self) -> None:
        # Kills: a device that is accepted and not used.
        config = config_of(3, offload_param={"device": "nvme", "nvme_path": "/tmp"})
        with pytest.raises(deepspeed.DeepSpeedConfigError, match=r"offload_param.device: 'nvme'"):
            engine_of(make_net(), config)

"""`offload_states` and `reload_states`: memory given back, equal bits, errors in between."""

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed import comm as dist
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as Kind
from deepspeed.runtime.zero.offload_states import get_state_devices
from deepspeed.verify import check_streams
from unit.common import DistributedTest
from unit.v1.offload.test_stage3_offload import values
from unit.v1.zero.stage3.models import (
    SHARDED,
    Tensors,
    config_of,
    loss_of,
    make_net,
    same,
    tokens_of,
    train,
)

# What scripts for reinforcement learning send away while they generate.
FOR_GENERATION = (Kind.optim_states, Kind.contiguous_grad_buffer, Kind.hp_params)


def make_engine(stage: int, precision: str = "fp32", width: int = 5, **zero: Any) -> Any:
    config = config_of(stage, **{**(SHARDED if stage == 3 else {}), **zero})
    if precision != "fp32":
        config[precision] = {"enabled": True}
    config["optimizer"] = {"type": "Adam", "params": {"lr": 0.01}}
    return deepspeed.initialize(model=make_net(width=width), config=config)[0]


def run(
    engine: Any, between: Callable[[int], None] = lambda index: None
) -> tuple[Tensors, torch.Tensor]:
    """Masters, moments and outputs of six micro-batches; `between` is called after each."""
    for index in range(5):
        train(engine, 1, 1, index)
        between(index)
    with torch.no_grad():
        output = engine(tokens_of(9, 0)).clone()
    train(engine, 1, 1, 5)
    return values(engine), output


def off_the_device(what: str) -> Any:
    return pytest.raises(RuntimeError, match=what + r"off the device: call reload_states\(\) first")


class TestMoves(DistributedTest):
    world_size = 2

    def test_bit_equal_on_streams(self) -> None:
        # Kills: a tensor that stays behind its memory, a stream that reads before the copies are
        # there, a gather of what has left, gradients of a window that are lost.
        for stage, precision, zero in (
            (2, "fp32", {"overlap_comm": True}),
            (3, "fp32", {"stage3_param_persistence_threshold": 20}),
            (3, "bf16", {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}),
        ):
            case = (stage, precision, zero)
            with simulate(backward_streams=2):
                engine = make_engine(stage, precision, **zero)
                wanted, output = run(engine)
                engine.destroy()
            with simulate(backward_streams=2, schedule=stage - 2), check_streams():
                engine = make_engine(stage, precision, **zero)

                def there_and_back(index: int, engine: Any = engine) -> None:
                    kinds = (None, FOR_GENERATION, (Kind.lp_params,), None, list(Kind))[index]
                    later = bool(index % 2)
                    group = engine.optimizer.groups[0]
                    values = group.master.tolist()
                    engine.offload_states(kinds, pin_memory=index != 3, non_blocking=later)
                    assert later or group.master.tolist() == values
                    engine.reload_states(non_blocking=later)

                found, others = run(engine, there_and_back)
                assert torch.equal(others, output) and same(found, wanted), case
                engine.destroy()

    def test_memory_is_given_back(self) -> None:
        # Kills: state that keeps its memory because somebody holds a view of it, a pool or a buffer
        # that nobody needs, memory that a second round takes twice.
        persistent = {"stage3_param_persistence_threshold": 10**6}
        for stage, precision, zero in ((2, "bf16", {}), (3, "bf16", {}), (3, "fp32", persistent)):
            with simulate() as device:
                before = device.memory_allocated()
                engine = make_engine(stage, precision, width=64, **zero)
                train(engine, 1)
                device.synchronize()
                gc.collect()
                full = device.memory_allocated() - before
                shards = sum(group.table.shard_numel for group in engine.optimizer.groups)
                half = precision == "bf16"
                for _ in range(2):
                    engine.offload_states(FOR_GENERATION)
                    less = full - (device.memory_allocated() - before)
                    assert less >= (8 + 4 * half) * shards, (stage, precision)
                    engine.offload_states()  # what is left
                    left = device.memory_allocated() - before
                    assert left <= 0.1 * full, (stage, precision, left, full)
                    engine.reload_states()
                    assert device.memory_allocated() - before <= full
                engine.destroy()

    def test_what_runs_in_between(self, tmp_path: Path) -> None:
        # Kills: a step on half of the state, a forward that computes with what has left, a check
        # that asks for more than is needed.
        for stage in (1, 2, 3):
            engine = make_engine(stage, "bf16")
            train(engine, 1)
            engine.offload_states(FOR_GENERATION[:1] + FOR_GENERATION[2:])
            loss = loss_of(engine, tokens_of(0, 0))
            engine.backward(loss)
            engine.step()  # no boundary
            engine.backward(loss_of(engine, tokens_of(0, 0)))
            with off_the_device("step while .*hp_params, optim_states "):
                engine.step()
            with off_the_device("save_checkpoint while .*"):
                engine.save_checkpoint(str(tmp_path))
            engine.optimizer.offload_states(["lp_params", "lp_grads"])
            with off_the_device("forward while .*lp_params "):
                engine(tokens_of(0, 0))
            with off_the_device("load_checkpoint while .*"):
                engine.load_checkpoint(str(tmp_path))
            if stage == 3:
                params = list(engine.module.parameters())
                with off_the_device("the gather of .*"):
                    engine.module(tokens_of(0, 0))
                with deepspeed.zero.GatheredParameters(params):  # reads what is on the host
                    assert params[0].abs().sum() > 0
            engine.reload_states()
            engine.step()
            for kind in Kind:
                if kind is not Kind.contiguous_grad_buffer:
                    assert get_state_devices(engine, kind) == {engine.device}, kind
            with pytest.raises(ValueError, match="device='nvme'.*needs .*nvme_path.*: add it"):
                engine.offload_states(device="nvme")
            engine.offload_states()
            engine.destroy()  # brings them back
            assert all(torch.isfinite(param).all() for param in engine.module.parameters())

    def test_without_an_optimizer(self, tmp_path: Path) -> None:
        # Kills: weights that stay, or are gathered while they are away; a gather before they are
        # back; plain parameters made of nothing.
        tokens = tokens_of(0, dist.get_rank())
        for persistence in (0, 10**6):
            plain = make_net(width=64)
            zero = {**SHARDED, "stage3_param_persistence_threshold": persistence}
            with simulate(backward_streams=2) as device, check_streams(), torch.no_grad():
                config = config_of(3, **zero)
                engine = deepspeed.initialize(model=copy.deepcopy(plain), config=config)[0]
                before = device.memory_allocated()
                wanted = engine(tokens).tolist()
                for later in (False, True):
                    engine.offload_states(non_blocking=later)
                    device.synchronize()
                    assert get_state_devices(engine, Kind.lp_params) == {torch.device("cpu")}
                    assert device.memory_allocated() < 0.2 * before
                    with off_the_device("forward while .*lp_params "):
                        engine(tokens)
                    with off_the_device("save_checkpoint while .*"):
                        engine.save_checkpoint(str(tmp_path))
                    with pytest.raises(RuntimeError, match="without an optimizer.*reload_states"):
                        deepspeed.initialize(model=engine.module, config=config)
                    engine.reload_states(non_blocking=later)
                    assert engine(tokens).tolist() == wanted, (persistence, later)
                engine.offload_states([Kind.optim_states])  # there is none
                assert engine(tokens).tolist() == wanted
                engine.offload_states()
                model = engine.module
                engine.destroy()
                for own, param in zip(plain.parameters(), model.parameters(), strict=True):
                    assert param.tolist() == own.tolist()

    def test_where_nothing_can_move(self) -> None:
        # Kills: an engine that takes the call and keeps its memory.
        engine = make_engine(0)
        with pytest.raises(RuntimeError, match="offload_states.*use ZeRO stage 2 or 3"):
            engine.offload_states()
        engine.destroy()
        engine = make_engine(3)
        with deepspeed.zero.GatheredParameters(engine.module.parameters()):
            with pytest.raises(RuntimeError, match="before offload_states"):
                engine.offload_states()
        engine.destroy()

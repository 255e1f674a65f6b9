"""Shards of parameters in files: the bits of memory, read ahead, written behind; host memory."""

from __future__ import annotations

import gc
import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed import comm as dist
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.aio.handle import AsyncIOHandle
from deepspeed.ops.state_files import place_in_file
from deepspeed.runtime.sharding import publisher
from deepspeed.runtime.zero.gathering import shard_files
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from deepspeed.verify import check_streams
from unit.common import DistributedFixture, DistributedTest
from unit.v1.checkpoint.runs import UNIVERSAL, convert, keep, kept, on_rank_0
from unit.v1.offload.test_nvme_offload import failing
from unit.v1.zero.stage3.models import (
    BOUNDED,
    MIXED,
    Net,
    Tensors,
    config_of,
    engine_of,
    make_net,
    same,
    tokens_of,
    train,
    values_of,
)

# Shards of several blocks of a disk; buffers of one, of which a unit needs more than there are.
WIDTH = 48
SMALL = {"buffer_count": 3, "buffer_size": 1000, "max_in_cpu": 0}


def params_in(folder: Any, **keys: Any) -> dict[str, Any]:
    return {"device": "nvme", "nvme_path": str(folder), **SMALL, **keys}


def start(
    precision: str, model: Net | None = None, universal: bool = False, **zero: Any
) -> tuple[Any, Net]:
    model = make_net(width=WIDTH) if model is None else model
    config = {**config_of(3, **zero), "gradient_clipping": 0.5, **(UNIVERSAL if universal else {})}
    if precision != "fp32":
        config[precision] = {"enabled": True}
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer: Any = DeepSpeedCPUAdam(trained, lr=0.01)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0], model


def trained(precision: str, **zero: Any) -> Tensors:
    engine, model = start(precision, **zero)
    train(engine)
    engine.destroy()
    return values_of(model)


def move_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let reads and writes happen when they are waited for, as late as they may."""
    begun: dict[int, list[Any]] = {}

    def begin(verb: str) -> Any:
        def call(self: AsyncIOHandle, *args: Any) -> int:
            begun.setdefault(id(self), []).append((getattr(self, verb), args))
            return 0

        return call

    def wait(self: AsyncIOHandle) -> int:
        return sum(move(*args) for move, args in begun.pop(id(self), ()))

    monkeypatch.setattr(AsyncIOHandle, "async_pread", begin("sync_pread"))
    monkeypatch.setattr(AsyncIOHandle, "async_pwrite", begin("sync_pwrite"))
    monkeypatch.setattr(AsyncIOHandle, "wait", wait)


class TestSameBits(DistributedTest):
    world_size = 2

    def test_wherever_the_optimizer_is(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Kills: a shard that is read before it is written, a part that takes another's elements.
        move_late(monkeypatch)
        monkeypatch.setattr(publisher, "UPDATE_NUMEL", 3000)
        cpu, nvme = ({"device": kind, "nvme_path": str(tmp_path)} for kind in ("cpu", "nvme"))
        for precision, *kinds in (("fp32", {}, nvme), ("bf16", cpu)):
            wanted = trained(precision, **BOUNDED)
            for number, optimizer in enumerate(kinds):
                params = params_in(tmp_path, buffer_count=1 + number)
                more = {**(BOUNDED, MIXED)[number], "offload_optimizer": optimizer}
                found = trained(precision, offload_param=params, **more)
                assert same(found, wanted), (precision, optimizer)
        assert os.listdir(tmp_path) == []

    def test_silent_on_streams(self, tmp_path: Path) -> None:
        # Kills: memory that is read into while a copy of it is on its way, a file that is written
        # while it is read, a part that is copied before it has arrived.
        nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
        with simulate(backward_streams=2):
            wanted = trained("bf16", **BOUNDED)
        for schedule, gathers, optimizer in ((0, MIXED, {}), (3, BOUNDED, nvme)):
            params = params_in(tmp_path, pin_memory=not schedule)
            more = {**gathers, "offload_optimizer": optimizer}
            with simulate(schedule=schedule, backward_streams=2), check_streams():
                found = trained("bf16", offload_param=params, **more)
            assert same(found, wanted), schedule


class TestScripts(DistributedTest):
    world_size = 2

    def test_what_clients_do(self, tmp_path: Path) -> None:
        # Kills: something that is written and not read back from the file, or the other way round.
        results = []
        for kind in ("cpu", "nvme"):
            offload = {"offload_param": params_in(tmp_path / "swap", device=kind), **BOUNDED}
            offload["stage3_gather_16bit_weights_on_model_save"] = True
            config = {**config_of(3, **offload), "bf16": {"enabled": True}}
            with deepspeed.zero.Init(remote_device=kind, config_dict_or_path=config):
                model = make_net(width=WIDTH)
            shards = [param.ds_tensor for param in model.parameters()]
            engine, _ = start("bf16", model, **offload)
            shards += [param.ds_tensor for param in model.parameters()]
            assert {place_in_file(shard) is not None for shard in shards} == {kind == "nvme"}
            results.append(self._all_of_it(engine, model, tmp_path / kind))
            engine.destroy()
        assert same(*results)

    @staticmethod
    def _all_of_it(engine: Any, model: Net, folder: Path) -> Tensors:
        found: Tensors = {}
        train(engine, 1)
        weight, frozen = model.blocks[1].up.weight, model.frozen.weight
        safe_set_full_fp32_param(weight, torch.full(weight.ds_shape, 0.125))
        train(engine, 1, first=1)
        with deepspeed.zero.GatheredParameters([weight, frozen], modifier_rank=0), torch.no_grad():
            weight.mul_(0.5)
            frozen.add_(1.0)
        model.embed.weight.ds_tensor.data = torch.full_like(model.embed.weight.ds_tensor, 0.25)
        with torch.no_grad():
            found["evaluated"] = engine(tokens_of(9, dist.get_rank()))
        engine.offload_states()
        engine.reload_states()
        train(engine, 1, first=2)
        engine.save_checkpoint(str(folder))
        train(engine, 1, first=3)
        engine.load_checkpoint(str(folder))
        train(engine, 1, first=4)
        for name, param in model.named_parameters():
            with deepspeed.zero.GatheredParameters(param):
                found[name] = param.detach().clone()
            if param.requires_grad:
                found[f"{name} master"] = safe_get_full_fp32_param(param).clone()
        assert engine.save_16bit_model(str(folder))
        dist.barrier()
        found |= {f"{k} saved": v for k, v in torch.load(folder / "pytorch_model.bin").items()}
        fp32 = get_fp32_state_dict_from_zero_checkpoint(str(folder))
        return found | {f"{name} of the folder": value for name, value in fp32.items()}


class TestDiskErrors(DistributedTest):
    world_size = 2

    def test_all_ranks_raise_and_the_checkpoint_loads(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Kills: an error that one rank raises while the other waits for it, one that nobody hears
        # of, a step or an evaluation of what could not be read, an error told twice.
        monkeypatch.setattr(publisher, "UPDATE_NUMEL", 3000)
        kept = {**MIXED, "stage3_param_persistence_threshold": 100}
        for number, kind in enumerate(("host", "torch")):
            folder = tmp_path / kind
            offload = {"offload_param": params_in(folder / "swap"), **(kept, BOUNDED)[number]}
            if kind == "host":
                engine, _ = start("bf16", **offload)
            else:
                engine = engine_of(make_net(width=WIDTH), config_of(3, **offload))
            train(engine, 1)
            engine.save_checkpoint(str(folder))
            train(engine, 1, first=1)
            wanted = masters_of(engine)
            read, written, cut = (
                "Input/output error: .* are to be read",
                "Input/output error: .* are to be written",
                "the file ends at byte .* are to be read",
            )
            cases = ((read, 0), (cut, 0), (read, 12), (written, 1))
            for told, skipped in cases[2 * number :]:
                before = masters_of(engine)
                is_told = f"{told}.*rank 1.*{folder}/swap"
                with failing(told == written, skipped, told == cut):
                    with pytest.raises(OSError, match=is_told):
                        train(engine, 1, first=5)
                # What cannot be read is noticed before anything is updated.
                assert told == written or same(masters_of(engine), before)
                engine.load_checkpoint(str(folder))
                train(engine, 1, first=1)
                assert same(masters_of(engine), wanted), (kind, told, skipped)
            with torch.no_grad():
                evaluated = engine(tokens_of(9, dist.get_rank()))
                engine.empty_partition_cache()
                with failing(False, 0), pytest.raises(OSError, match="rank 1"):
                    engine(tokens_of(9, dist.get_rank()))
                assert torch.equal(engine(tokens_of(9, dist.get_rank())), evaluated)
            train(engine, 1, first=2)
            engine.destroy()


def masters_of(engine: Any) -> Tensors:
    return {
        name: safe_get_full_fp32_param(param).clone()
        for name, param in engine.module.named_parameters()
        if param.requires_grad
    }


class saved(DistributedFixture):  # noqa: N801  # the name of the fixture
    """What two ranks with all of their state in files have saved, universal too."""

    world_size = 2

    def run(self, class_tmpdir: str) -> None:
        nvme = {"device": "nvme", "nvme_path": class_tmpdir}
        offload = {"offload_param": params_in(class_tmpdir), "offload_optimizer": nvme}
        engine, _ = start("bf16", **offload, **BOUNDED)
        train(engine, 2)
        engine.save_checkpoint(class_tmpdir)
        keep(f"{class_tmpdir}/masters", masters_of(engine))
        on_rank_0(lambda: convert(class_tmpdir))
        engine.destroy()


class TestOtherRanks(DistributedTest):
    world_size = [1, 4]

    def test_goes_on_as_without_files(self, saved: None, class_tmpdir: str, tmp_path: Path) -> None:
        # Kills: shards in files that are cut, padded or read as if there were as many ranks, and
        # other copies of them (MiCS) that one instance alone writes.
        mics = {"mics_shard_size": 2} if dist.get_world_size() == 4 else {}
        for universal in (False, True):
            found = []
            for nvme in ({}, {"offload_param": params_in(tmp_path)}):
                engine, _ = start("bf16", universal=universal, **nvme, **mics, **BOUNDED)
                engine.load_checkpoint(class_tmpdir)
                assert same(masters_of(engine), kept(f"{class_tmpdir}/masters"))
                train(engine, 2, first=2)
                found.append(masters_of(engine))
                engine.destroy()
            assert same(*found), universal


class TestFolder(DistributedTest):
    world_size = 1

    def test_states_leave_to_files_and_a_part_is_in_files(self, tmp_path: Path) -> None:
        # Kills: state that goes to memory, or comes back as something else; a part on the device
        # that is looked for in files, or one on the host that is not in them.
        wanted = []
        for kind in ("cpu", "nvme"):
            part = {"device": kind, "ratio": 0.5, "nvme_path": str(tmp_path)}
            with simulate() as device, check_streams():
                engine, model = start("bf16", offload_optimizer=part, **MIXED)
                train(engine, 1)
                masters = [group.master for group in engine.optimizer.groups]
                in_files = [place_in_file(master) is not None for master in masters]
                assert in_files == [kind == "nvme", False]
                locked, there = device.simulator.allocator.host.nbytes, device.memory_allocated()
                engine.offload_states(device=kind)
                assert device.memory_allocated() < 0.3 * there
                grown = device.simulator.allocator.host.nbytes - locked
                assert (grown > 0) == (kind == "cpu"), grown
                engine.reload_states()
                train(engine, 1, first=1)
                engine.destroy()
            wanted.append(values_of(model))
        assert same(*wanted) and os.listdir(tmp_path) == []

    def test_what_is_refused(self, tmp_path: Path) -> None:
        told = "offload_param.device: 'nvme' needs nvme_path, a folder on the disk: add it"
        with pytest.raises(deepspeed.DeepSpeedConfigError, match=told):
            engine_of(make_net(), config_of(3, offload_param={"device": "nvme"}))
        with pytest.raises(deepspeed.DeepSpeedConfigError, match="nvme.* need .*nvme_path"):
            deepspeed.zero.Init(remote_device="nvme")

    def test_host_memory_and_reads_ahead(self, tmp_path: Path, monkeypatch: Any) -> None:
        # Kills: shards that stay in host memory, a model that is made whole, buffers as large as
        # the keys say or shards are; parts that are read when they are waited for.
        begun: list[int] = []
        waits: list[int] = []
        monkeypatch.setattr(shard_files._Slot, "begin", noted(shard_files._Slot.begin, begun))
        monkeypatch.setattr(shard_files._Slot, "wait", noted(shard_files._Slot.wait, waits))
        offload = {"offload_param": params_in(tmp_path, buffer_count=4, buffer_size=1 << 30)}
        before = len(os.listdir("/proc/self/fd"))
        with simulate() as device:
            host = device.simulator.allocator.host
            with deepspeed.zero.Init(config_dict_or_path=config_of(3, **offload)):
                model = make_net(width=WIDTH, depth=8)
            gc.collect()
            assert host.nbytes < 10_000
            assert len(os.listdir("/proc/self/fd")) <= before + 4
            offload["stage3_prefetch_bucket_size"] = 10_000
            engine, _ = start("bf16", model, **offload, **BOUNDED)
            shards = [param._zero3.shard.nbytes for param in model.parameters()]
            train(engine, 2)
            reads = engine.parameter_offload.resources.reads
            largest = max(unit.shard.nbytes for unit in engine.parameter_offload.units)
            assert 4 * largest <= reads.num_bytes <= 4 * (largest + 3 * 4096)
            # What is read into, and two pieces that are written, here as large as the model.
            gc.collect()
            assert host.nbytes <= reads.num_bytes + 2 * sum(shards) + 10_000
            del begun[:], waits[:]
            train(engine, 1, first=2)
            ahead = [sum(at < wait for at in begun) - index for index, wait in enumerate(waits)]
            engine.destroy()
        # Of two passes all but the last parts are read while others are waited for.
        assert len(ahead) == 2 * 28 and ahead.count(0) == 2 * 25 and min(ahead) == -3


def noted(method: Any, when: list[int]) -> Any:
    def call(*args: Any) -> Any:
        when.append(next(CLOCK))
        return method(*args)

    return call


CLOCK = itertools.count()

"""The vertical schedule: a step's micro-batches go through each unit together, with the bits of the
plain loop.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepspeed
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.ops.aio.handle import AsyncIOHandle
from deepspeed.runtime.dataloader import RepeatingLoader
from deepspeed.runtime.zero.gathering.gather_unit import GatherUnit
from deepspeed.utils.exceptions import MisuseError
from deepspeed.verify import check_streams
from unit.common import DistributedTest
from unit.models import drawn, seeded
from unit.v1.zero.stage3 import models
from unit.v1.zero.stage3.models import (
    BOUNDED,
    MIXED,
    SHARDED,
    Tensors,
    config_of,
    make_net,
    same,
    tokens_of,
    values_of,
)

COUNT = 3


def batches(step: int) -> list[torch.Tensor]:
    return [tokens_of(COUNT * step + index, dist.get_rank()) for index in range(COUNT)]


def loss_of(engine: Any, batch: torch.Tensor) -> torch.Tensor:
    loss = models.loss_of(engine, batch)
    get_accelerator().synchronize()  # a forward may
    return loss


def start(
    recompute: bool | None = None, zero: dict[str, Any] = BOUNDED, width: int = 16, **more: Any
) -> tuple[Any, nn.Module]:
    model = make_net(width=width, recompute=recompute)
    optimizer = {"type": "AdamW", "params": {"lr": 0.05}}
    config = {**config_of(3, COUNT, **zero), "optimizer": optimizer, **more}
    return deepspeed.initialize(model=model, config=config)[0], model


def step_plainly(engine: Any, step: int) -> torch.Tensor:
    losses = torch.zeros(COUNT, dist.get_world_size())
    for index, batch in enumerate(batches(step)):
        loss = loss_of(engine, batch)
        losses[index, dist.get_rank()] = loss.detach()
        engine.backward(loss)
        engine.step()
    dist.all_reduce(losses)
    return losses.mean()


def step_together(engine: Any, step: int) -> torch.Tensor:
    assert engine.parameter_offload.units
    return engine.train_batch(iter(batches(step)), loss_of)  # type: ignore[no-any-return]  # Any's


def trained(take: Any, steps: int = 2, **config: Any) -> Tensors:
    """Losses, norms and parameters, and how many steps were skipped."""
    engine, model = start(**config)
    found: Tensors = {}
    for step in range(steps):
        found[f"loss {step}"] = take(engine, step).clone()
        found[f"norm {step}"] = torch.as_tensor(engine.get_global_grad_norm()).clone()
    found["skipped"] = torch.tensor(engine.skipped_steps)
    assert engine.global_steps == steps and engine.micro_steps == steps * COUNT
    engine.destroy()
    return {**found, **values_of(model)}


BF16 = {"bf16": {"enabled": True}, "gradient_clipping": 0.05}
# The first step is skipped, the second is not.
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 14, "hysteresis": 1}}
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}}}


def offloaded(folder: Path, kind: str, **zero: Any) -> dict[str, Any]:
    place = {"device": kind, "nvme_path": str(folder)}
    files = {"buffer_count": 3, "buffer_size": 1000, "max_in_cpu": 0} if kind == "nvme" else {}
    return {**zero, "offload_optimizer": place, "offload_param": {**place, **files}}


class TestBits(DistributedTest):
    world_size = 2
    exec_timeout = 120

    def test_on_the_host(self, tmp_path: Path) -> None:
        # Kills: gradients of several micro-batches that are added up before they are reduced, or in
        # another order; a place in a pass, a frame or a micro-batch's number that is another's.
        for case in (
            {**SGD, "zero": {"stage3_param_persistence_threshold": 0}, "recompute": False},
            {**BF16, "zero": offloaded(tmp_path, "cpu", **MIXED)},
            {**FP16, "zero": offloaded(tmp_path, "nvme", **BOUNDED), "recompute": False},
        ):
            wanted, found = trained(step_plainly, **case), trained(step_together, **case)
            assert same(found, wanted), [one for one in wanted if not wanted[one].equal(found[one])]
            assert wanted["skipped"].item() == ("fp16" in case)

    def test_on_a_device(self, tmp_path: Path) -> None:
        # Kills: a thread without the device, its modes or its stream; memory that is used again
        # before all micro-batches have read it.
        found = []
        zero = offloaded(tmp_path, "cpu", **SHARDED)
        for take in (step_plainly, step_together):
            with simulate(), check_streams():
                found.append(trained(take, 4, width=64, zero=zero, recompute=False, **BF16))
        assert same(*found), [one for one in found[0] if not found[0][one].equal(found[1][one])]


@contextmanager
def counted() -> Iterator[tuple[Counter[str], Counter[int]]]:
    """The gathers of each unit, and how many bytes are read of files."""
    gathers, read = Counter[str](), Counter[int]()
    issue, pread = GatherUnit._issue, AsyncIOHandle.async_pread

    def issued(unit: GatherUnit, *args: Any) -> Any:
        gathers[unit.name] += 1
        return issue(unit, *args)

    def reading(handle: AsyncIOHandle, buffer: torch.Tensor, *args: Any) -> int:
        read["bytes"] += buffer.numel()
        return pread(handle, buffer, *args)

    with mock.patch.object(GatherUnit, "_issue", issued):
        with mock.patch.object(AsyncIOHandle, "async_pread", reading):
            yield gathers, read


class TestGathers(DistributedTest):
    world_size = 2

    def test_once_in_each_direction(self, tmp_path: Path) -> None:
        # Kills: a unit that goes before all micro-batches have used it; one that is read again.
        # Per step; the embedding is the head too, and the first block is used twice.
        wanted = {"": 2, "embed": 3, "blocks.0": 4, "blocks.1": 2, "frozen": 2}
        zero = {**offloaded(tmp_path, "nvme", **BOUNDED), "offload_optimizer": {"device": "cpu"}}
        for recompute, keys in ((None, BOUNDED), (False, zero)):
            found = []
            for take in (step_plainly, step_together):
                engine, _ = start(recompute, zero=keys)
                for step in range(2):
                    with counted() as (gathers, read):
                        take(engine, step)
                    if take is step_together:
                        assert {**gathers, **wanted} == gathers and gathers["scale"] <= 2, gathers
                found.append(read["bytes"])
                engine.destroy()
            # All but the first read is of the plain loop's first micro-batch, too.
            assert found[0] == COUNT * found[1], found


class Dropping(nn.Module):
    """Dropout, in blocks that are recomputed or not; some micro-batches pass by the last one."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.inlet = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.GELU()) for _ in range(3)
        )
        self.recompute = recompute

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        x = self.inlet(x)
        for block in self.blocks[: 2 + number % 2]:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.recompute else block(x))
        return x.square().mean()


def dropped(take: str, recompute: bool = False, **config: Any) -> Tensors:
    model = seeded(Dropping, recompute=recompute)
    optimizer = {"type": "SGD", "params": {"lr": 0.1}}
    whole = {**config_of(3, COUNT, **SHARDED), "optimizer": optimizer, **config}
    engine = deepspeed.initialize(model=model, config=whole)[0]
    torch.manual_seed(1)
    for step in range(2):
        numbers = range(COUNT * step, COUNT * (step + 1))
        given = [(drawn(10 * n + dist.get_rank(), 4, 6), n) for n in numbers]
        if take == "together":
            engine.train_batch(iter(given))
        else:
            for batch in given:
                engine.backward(engine(*batch))
                engine.step()
    draw = torch.rand(1)
    engine.destroy()
    return {**values_of(model), "draw": draw}


class TestRandomNumbers(DistributedTest):
    world_size = 2

    def test_of_each_micro_batch(self) -> None:
        # Kills: a recomputation that draws what another micro-batch has drawn; seeds that do not
        # belong to micro-batches; numbers that a step takes from the script.
        block = {"reproducibility": {"world_size_invariant": True}}
        assert same(dropped("together", **block), dropped("plainly", **block))
        once, recomputed = dropped("together"), dropped("together", recompute=True)
        assert same(once, recomputed)
        torch.manual_seed(1)
        assert once["draw"].equal(torch.rand(1))


class Odd(nn.Module):
    """Fails in a block, or does what micro-batches in turns cannot: `does` says what."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.by_name = {"last": self.blocks[2].weight}
        self.register_buffer("mean", torch.zeros(6))
        self.calls: Counter[int] = Counter()
        self.does = ""

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            reenters = index == 1 and self.does == "reenters"
            x = checkpoint(block, x, use_reentrant=True) if reenters else block(x)
            self.calls[number] += 1
            if index == 0:
                self.kept = x
            if index == 1 and self.does == "fails" and number == 1:
                raise ZeroDivisionError("micro-batch")
            if index == 1 and self.does == "is interrupted" and number == 1:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.1)
        if self.does == "keeps a tensor":
            x = x + self.kept
        if self.does == "keeps a parameter":
            x = x @ self.by_name["last"]
        if self.does == "writes":
            self.mean.mul_(0.9).add_(x.detach().mean(0))
        return x.square().mean()


def odd_engine(**config: Any) -> Any:
    config = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **config}
    whole = {**config_of(3, COUNT, **MIXED), **config}
    return deepspeed.initialize(model=seeded(Odd), config=whole)[0]


class TestWhatFails(DistributedTest):
    world_size = 2

    def test_raises_once(self) -> None:
        # Kills: a thread that goes on or hangs, a unit that stays, a window that is half begun.
        engine = odd_engine(zero_optimization={"stage": 3, **BOUNDED})
        model, threads = engine.module, threading.active_count()
        given = [(drawn(n, 4, 6), n) for n in range(COUNT)]
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        for does, error, text in (
            ("fails", ZeroDivisionError, "micro-batch"),
            ("is interrupted", KeyboardInterrupt, ""),
            ("keeps a tensor", MisuseError, "keeps from one forward to another"),
            ("keeps a parameter", MisuseError, "blocks.2.weight, which others"),
            ("reenters", MisuseError, "use_reentrant=False"),
            ("writes", MisuseError, "the buffer mean"),
        ):
            model.does = does
            model.calls.clear()
            with pytest.raises(error, match=text):
                engine.train_batch(iter(given))
            assert threading.active_count() == threads
            assert does != "fails" or model.calls == {0: 1, 1: 2, 2: 2}
            assert engine.micro_steps == 0
            if does == "reenters":  # a backward has begun
                with pytest.raises(MisuseError, match="middle of an accumulation window"):
                    engine.train_batch(iter(given))
                engine.zero_grad()
        signal.signal(signal.SIGINT, before)
        with pytest.raises(MisuseError, match="no backward is its"):
            engine.train_batch(iter(given), lambda engine, batch: engine.backward(engine(*batch)))
        engine.zero_grad()
        model.does = ""
        loss = engine.train_batch(iter(given))
        engine.destroy()
        plain = seeded(Odd)
        mean = sum(plain(*batch) for batch in given) / COUNT
        mean.backward()
        assert torch.allclose(loss, mean)
        for own, param in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(own, param - 0.1 * param.grad, atol=1e-6)

    def test_what_does_not_go_together(self) -> None:
        # Kills: what is asked for and left out in silence.
        engine = odd_engine(verify={"ledger": True}, flops_profiler={"enabled": True})
        with pytest.raises(MisuseError, match=r"verify.ledger, flops_profiler.enabled: leave"):
            engine.train_batch(iter([]))
        engine.destroy()
        engine = odd_engine()
        with pytest.raises(MisuseError, match="no data"):
            engine.train_batch()
        with engine.no_sync(), pytest.raises(MisuseError, match=r"leave no_sync\(\)"):
            engine.train_batch(iter([]))
        engine.module.blocks[0].weight.register_hook(lambda grad: grad * 0)
        with pytest.raises(MisuseError, match="blocks.0.weight has a hook of the script's"):
            engine.train_batch((drawn(n, 4, 6), n) for n in range(COUNT))
        engine.destroy()


class Wide(nn.Module):
    """Blocks whose inside is much larger than what they take."""

    def __init__(self) -> None:
        super().__init__()
        blocks = ((nn.Linear(16, 1024), nn.GELU(), nn.Linear(1024, 16)) for _ in range(4))
        self.blocks = nn.ModuleList(nn.Sequential(*block) for block in blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x.square().mean()


def peak(in_one_call: bool) -> int:
    with simulate() as device:
        optimizer = {"type": "SGD", "params": {"lr": 0.01}}
        config = {**config_of(3, COUNT, offload_param={"device": "cpu"}, **BOUNDED)}
        config |= {"optimizer": optimizer, "train_micro_batch_size_per_gpu": 256}
        engine = deepspeed.initialize(model=seeded(Wide), config=config)[0]
        device.reset_peak_memory_stats()
        data = (drawn(n, 256, 16) for n in range(COUNT))
        if in_one_call:
            engine.train_batch(data)
        else:
            for batch in data:
                engine.backward(engine(batch))
                engine.step()
        engine.destroy()
        return device.max_memory_allocated()


class TestAlone(DistributedTest):
    world_size = 1

    def test_one_after_the_other(self) -> None:
        # Kills: a stage whose call and loop differ, data that begin anew in every call.
        found = []
        for stage, in_one_call in ((0, False), (0, True), (2, True)):
            data = [(drawn(n, 6), n) for n in range(2 * COUNT)]
            config = {
                **config_of(stage, COUNT),
                "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            }
            config["train_micro_batch_size_per_gpu"] = 1
            engine = deepspeed.initialize(model=seeded(Odd), config=config, training_data=data)[0]
            losses, batches = [], iter(RepeatingLoader(engine.training_dataloader))
            for _ in range(3):
                if in_one_call:
                    losses.append(engine.train_batch())
                    continue
                own = []
                for _ in range(COUNT):
                    own.append(engine(*next(batches)))
                    engine.backward(own[-1])
                    engine.step()
                losses.append(torch.stack(own).detach().mean())
            assert engine.global_steps == 3
            found.append({"losses": torch.stack(losses), **values_of(engine.module)})
            engine.destroy()
        assert same(found[0], found[1]) and same(found[0], found[2])

    def test_memory_of_inputs_alone(self) -> None:
        # Kills: micro-batches that recompute a block at the same time.
        inputs, inside = 256 * 16 * 4, 256 * 1024 * 4
        more = peak(in_one_call=True) - peak(in_one_call=False)
        assert more <= COUNT * 6 * inputs < inside, more

"""No thread of the package outlives the last engine; a process alone starts none."""

import gc
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.comm.watch import lone_waits
from deepspeed.pipe import PipelineModule
from unit.common import DistributedTest
from unit.models import config_of, linears
from unit.one_process import mean_square
from unit.one_process import train as train_on

WIDTH = 4
# A thread that is not told ends by itself when it finds nothing to look at.
LIMIT_S = 5.0
LOOK_S = 0.1


def engine_of(stage: int, is_pipeline: bool = False, **options: Any) -> Any:
    adam = {"type": "Adam", "params": {"lr": 1e-3}}
    config = config_of(stage, 1, optimizer=adam, **options)
    model: Any = linears(2, WIDTH)
    if is_pipeline:
        ranks = dist.get_world_size()
        model = PipelineModule(list(model), num_stages=ranks, loss_fn=nn.MSELoss())
    return deepspeed.initialize(model=model, config=config)[0]


def train(engine: Any, steps: int = 2) -> None:
    x = torch.ones(1, WIDTH, device=engine.device)
    if not isinstance(engine.module, PipelineModule):
        train_on(engine, [x] * steps, mean_square)
        return
    for _ in range(steps):
        engine.train_batch(iter([(x, x)]))


def new_threads(before: set[threading.Thread]) -> list[str]:
    return [thread.name for thread in set(threading.enumerate()) - before]


def soon_none(before: set[threading.Thread]) -> list[str]:
    end = time.monotonic() + LIMIT_S
    while new_threads(before) and time.monotonic() < end:
        time.sleep(0.05)
    return new_threads(before)


class TestAlone(DistributedTest):
    world_size = 1

    @pytest.mark.parametrize("stage", [2, 3])
    def test_nothing_is_started(self, stage: int) -> None:
        # Kills: a thread that looks after ranks that wait for each other, with one rank.
        before = set(threading.enumerate())
        engine = engine_of(stage)
        train(engine)
        assert not new_threads(before)
        del engine


class TestTwo(DistributedTest):
    world_size = 2

    def test_destroy_ends_them(self, tmpdir: Any) -> None:
        # Kills: a thread that outlives the last engine; one that the first of two ends for both.
        before = set(threading.enumerate())
        folder = Path(str(tmpdir))
        for stage in (0, 2, 3):
            saving = {"checkpoint": {"writer": {"type": "fast", "decoupled": True}}}
            first, second = engine_of(stage, **saving), engine_of(stage)
            train(first)
            first.save_checkpoint(folder / str(stage))
            train(first)
            first.destroy()
            train(second)
            second.destroy()
            # At once: who looks at the threads after a test does not wait.
            assert not new_threads(before)
        engine = engine_of(0, is_pipeline=True)
        train(engine)
        engine.destroy()
        assert not new_threads(before)

    @pytest.mark.parametrize("is_pipeline", [False, True])
    def test_so_does_the_end_without_it(self, is_pipeline: bool, monkeypatch: Any) -> None:
        # Kills: threads that end by `destroy` only, and hold what they look after.
        monkeypatch.setattr(lone_waits, "_LOOK_S", LOOK_S)
        before = set(threading.enumerate())
        engine = engine_of(0 if is_pipeline else 3, is_pipeline)
        train(engine)
        del engine
        gc.collect()
        assert not soon_none(before)

    def test_simulated_device(self) -> None:
        before = set(threading.enumerate())
        with simulate():
            engine = engine_of(2)
            train(engine)
            engine.destroy()
        assert not soon_none(before)

    def test_whoever_looks_can_stop_them(self) -> None:
        # What Lightning's tests do with a daemon that is left by an engine that is not destroyed.
        # Kills: a thread that cannot be stopped; one that never comes back.
        before = set(threading.enumerate())
        engine = engine_of(3)
        for _ in range(2):
            train(engine)
            left: Any = set(threading.enumerate()) - before
            assert [thread.name for thread in left] == ["lone waits"]
            for thread in left:
                assert thread.daemon
                thread.stop()
                assert not thread.is_alive()
        engine.destroy()


class TestWithoutGroup(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("ends", [dist.destroy_process_group, None])
    def test_the_group_ends_first(self, ends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        # Kills: a thread that asks a store that is gone.
        monkeypatch.setattr(lone_waits, "_LOOK_S", LOOK_S)
        before = set(threading.enumerate())
        engine = engine_of(3)
        train(engine)
        if ends is not None:
            ends()
            assert not new_threads(before)
        else:
            torch.distributed.destroy_process_group()
            assert not soon_none(before)
        del engine

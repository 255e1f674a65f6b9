"""Ranks that take different ways: who waits says so, and where. Threads that look end in time."""

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed import comm as dist
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.comm.watch import lone_waits
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.checkpointing import folders
from deepspeed.runtime.checkpointing.save_job import SaveJob
from unit.common import DistributedTest
from unit.models import config_of, linears
from unit.one_process import mean_square
from unit.v1.zero.usage import Reports

WIDTH = 4
REPORT_S = 0.5
LATE_S = 1.0
# Of a report, or of a thread that is not told: it ends by itself when it finds nothing to look at.
# Beside more programs than cores each waits for its turn.
LIMIT_S = 5.0 * max(1.0, os.getloadavg()[0] / (4 * (os.cpu_count() or 1)))


@contextmanager
def heard() -> Iterator[Reports]:
    """What the log says meanwhile of waits, which are soon reported."""
    lone_waits.watch.report_s = REPORT_S
    try:
        with Reports(" s for ") as said:
            yield said
    finally:
        lone_waits.watch.report_s = lone_waits.DEFAULT_REPORT_S


def engine_of(stage: int, is_pipeline: bool = False, **options: Any) -> Any:
    adam = {"type": "Adam", "params": {"lr": 1e-3}}
    verify = {"lone_gather_report": REPORT_S}
    # Clipping waits for the norm, which would otherwise be late itself.
    options = {"gradient_clipping": 1.0, "verify": verify, **options}
    config = config_of(stage, 1, optimizer=adam, **options)
    model: Any = linears(2, WIDTH)
    if is_pipeline:
        ranks, loss = dist.get_world_size(), torch.nn.MSELoss()
        model = PipelineModule(list(model), num_stages=ranks, loss_fn=loss)
    return deepspeed.initialize(model=model, config=config)[0]


def train(engine: Any, steps: int = 2) -> None:
    x = torch.ones(1, WIDTH, device=engine.device)
    for _ in range(steps):
        if isinstance(engine.module, PipelineModule):
            engine.train_batch(iter([(x, x)]))
        else:
            step(engine)


def backward(engine: Any) -> None:
    engine.backward(mean_square(engine, torch.ones(1, WIDTH, device=engine.device)))


def step(engine: Any) -> None:
    backward(engine)
    engine.step()


def one_that_is_late(act: Callable[[], Any], what: str, who: str) -> None:
    """Rank 0 does something that rank 1 does later: rank 0 says that it waits, 1 nothing."""
    dist.barrier()
    is_late = dist.get_rank() == 1
    with heard() as said:
        if is_late:
            said.await_others(LIMIT_S)
        started = time.monotonic()
        act()
        ended = time.monotonic()
        assert ended - started < LIMIT_S
        # Nobody else, and nothing else, unless a rank that waited for no one stood so long: on a
        # busy machine one may.
        begun = started if is_late else said.since
        assert len(said()) == (not is_late) or ended - begun > REPORT_S, said()
        for text in said()[: not is_late]:
            assert f"s for {what}, which {who}" in text, text
            assert "test_lone_waits.py" in text
            assert "rank 1 has not waited so long for anything of this kind" in text
            assert "DS_VERIFY=collectives" in text


GRADIENTS = {0: "40 elements of gradients", 2: "the gradients of 0.weight and 3 more parameters"}
NOT_ALL = "not all ranks have joined"


class TestLate(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("stage", [0, 2])
    def test_one_step_more(self, stage: int) -> None:
        # Kills: a reduction, or the norm, that waits in silence.
        engine = engine_of(stage)
        step(engine)
        one_that_is_late(lambda: backward(engine), GRADIENTS[stage], NOT_ALL)
        if stage:
            one_that_is_late(engine.step, "the norm of the gradients", NOT_ALL)
        engine.destroy()

    def test_first_backward_of_several_buckets(self) -> None:
        # Ranks agree before they wait for their buckets.
        zero = {"reduce_bucket_size": WIDTH * WIDTH + WIDTH, "overlap_comm": True}
        engine = engine_of(2, zero_optimization=zero)
        one_that_is_late(lambda: backward(engine), "which gradients arrive late", NOT_ALL)
        engine.destroy()

    @pytest.mark.parametrize("stage", [0, 3])
    def test_saving_and_loading(self, stage: int, tmpdir: Any) -> None:
        # Kills: a save on one rank that waits in silence; a report without who is missing.
        folder, missing = str(tmpdir), "rank 1 has not joined"
        engine = engine_of(stage)
        step(engine)
        one_that_is_late(lambda: engine.save_checkpoint(folder, "a"), "saving a", missing)
        if stage:
            newest = f"looking for the newest checkpoint in {folder}"
            one_that_is_late(lambda: engine.load_checkpoint(folder), newest, missing)
        engine.destroy()

    def test_a_long_write_is_none(self, tmpdir: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        # Kills: ranks reported that wait until another has written; a later wait taken for one.
        engine = engine_of(2)
        step(engine)
        write = SaveJob.write

        def slow(*args: Any) -> Any:
            if dist.get_rank() == 0:
                time.sleep(LATE_S)
            return write(*args)

        with monkeypatch.context() as patch, heard() as said:
            patch.setattr(SaveJob, "write", slow)
            engine.save_checkpoint(str(tmpdir), "a")
            assert not said()
        act = lambda: folders.together(lambda: None, engine.device, "something")  # noqa: E731
        one_that_is_late(act, "something", "rank 1 has not joined")
        engine.destroy()

    def test_pipeline(self) -> None:
        engine = engine_of(0, is_pipeline=True)
        train(engine, 1)
        wait = "gradients of part 1's inputs (rank 1 to rank 0), with rank 1"
        one_that_is_late(lambda: train(engine, 1), wait, NOT_ALL)
        engine.destroy()

    def test_nobody_is_late(self) -> None:
        engine = engine_of(2)
        with heard() as said:
            ended, longest = time.monotonic() + 2 * REPORT_S, 0.0
            # Until rank 0 says so.
            while True:
                begun = time.monotonic()
                step(engine)
                longest = max(longest, time.monotonic() - begun)
                is_over = torch.tensor(float(time.monotonic() > ended))
                dist.broadcast(is_over, 0)
                if is_over:
                    break
            # On a busy machine somebody may be.
            assert not said() or longest > REPORT_S
        engine.destroy()


class TestApart(DistributedTest):
    world_size = 2

    def test_a_save_on_one_rank(self, tmpdir: Any) -> None:
        # The classic hang, which nothing ends: each says for what it waits, and the other one too.
        engine = engine_of(2)
        step(engine)
        with heard() as said:
            # Ranks of a test are ended by nobody.
            end = threading.Timer(3 * LATE_S, dist.process_groups.abort_groups)
            end.start()
            with suppress(RuntimeError):
                if dist.get_rank() == 0:
                    engine.save_checkpoint(str(Path(tmpdir)))
                else:
                    step(engine)
                raise AssertionError("they did not part")
            end.join()
        waits = [
            "saving global_step1, which rank 1 has not joined",
            f"{GRADIENTS[2]}, which not all",
        ]
        others = [GRADIENTS[2], "saving global_step1"]
        own, other = waits[dist.get_rank()], others[dist.get_rank()]
        assert any(f"s for {own}" in text for text in said()), said()
        assert any(f"has last waited so long for {other}" in text for text in said()), said()


def new_threads(before: set[threading.Thread]) -> list[str]:
    return [thread.name for thread in set(threading.enumerate()) - before]


def soon_none(before: set[threading.Thread]) -> list[str]:
    end = time.monotonic() + LIMIT_S
    while new_threads(before) and time.monotonic() < end:
        time.sleep(0.05)
    return new_threads(before)


class TestThreadsAlone(DistributedTest):
    world_size = 1

    @pytest.mark.parametrize("stage", [2, 3])
    def test_nothing_is_started(self, stage: int) -> None:
        # Kills: a thread that looks after ranks that wait for each other, with one rank.
        before = set(threading.enumerate())
        engine = engine_of(stage)
        train(engine)
        assert not new_threads(before)
        del engine


class TestThreads(DistributedTest):
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
        monkeypatch.setattr(lone_waits, "_LOOK_S", 0.1)
        before = set(threading.enumerate())
        engine = engine_of(0 if is_pipeline else 3, is_pipeline)
        train(engine)
        del engine
        gc.collect()
        assert not soon_none(before)

    def test_simulated_device(self) -> None:
        with simulate():
            before = set(threading.enumerate())  # with that of its backward, which stays
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


class TestThreadsWithoutGroup(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("ends", [dist.destroy_process_group, None])
    def test_the_group_ends_first(self, ends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        # Kills: a thread that asks a store that is gone.
        monkeypatch.setattr(lone_waits, "_LOOK_S", 0.1)
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

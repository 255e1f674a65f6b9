"""A rank that fails ends all others within seconds, wherever they wait, with its own traceback; and
so does a stage that fails in forward, in backward or with its data, or that is killed.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.comm.watch import intent
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe import p2p
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.messages import failure
from deepspeed.runtime.pipe.messages.channel import Channel
from deepspeed.runtime.pipe.messages.failure import FailureWatch, PipelinePeerError
from deepspeed.runtime.pipe.p2p import make_channel_groups
from unit.clients.launching import environment
from unit.common import DistributedTest, server
from unit.models import config_of
from unit.rank_server import Job
from unit.v1.pipe.contract.runner import leave_together

HOST = torch.device("cpu")
# What issue 4 promises.
LIMIT_S = 10.0


@contextmanager
def in_time() -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < LIMIT_S


class Spoilt(Exception):
    """What a layer or a data set raises."""


def a_layer_that_fails() -> None:
    """Its name must be in what the other ranks raise."""
    raise Spoilt("the data is spoilt")


def watch_and_channel(src: int, dst: int) -> tuple[FailureWatch, Channel]:
    """A watch of all ranks, and a channel between two."""
    watch = FailureWatch(range(dist.get_world_size()), "test", place=f"stage {dist.get_rank()}")
    (group,) = make_channel_groups([(src, dst)])
    kept = {"group": group, "device": HOST, "dynamic": False, "watch": watch}
    return watch, Channel(src, dst, 0, name="activations", **kept)


def receive(channel: Channel) -> None:
    channel.expect(3)
    channel.recv()


def all_reduce(channel: Channel) -> None:
    dist.all_reduce(torch.ones(4))


def reduce_in_background(channel: Channel) -> None:
    dist.all_reduce(torch.ones(4), async_op=True).wait()


def barrier(channel: Channel) -> None:
    dist.barrier()


def finish_sending(channel: Channel) -> None:
    # From rank 0: nobody receives it.
    kept = {"group": channel._group, "device": HOST, "dynamic": False, "watch": channel._watch}
    back = Channel(0, 1, 7, name="gradients", **kept)
    back.send_like([torch.ones(100_000)])
    back.finish()


def compute(channel: Channel) -> None:
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        torch.ones(64, 64) @ torch.ones(64, 64)
        channel._watch.check()


BLOCKED = (receive, all_reduce, reduce_in_background, barrier, finish_sending, compute)


class TestTwoRanks(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize(
        "blocked, checks", [*((one, False) for one in BLOCKED), (receive, True), (all_reduce, True)]
    )
    def test_the_one_that_waits_raises_the_others_traceback(
        self, blocked: Callable[[Channel], None], checks: bool
    ) -> None:
        # Kills: a watch that wakes only transfers or only collectives, or only ranks that were
        # blocked when it looked; a traceback that stays on its rank; a rank that waits on the
        # intent check's store, where no connection can be closed, until its time limit.
        if checks:
            intent.enable(30.0)
        watch, channel = watch_and_channel(1, 0)
        with in_time():
            if dist.get_rank() == 1:
                with pytest.raises(Spoilt, match="spoilt"), watch.guard():
                    a_layer_that_fails()
            else:
                with pytest.raises(PipelinePeerError) as caught, watch.guard():
                    blocked(channel)
                words = ("rank 1 (stage 1) failed", "a_layer_that_fails", "Spoilt: the data is")
                for part in (*words, "test_failure.py"):
                    assert part in str(caught.value)
            # The engine is unusable from now on, on both ranks, for the same reason.
            with pytest.raises(PipelinePeerError, match="rank 1 .stage 1. failed"), watch.guard():
                raise AssertionError("a failed watch must not be entered")
            with pytest.raises(PipelinePeerError, match="spoilt"):
                watch.check()
        intent.disable()
        leave_together()

    def test_a_second_engine_is_not_poisoned(self) -> None:
        first, _ = watch_and_channel(1, 0)
        with pytest.raises(Spoilt), first.guard():
            a_layer_that_fails()
        second, channel = watch_and_channel(1, 0)
        with second.guard():
            if dist.get_rank() == 1:
                channel.send(torch.ones(2))
            else:
                assert channel.recv().tolist() == [1, 1]
            channel.finish()
        with pytest.raises(PipelinePeerError):
            first.check()

    def test_a_long_batch_without_failure_raises_nothing(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Longer than several looks of the thread, one rank blocked all the time; and the groups
        # still work afterwards.
        monkeypatch.setattr(failure, "LOOK_S", 0.08)
        watch, channel = watch_and_channel(1, 0)
        for _ in range(2):
            with watch.guard():
                if dist.get_rank() == 1:
                    end = time.monotonic() + 0.3
                    while time.monotonic() < end:
                        torch.ones(64, 64) @ torch.ones(64, 64)
                    channel.send(torch.ones(2))
                else:
                    channel.recv()
                channel.finish()
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == 2
        # Kills: a guard that takes every RuntimeError for a lost connection.
        with pytest.raises(RuntimeError, match="mat1 and mat2"), watch.guard():
            torch.ones(2, 3) @ torch.ones(2, 3)


class TestThreeRanks(DistributedTest):
    world_size = 3

    def test_every_rank_raises_wherever_it_is(self) -> None:
        # Rank 2 fails; rank 0 waits for its message, and rank 1 for rank 0 in a collective that
        # rank 2 has no part in.
        watch, channel = watch_and_channel(2, 0)
        pair, rank = dist.new_group([0, 1]), dist.get_rank()
        raised = Spoilt if rank == 2 else PipelinePeerError
        with in_time(), pytest.raises(raised, match="spoilt"), watch.guard():
            if rank == 2:
                a_layer_that_fails()
            elif rank == 0:
                channel.recv()
            else:
                dist.all_reduce(torch.ones(2), group=pair)
        leave_together()

    def test_connections_are_closed_that_the_other_side_keeps_open(self) -> None:
        # Kills: waking only who waits for the first rank of a group, or stopping at a connection
        # that is closed already.
        rank, store = dist.get_rank(), dist.get_store()
        store.set(f"rank {rank} is connected", "1")
        if rank == 1:
            store.wait(["rank 0 is connected", "rank 2 is connected"])  # or they could not join
            dist.abort_groups()
            store.set("rank 1 has closed", "1")
        elif rank == 0:
            store.wait(["rank 1 has closed"])
            work = dist.irecv(torch.empty(3), 2)
            thread = threading.Thread(target=dist.abort_groups)
            thread.start()
            with pytest.raises(RuntimeError) as caught:
                work.wait()
            thread.join()
            assert dist.is_connection_error(caught.value)
        leave_together()


def begin_to_receive(channel: Channel) -> None:
    channel.recv()


def begin_to_send(channel: Channel) -> None:
    channel.send_like([torch.ones(4)])


def end_sending(channel: Channel) -> None:
    channel.send_like([torch.ones(4)])
    channel.finish()


def end_a_thread_that_sends(channel: Channel) -> None:
    end_sending(channel)


def wait_for_ranks(work: Any) -> None:
    work.wait()


def join(store: str, directory: Path, ends: int = 0) -> int:
    """This rank of three on two processes, of which the first one's child is rank `ends`, so that
    it can end as it likes. Rank 0 hosts the store.
    """
    rank = [rank for rank in range(3) if rank != ends][dist.get_local_rank()]
    if dist.get_local_rank() == 0 and os.fork() == 0:
        rank = ends
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    address = f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}"
    meeting = f"file://{directory}/store" if store == "file" else address
    dist.init_distributed("gloo", init_method=meeting, rank=rank, world_size=3, verbose=False)
    return rank


def lose_rank_0(rank: int) -> None:
    """Rank 0 is killed; the others go on when it is gone."""
    store = dist.get_store()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    elif rank == 1:
        os.wait()
        store.set("gone", "1")
    store.wait(["gone"])


class OneThatEnds(DistributedTest):
    world_size = 2
    init_distributed = False

    def join(self, store: str, directory: Path) -> tuple[int, FailureWatch, Channel]:
        rank = join(store, directory)
        watch, channel = watch_and_channel(0, 1)
        dist.barrier()
        return rank, watch, channel

    @contextmanager
    def raising(self, watch: FailureWatch, words: str = "without a word") -> Iterator[Any]:
        """The last thing that a rank does."""
        with pytest.raises(PipelinePeerError, match=words) as caught, watch.guard():
            yield caught
        dist.destroy_process_group()

    def work(self, rank: int, channel: Channel, end: Callable[[], None]) -> None:
        if rank == 0:
            end()
        elif rank == 1:
            channel.recv()
        else:
            dist.all_reduce(torch.ones(2))


class TestLost(OneThatEnds):
    """What is said when gloo's own words come first: before the rank waits, or where nobody
    watches.
    """

    @pytest.mark.parametrize(
        ("attempt", "watched"),
        [
            (begin_to_receive, True),
            (begin_to_receive, False),
            (begin_to_send, True),
            (end_sending, True),
            (end_a_thread_that_sends, True),
            (end_a_thread_that_sends, False),
        ],
    )
    def test_every_attempt_names_the_lost_rank(
        self,
        attempt: Callable[[Channel], None],
        watched: bool,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        # Kills: naming it only where a transfer is waited for.
        if attempt is end_a_thread_that_sends:
            monkeypatch.setattr(f"{Channel.__module__}.HELD_TRANSFERS", 0)
        rank, watch, channel = self.join("file", tmp_path)
        lose_rank_0(rank)
        if rank == 2:
            dist.destroy_process_group()
            return
        if attempt is not begin_to_receive:
            channel.src, channel.dst = 1, 0
        if not watched:
            channel._watch = None
        with self.raising(watch) as caught:
            attempt(channel)
            channel.finish()  # a transfer may begin while gloo has not noticed yet
        assert "rank 1" in str(caught.value)
        assert "lost its connection in activations, with rank 0" in str(caught.value)

    def test_upstreams_functions_name_it(self, tmp_path: Path) -> None:
        rank, _, _ = self.join("file", tmp_path)
        lose_rank_0(rank)
        places = {"get_stage_id": lambda: 1, "stage_to_global": lambda stage_id: 0}
        grid = SimpleNamespace(pipe_parallel_size=2, **places)
        if rank == 1:
            p2p.init_process_groups(grid)
            value = torch.ones(4)
            attempts: dict[str, Callable[[], Any]] = {
                "send": lambda: p2p.send(value, 0),
                "recv": lambda: p2p.recv(value, 0),
                "recv ": lambda: p2p.recv(value, 0, async_op=True).wait(),
                "send ": lambda: (p2p.send(value, 0, async_op=True), p2p.wait()),
                "send_obj": lambda: p2p.send_obj(1, 0),
                "recv_obj": lambda: p2p.recv_obj(0),
            }
            for name, attempt in attempts.items():
                with pytest.raises(PipelinePeerError, match="without a word") as caught:
                    attempt()
                assert f"lost its connection in {name.strip()}, with rank 0" in str(caught.value)
        dist.destroy_process_group()

    @pytest.mark.parametrize("waits_later", [False, True])
    def test_a_collective_names_its_ranks_or_its_line(
        self, waits_later: bool, tmp_path: Path
    ) -> None:
        rank, watch, _ = self.join("file", tmp_path)
        lose_rank_0(rank)
        with self.raising(watch) as caught:
            handle = dist.all_reduce(torch.ones(2), async_op=waits_later)
            wait_for_ranks(handle)
        line = f"in wait_for_ranks ({__file__}"
        words = line if waits_later else "in all_reduce, with ranks [0, 1, 2]"
        assert words in str(caught.value)

    def test_who_was_not_first_to_speak_says_its_own(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Kills: a rank that knows which one is lost, and repeats another's words only.
        rank, watch, channel = self.join("file", tmp_path)
        lose_rank_0(rank)
        monkeypatch.setattr(failure, "_NAMELESS_S", 0.0)
        monkeypatch.setattr(failure, "_NOTE_S", 0.0 if rank == 2 else 30.0)
        with self.raising(watch) as caught:
            dist.broadcast(torch.ones(2), 0) if rank == 2 else channel.recv()
        assert "rank 2 (stage 2) lost its connection in broadcast" in str(caught.value)
        own = "; rank 1 (stage 1) lost its connection in activations, with rank 0"
        assert (own in str(caught.value)) == (rank == 1)


class TestEnded(OneThatEnds):
    @pytest.mark.parametrize("store", ["file", "tcp"])
    def test_a_killed_process_ends_the_others(self, store: str, tmp_path: Path) -> None:
        # Kills: waiting for a note that a killed process cannot leave, or for a store gone with it.
        rank, watch, channel = self.join(store, tmp_path)
        with self.raising(watch) as caught:
            self.work(rank, channel, lambda: os.kill(os.getpid(), signal.SIGKILL))
        if store == "file":
            own = {1: "in activations, with rank 0", 2: "in all_reduce, with ranks [0, 1, 2]"}
            assert own[1] in str(caught.value) or own[rank] in str(caught.value)

    def test_a_process_that_ends_at_once_is_heard(self, tmp_path: Path) -> None:
        # Kills: a rank that takes the store with it before the others have read its traceback.
        rank, watch, channel = self.join("tcp", tmp_path)
        try:
            with self.raising(watch, "spoilt"):
                self.work(rank, channel, a_layer_that_fails)
        finally:
            if rank == 0:
                os._exit(0)


# -- of an engine ----------------------------------------------------------------------------------

WIDTH, ROWS, MICRO_BATCHES = 4, 2, 3


class Fragile(nn.Linear):
    """Fails in forward or backward, once it is told to."""

    fails_in = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails_in == "forward":
            self.a_forward_that_fails()
        if self.fails_in == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        y = super().forward(x)
        if self.fails_in == "backward":
            y.register_hook(self.a_backward_that_fails)
        return y

    def a_forward_that_fails(self) -> None:
        raise Spoilt("in forward")

    def a_backward_that_fails(self, grad: torch.Tensor) -> None:
        raise Spoilt("in backward")


def start(num_stages: int, schedule: str) -> PipelineEngine:
    """An engine that has taken a step, on all ranks."""
    layers = [Fragile(WIDTH, WIDTH) for _ in range(4)]
    how = {"loss_fn": nn.MSELoss(), "partition_method": "uniform"}
    sgd = {"type": "SGD", "params": {"lr": 0.1}}
    pipeline = {"schedule": schedule}
    config = config_of(1, ROWS, MICRO_BATCHES, optimizer=sgd, pipeline=pipeline)
    module = PipelineModule(layers, num_stages=num_stages, **how)
    engine: PipelineEngine = deepspeed.initialize(model=module, config=config)[0]
    engine.train_batch(data(False))
    dist.barrier()  # a failure in the next batch would end ranks that are still in this one
    return engine


def fail_in(engine: PipelineEngine, where: str) -> None:
    for layer in engine.module.children():
        layer.fails_in = where


def data(fails: bool) -> Iterator[Any]:
    for micro in range(1000):
        if fails and micro == 1:
            a_data_set_that_fails()
        yield torch.ones(ROWS, WIDTH), torch.zeros(ROWS, WIDTH)


def a_data_set_that_fails() -> None:
    raise Spoilt("in the data iterator")


def fail(num_stages: int, stage: int, where: str, schedule: str = "1f1b") -> None:
    """Train; the first rank of `stage` fails at `where`; every rank must say so in time."""
    engine = start(num_stages, schedule)
    is_culprit = engine.stage_id == stage and engine.grid.data_parallel_id == 0
    if is_culprit:
        fail_in(engine, where)
    with in_time(), pytest.raises(Spoilt if is_culprit else PipelinePeerError) as caught:
        engine.train_batch(data(is_culprit and where == "data"))
    if not is_culprit:
        culprit = engine.grid.topology().get_rank(pipe=stage, data=0)
        place = "a_data_set_that_fails" if where == "data" else f"a_{where}_that_fails"
        told = (f"rank {culprit} (stage {stage}) failed", place, "Spoilt: in", "test_failure.py")
        for part in told:
            assert part in str(caught.value), str(caught.value)
    # Again: the engine is unusable, at once and for the same reason.
    with pytest.raises(PipelinePeerError, match="Spoilt"):
        engine.train_batch(data(False))
    leave_together()


class TestTwoStages(DistributedTest):
    world_size = 2

    # Kills: a guard that does not cover the data iterator or autograd's threads; a neighbour that
    # waits for the next message.
    @pytest.mark.parametrize("stage", [0, 1])
    @pytest.mark.parametrize("where", ["forward", "backward", "data"])
    def test_either_stage(self, stage: int, where: str) -> None:
        fail(2, stage, where, "zero_bubble" if stage == 0 else "1f1b")


class TestFourRanks(DistributedTest):
    world_size = 4

    # Kills: telling neighbours only; ranks beyond wait for what these do not send. Watching one
    # pipeline of two; the other's ranks wait in the all-reduce over data ranks, or for the norm.
    @pytest.mark.parametrize(
        "stages, stage, where",
        [
            (4, 0, "data"),
            (4, 1, "forward"),
            (4, 2, "backward"),
            (4, 3, "data"),
            (4, 3, "forward"),
            (2, 0, "backward"),
            (2, 1, "forward"),
            (2, 1, "data"),
        ],
    )
    def test_any_stage(self, stages: int, stage: int, where: str) -> None:
        fail(stages, stage, where)


class TestKilled(DistributedTest):
    world_size = 2
    init_distributed = False

    @pytest.mark.parametrize("stage", [1, 2])
    def test_a_killed_stage_ends_the_others(self, stage: int, tmp_path: Path) -> None:
        # Kills: waiting for a note that a killed process cannot leave, or for a store gone with it.
        rank = join("file", tmp_path, ends=stage)
        try:
            engine = start(3, "1f1b")
            fail_in(engine, "killed" if rank == stage else "")
            with in_time(), pytest.raises(PipelinePeerError, match="without a word"):
                engine.train_batch(data(False))
        finally:
            if rank == stage:
                os.kill(os.getpid(), signal.SIGKILL)
        dist.destroy_process_group()


SCRIPT = """
import time
from unit.v1.pipe.test_failure import data, fail_in, start
import deepspeed
deepspeed.init_distributed("gloo", verbose=False)
engine = start(2, "1f1b")
print("one step is done", flush=True)
print("at", time.time(), flush=True)
if engine.stage_id == 1:
    fail_in(engine, "forward")
engine.train_batch(data(False))
print("never printed", flush=True)
"""


def test_through_the_launcher(tmp_path: Path) -> None:
    # Kills: a run that hangs, an exit code of 0, output without the reason.
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    words = ["-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", "0"]
    call = {"argv": [*words, str(script)], "cwd": tmp_path, "environment": environment()}
    (run,) = server.run(Job(("unit.clients.launching", "run_launcher"), call, 1, 100.0))
    ended, output = time.time(), run.output
    assert run.text.endswith("SystemExit: 1\n"), (run.text, output)
    assert output.count("one step is done") == 2 and "never printed" not in output, output
    assert ended - max(map(float, re.findall(r" at (\d+\.\d+)$", output, re.MULTILINE))) < LIMIT_S
    assert "a_forward_that_fails" in output and "Spoilt: in forward" in output, output

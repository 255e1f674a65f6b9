"""A rank that fails ends all others within seconds, wherever they wait, with its own traceback."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed import comm as dist
from deepspeed.comm.watch import intent
from deepspeed.runtime.pipe import p2p
from deepspeed.runtime.pipe.messages import failure
from deepspeed.runtime.pipe.messages.failure import FailureWatch, PipelinePeerError
from deepspeed.runtime.pipe.p2p import Channel, make_channel_groups
from unit.common import DistributedTest

# What issue 4 promises.
LIMIT_S = 10.0


class Broken(Exception):
    """What a layer raises."""


def a_layer_that_fails() -> None:
    """Its name must be in what the other ranks raise."""
    raise Broken("the data is spoilt")


def watch_and_channel() -> tuple[FailureWatch, Channel]:
    """A watch of all ranks, and a channel from the last rank to the first."""
    world = dist.get_world_size()
    watch = FailureWatch(range(world), "test", place=f"stage {dist.get_rank()}")
    (group,) = make_channel_groups([(world - 1, 0)])
    host = torch.device("cpu")
    return watch, Channel(
        world - 1, 0, 0, group=group, device=host, dynamic=False, name="activations", watch=watch
    )


def end_of_world() -> None:
    """Leave together: a rank that failed stays connected until the others have noticed, so that
    only the watch can tell them.

    The connections are closed then: the harness's barrier at the end of a test would have nothing
    to run on.
    """
    store = dist.get_store()
    store.set(f"noticed/{dist.get_rank()}", "1")
    store.wait([f"noticed/{rank}" for rank in range(dist.get_world_size())])
    dist.destroy_process_group()


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
    back = Channel(
        0,
        1,
        7,
        group=channel._group,
        device=torch.device("cpu"),
        dynamic=False,
        name="gradients",
        watch=channel._watch,
    )
    back.send_like([torch.ones(100_000)])
    back.finish()


class TestTwoRanks(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize(
        "blocked", [receive, all_reduce, reduce_in_background, barrier, finish_sending]
    )
    def test_the_one_that_waits_raises_the_others_traceback(
        self, blocked: Callable[[Channel], None]
    ) -> None:
        # Kills: a watch that wakes only transfers or only collectives; a traceback that stays on
        # its rank.
        watch, channel = watch_and_channel()
        started = time.monotonic()
        if dist.get_rank() == 1:
            with pytest.raises(Broken, match="spoilt"), watch.guard():
                a_layer_that_fails()
        else:
            with pytest.raises(PipelinePeerError) as caught, watch.guard():
                blocked(channel)
            for part in (
                "rank 1 (stage 1) failed",
                "a_layer_that_fails",
                "Broken: the data is spoilt",
                "test_failure.py",
            ):
                assert part in str(caught.value)
        # The engine is unusable from now on, on both ranks, for the same reason.
        with pytest.raises(PipelinePeerError, match="rank 1 .stage 1. failed"), watch.guard():
            raise AssertionError("a failed watch must not be entered")
        with pytest.raises(PipelinePeerError, match="spoilt"):
            watch.check()
        assert time.monotonic() - started < LIMIT_S
        end_of_world()

    @pytest.mark.parametrize("blocked", [receive, all_reduce])
    def test_the_intent_check_lets_go_too(self, blocked: Callable[[Channel], None]) -> None:
        # Kills: a rank that waits on the check's store, where no connection can be closed, until
        # its time limit.
        intent.enable(30.0)
        watch, channel = watch_and_channel()
        started = time.monotonic()
        rank = dist.get_rank()
        with (
            pytest.raises(PipelinePeerError if rank == 0 else Broken, match="spoilt"),
            watch.guard(),
        ):
            blocked(channel) if rank == 0 else a_layer_that_fails()
        assert time.monotonic() - started < LIMIT_S
        intent.disable()
        end_of_world()

    def test_the_one_that_computes_raises_at_its_next_message(self) -> None:
        # Kills: a thread that ends operations only of ranks that were blocked when it looked.
        watch, channel = watch_and_channel()
        if dist.get_rank() == 1:
            with pytest.raises(Broken), watch.guard():
                a_layer_that_fails()
        else:
            with pytest.raises(PipelinePeerError, match="spoilt"), watch.guard():
                end = time.monotonic() + LIMIT_S
                while time.monotonic() < end:
                    torch.ones(64, 64) @ torch.ones(64, 64)
                    watch.check()
        end_of_world()

    def test_a_second_engine_is_not_poisoned(self) -> None:
        first, _ = watch_and_channel()
        with pytest.raises(Broken), first.guard():
            a_layer_that_fails()
        second, channel = watch_and_channel()
        with second.guard():
            if dist.get_rank() == 1:
                channel.send(torch.ones(2))
            else:
                assert channel.recv().tolist() == [1, 1]
            channel.finish()
        with pytest.raises(PipelinePeerError):
            first.check()

    def test_a_long_batch_without_failure_raises_nothing(self) -> None:
        # Longer than several looks of the thread, one rank blocked all the time; and the groups
        # still work afterwards.
        watch, channel = watch_and_channel()
        for _ in range(2):
            with watch.guard():
                if dist.get_rank() == 1:
                    end = time.monotonic() + 0.8
                    while time.monotonic() < end:
                        torch.ones(64, 64) @ torch.ones(64, 64)
                    channel.send(torch.ones(2))
                else:
                    channel.recv()
                channel.finish()
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == 2

    def test_an_error_of_the_rank_itself_keeps_its_type(self) -> None:
        # Kills: a guard that takes every RuntimeError for a lost connection.
        watch, _ = watch_and_channel()
        with pytest.raises(RuntimeError, match="mat1 and mat2"), watch.guard():
            torch.ones(2, 3) @ torch.ones(2, 3)


class TestThreeRanks(DistributedTest):
    world_size = 3

    def test_every_rank_raises_wherever_it_is(self) -> None:
        # Rank 2 fails; rank 0 waits for its message, and rank 1 for rank 0 in a collective that
        # rank 2 has no part in.
        watch, channel = watch_and_channel()
        pair = dist.new_group([0, 1])
        rank = dist.get_rank()
        started = time.monotonic()
        with (
            pytest.raises(Broken if rank == 2 else PipelinePeerError, match="spoilt"),
            watch.guard(),
        ):
            if rank == 2:
                a_layer_that_fails()
            elif rank == 0:
                channel.recv()
            else:
                dist.all_reduce(torch.ones(2), group=pair)
        assert time.monotonic() - started < LIMIT_S
        end_of_world()

    def test_connections_are_closed_that_the_other_side_keeps_open(self) -> None:
        # Kills: waking only who waits for the first rank of a group, or stopping at a connection
        # that is closed already.
        rank, store = dist.get_rank(), dist.get_store()
        if rank == 1:
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
        end_of_world()


def begin_to_receive(channel: Channel) -> None:
    channel.recv()


def begin_to_send(channel: Channel) -> None:
    channel.send_like([torch.ones(4)])


def end_sending(channel: Channel) -> None:
    channel.send_like([torch.ones(4)])
    channel.finish()


def end_a_thread_that_sends(channel: Channel) -> None:
    end_sending(channel)


class OneThatEnds(DistributedTest):
    """Rank 0 is a child of the first process of the test, so that it can end as it likes. It hosts
    the store.
    """

    world_size = 2
    init_distributed = False

    def join(self, store: str, directory: Path) -> tuple[int, FailureWatch, Channel]:
        rank = 1 + dist.get_local_rank()
        if rank == 1 and os.fork() == 0:
            rank = 0
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        meeting = (
            f"file://{directory}/store"
            if store == "file"
            else f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}"
        )
        dist.init_distributed("gloo", init_method=meeting, rank=rank, world_size=3, verbose=False)
        watch = FailureWatch(range(3), "test", place=f"stage {rank}")
        (group,) = make_channel_groups([(0, 1)])
        host = torch.device("cpu")
        channel = Channel(
            0, 1, 0, group=group, device=host, dynamic=False, name="activations", watch=watch
        )
        dist.barrier()
        return rank, watch, channel

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
        if rank == 1:
            if attempt is not begin_to_receive:
                channel.src, channel.dst = 1, 0
            if not watched:
                channel._watch = None
            with pytest.raises(PipelinePeerError, match="without a word") as caught, watch.guard():
                attempt(channel)
                channel.finish()  # a transfer may begin while gloo has not noticed yet
            assert "rank 1" in str(caught.value)
            assert "lost its connection in activations, with rank 0" in str(caught.value)
        dist.destroy_process_group()

    def test_upstreams_functions_name_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rank, _, _ = self.join("file", tmp_path)
        lose_rank_0(rank)
        grid = SimpleNamespace(
            get_stage_id=lambda: 1, pipe_parallel_size=2, stage_to_global=lambda stage_id: 0
        )
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

    def test_a_collective_names_its_ranks(self, tmp_path: Path) -> None:
        rank, watch, _ = self.join("file", tmp_path)
        lose_rank_0(rank)
        with pytest.raises(PipelinePeerError, match="without a word") as caught, watch.guard():
            dist.all_reduce(torch.ones(2))
        assert "in all_reduce, with ranks [0, 1, 2]" in str(caught.value)
        dist.destroy_process_group()

    def test_a_handle_of_a_collective_names_its_line(self, tmp_path: Path) -> None:
        rank, watch, _ = self.join("file", tmp_path)
        lose_rank_0(rank)
        with pytest.raises(PipelinePeerError, match="without a word") as caught, watch.guard():
            wait_for_ranks(dist.all_reduce(torch.ones(2), async_op=True))
        assert f"in wait_for_ranks ({__file__}" in str(caught.value)
        dist.destroy_process_group()

    def test_who_was_not_first_to_speak_says_its_own(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Kills: a rank that knows which one is lost, and repeats another's words only.
        rank, watch, channel = self.join("file", tmp_path)
        lose_rank_0(rank)
        monkeypatch.setattr(failure, "_NAMELESS_S", 0.0)
        monkeypatch.setattr(failure, "_NOTE_S", 0.0 if rank == 2 else 30.0)
        with pytest.raises(PipelinePeerError, match="without a word") as caught, watch.guard():
            dist.broadcast(torch.ones(2), 0) if rank == 2 else channel.recv()
        assert "rank 2 (stage 2) lost its connection in broadcast" in str(caught.value)
        own = "; rank 1 (stage 1) lost its connection in activations, with rank 0"
        assert (own in str(caught.value)) == (rank == 1)
        dist.destroy_process_group()


def lose_rank_0(rank: int) -> None:
    """Rank 0 is killed; the others go on when it is gone."""
    store = dist.get_store()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    elif rank == 1:
        os.wait()
        store.set("gone", "1")
    store.wait(["gone"])


def wait_for_ranks(work: Any) -> None:
    work.wait()


class TestEnded(OneThatEnds):
    @pytest.mark.parametrize("store", ["file", "tcp"])
    def test_a_killed_process_ends_the_others(self, store: str, tmp_path: Path) -> None:
        # Kills: waiting for a note that a killed process cannot leave, or for a store gone with it.
        rank, watch, channel = self.join(store, tmp_path)
        with pytest.raises(PipelinePeerError, match="without a word") as caught, watch.guard():
            self.work(rank, channel, lambda: os.kill(os.getpid(), signal.SIGKILL))
        if store == "file":
            own = {1: "in activations, with rank 0", 2: "in all_reduce, with ranks [0, 1, 2]"}
            assert own[1] in str(caught.value) or own[rank] in str(caught.value)
        dist.destroy_process_group()

    def test_a_process_that_ends_at_once_is_heard(self, tmp_path: Path) -> None:
        # Kills: a rank that takes the store with it before the others have read its traceback.
        rank, watch, channel = self.join("tcp", tmp_path)
        try:
            with pytest.raises(PipelinePeerError, match="spoilt"), watch.guard():
                self.work(rank, channel, a_layer_that_fails)
        finally:
            if rank == 0:
                os._exit(0)
        dist.destroy_process_group()

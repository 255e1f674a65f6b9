"""The intent check on real ranks: each kind of divergence is named on every rank, and nothing that
is right is.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import ones

from deepspeed import comm as dist
from deepspeed.comm.shard_ops import gather_from_owners, reduce_to_owners
from deepspeed.comm.watch import intent, observation
from deepspeed.comm.watch.intent import CollectiveMismatchError
from deepspeed.comm.watch.intent.check import IntentCheck
from unit.common import DistributedTest

HERE = "test_intent.py"


@contextmanager
def checked(timeout_s: float = 20.0) -> Iterator[None]:
    """The check is on; what a failed test leaves behind is not."""
    intent.enable(timeout_s)
    try:
        yield
    finally:
        intent.disable()


def failure_of(act: Callable[[], Any], timeout_s: float = 20.0) -> str:
    """The text with which this rank fails, as every one must, within seconds."""
    started = time.monotonic()
    with checked(timeout_s), pytest.raises(CollectiveMismatchError) as failed:
        act()
    assert time.monotonic() - started < 8.0
    return str(failed.value)


def on(rank: int) -> bool:
    return dist.get_rank() == rank


DTYPES = (torch.float32, torch.bfloat16)
OPS = (dist.ReduceOp.SUM, dist.ReduceOp.MAX)
ONE, TWO, THREE = (f"float32[{numel}]" for numel in (1, 2, 3))
OTHER_ARGUMENTS = [
    (lambda r: dist.all_reduce(ones(4 + r)), "shape", "float32[4]", "float32[5]"),
    (lambda r: dist.all_reduce(ones(4, dtype=DTYPES[r])), "dtype", "float32", "bfloat16"),
    (lambda r: dist.all_reduce(ones(1), op=OPS[r]), "reduction", "SUM", "MAX"),
    (lambda r: dist.reduce(ones(1), dst=r), "root", "to rank 0", "to rank 1"),
    (lambda r: dist.broadcast(ones(1), src=r), "root", "from rank 0", "from rank 1"),
    (lambda r: dist.all_reduce_coalesced([ones(1)] * (r + 1)), "shape", f"{ONE} ", f"{ONE}, {ONE}"),
    (lambda r: dist.all_gather_into_tensor(ones(4), ones(4 - 2 * r)), "shape", "float32[4]", TWO),
    (
        lambda r: dist.broadcast_object_list([None] * (r + 1), 0),
        *("count", "of 1 objects", "of 2 objects"),
    ),
]
HANDED = [
    (
        lambda r: dist.all_to_all_single(ones(4), ones(4), None, [1, 3] if r else None),
        *(1, "1 x float32", 0, "2 x float32"),
    ),
    (lambda r: dist.all_gather([ones(2), ones(3)], ones(2)), 1, TWO, 0, THREE),
    (lambda r: dist.reduce_scatter(ones(2), [ones(2), ones(3)]), 0, THREE, 1, TWO),
    (lambda r: dist.gather(ones(1 + r), None if r else [ones(1), ones(1)]), 1, TWO, 0, ONE),
    (lambda r: dist.scatter(ones(1), None if r else [ones(1), ones(2)]), 0, TWO, 1, ONE),
    (lambda r: dist.all_to_all([ones(1), ones(1)], [ones(1), ones(1 + r)]), 1, TWO, 1, ONE),
]


class TestTwo(DistributedTest):
    world_size = 2

    def test_another_operation(self) -> None:
        def act() -> None:
            dist.broadcast(ones(4), 0) if on(1) else dist.all_reduce(ones(4))

        text = failure_of(act)
        assert "the operation differs" in text
        assert "rank 0: all_reduce(SUM) of float32[4] at " in text
        assert "rank 1: broadcast from rank 0 of float32[4] at " in text
        assert text.count(f"{HERE}:") == 2 and "in act" in text

    @pytest.mark.parametrize("act, fact, zero, one", OTHER_ARGUMENTS)
    def test_the_same_call_with_other_arguments(
        self, act: Callable[[int], Any], fact: str, zero: str, one: str
    ) -> None:
        text = failure_of(lambda: act(dist.get_rank()))
        assert f"the {fact} differs" in text
        lines = {line.split(":")[0].strip(): line for line in text.splitlines()[1:]}
        assert zero in lines["rank 0"] and one in lines["rank 1"] and "The call is the same" in text

    @pytest.mark.parametrize("act, giver, given, taker, expected", HANDED)
    def test_what_one_hands_is_not_what_the_other_expects(
        self, act: Callable[[int], Any], giver: int, given: str, taker: int, expected: str
    ) -> None:
        text = f"rank {giver} hands {given} to rank {taker}, which expects {expected}"
        assert text in failure_of(lambda: act(dist.get_rank()))

    def test_one_rank_skips(self) -> None:
        def act() -> None:
            for step in range(3):
                if not (step == 2 and on(1)):
                    dist.all_reduce(ones(2))
                dist.all_reduce(ones(2))

        text = failure_of(act)
        # The same operation on the same shapes: only the call sites, and the program's habit, tell.
        assert "collective 4 of their group: the call sites differ" in text
        assert "rank 1 skipped it or is one ahead: the last time" in text
        assert "all ranks, before:" in text

    def test_one_rank_does_one_twice(self) -> None:
        def act() -> None:
            for _ in range(1 + on(1)):
                dist.all_reduce(ones(2))
            dist.broadcast(ones(2), 0)

        assert "rank 1 does the one before once more" in failure_of(act)

    def test_two_groups_in_another_order(self) -> None:
        first, second = dist.new_group([0, 1]), dist.new_group([0, 1])

        def act() -> None:
            for group in (first, second) if on(0) else (second, first):
                dist.all_reduce(ones(2), group=group)

        # Long before the limit: ranks that wait for each other need not wait for that.
        text = failure_of(act, timeout_s=60.0)
        assert "wait for each other" in text and text.count("waits in all_reduce") == 2

    def test_one_rank_never_comes(self) -> None:
        with checked(timeout_s=0.6):
            dist.all_reduce(ones(3))
            if on(0):
                with pytest.raises(CollectiveMismatchError) as failed:
                    dist.barrier()
                text = str(failed.value)
                assert "rank 1 did not come within 0.6 s" in text
                assert "rank 0 waits in barrier" in text
                last = "its last collective was all_reduce(SUM) of float32[3]"
                assert f"rank 1 is elsewhere; {last}" in text
                assert "raise verify.collectives_timeout" in text
            meet_unchecked()
            # It comes after all: everybody fails alike, and again.
            for _ in range(2):
                late = r"rank 1 did not come within 0\.6 s"
                with pytest.raises(CollectiveMismatchError, match=late):
                    dist.barrier()

    def test_a_leader_that_ends_before_it_answers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(*args: Any) -> None:
            raise MemoryError

        if on(0):
            monkeypatch.setattr(IntentCheck, "_compare", broken)
        with checked(60.0):
            with pytest.raises(MemoryError if on(0) else CollectiveMismatchError) as failed:
                dist.barrier()
            if on(0):
                intent.disable()  # as at its end
            else:
                assert "rank 0 ended and will not come" in str(failed.value)

    def test_one_rank_switched_it_off(self) -> None:
        intent.enable(60.0)
        dist.all_reduce(ones(1))
        if on(1):
            intent.disable()
            return
        off = "rank 1 has switched the check off; its last collective was all_red"
        with pytest.raises(CollectiveMismatchError, match=off):
            dist.all_reduce(ones(1))
        intent.disable()

    def test_messages_that_do_not_match(self) -> None:
        def act() -> None:
            if on(0):
                dist.isend(ones(4), 1, tag=2).wait()
            else:
                dist.irecv(ones(2), 0, tag=2).wait()

        text = failure_of(act)
        assert "ranks 0 and 1 do not agree" in text or "ranks 1 and 0 do not agree" in text
        assert "message number 0 between them with tag 2" in text
        assert "rank 0: isend of float32[4] to rank 1 at " in text
        assert "rank 1: irecv of float32[2] from rank 0 at " in text

    @pytest.mark.parametrize("late", [0, 1])
    def test_blocking_messages_that_do_not_match(self, late: int) -> None:
        before = num_keys()
        meet_unchecked()

        def act() -> None:
            # Either side may come second: wait until the other's note is there.
            while on(late) and num_keys() == before:
                pass
            if on(0):
                dist.send(ones(4), 1)
            else:
                dist.recv(ones(4, dtype=torch.int32), 0)

        text = failure_of(act)
        assert "float32[4]" in text and "int32[4]" in text

    def test_both_receive_first(self) -> None:
        other = 1 - dist.get_rank()

        def act() -> None:
            dist.recv(ones(1), other)
            dist.send(ones(1), other)

        assert "wait for each other" in failure_of(act, timeout_s=60.0)

    def test_a_message_against_a_collective(self) -> None:
        def act() -> None:
            dist.recv(ones(1), 1) if on(0) else dist.barrier()

        text = failure_of(act, timeout_s=60.0)
        assert "wait for each other" in text and "waits in recv of float32[1] from rank 1" in text
        assert "waits in barrier" in text


def meet_unchecked() -> None:
    """A barrier past the check."""
    import torch.distributed

    torch.distributed.barrier()


class TestThree(DistributedTest):
    world_size = 3

    def test_all_ranks_are_told_and_the_odd_one_is_named(self) -> None:
        def act() -> None:
            dist.barrier() if on(1) else dist.all_reduce(ones(1))

        text = failure_of(act)
        assert "ranks 0, 2: all_reduce" in text and "rank 1: barrier" in text
        assert "rank 1 skipped it" in text

    def test_divergence_in_a_subgroup_reaches_the_rank_outside(self) -> None:
        group = dist.new_group([1, 2])

        def act() -> None:
            if not on(0):
                dist.all_reduce(ones(dist.get_rank()), group=group)
            dist.barrier()

        text = failure_of(act)
        differ = "are about to do different things in collective 0 of their group"
        assert f"ranks [1, 2] {differ}: the shape differs" in text

    def test_a_circle_over_three_groups(self) -> None:
        pairs = [dist.new_group(ranks) for ranks in ([0, 1], [1, 2], [0, 2])]
        order = {0: (0, 2), 1: (1, 0), 2: (2, 1)}[dist.get_rank()]

        def act() -> None:
            for which in order:
                dist.all_reduce(ones(1), group=pairs[which])

        text = failure_of(act, timeout_s=60.0)
        assert "wait for each other" in text and text.count("waits in") == 3

    def test_what_is_right_passes(self) -> None:
        """Everything that legitimately differs between ranks: roots' lists, uneven lists and
        splits, branches at barriers.
        """
        rank, world = dist.get_rank(), 3
        pair = dist.new_group([0, 2])
        with checked():
            for _ in range(3):
                dist.all_reduce(ones(2), async_op=True).wait()
                dist.broadcast(ones(2), 0) if rank == 0 else dist.broadcast(torch.zeros(2), 0)
                if rank == 1:
                    dist.barrier()
                if rank != 1:
                    dist.barrier()
                uneven = torch.empty(world * rank)
                own = torch.full((3,), float(rank))
                dist.all_to_all_single(uneven, own, [rank] * world, [0, 1, 2])
                assert uneven.tolist() == [0.0] * rank + [1.0] * rank + [2.0] * rank
                collected = [torch.empty(2) for _ in range(world)] if rank == 1 else None
                dist.gather(ones(2), collected, dst=1)
                dist.scatter(ones(2), collected, src=1)
                everyone: list[Any] = [None] * world
                dist.all_gather_object(everyone, {"rank": rank, "text": "x" * rank})
                assert [entry["rank"] for entry in everyone] == [0, 1, 2]
                if rank != 1:
                    dist.all_reduce(ones(1), group=pair)
            self._shards(rank)

    @staticmethod
    def _shards(rank: int) -> None:
        work = reduce_to_owners(torch.arange(6.0), async_op=True)
        assert sum(piece.sum().item() for piece in work.wait()) == [3.0, 15.0, 27.0][rank]
        flat = torch.zeros(6)
        flat[2 * rank : 2 * rank + 2] = rank + 1.0
        for by_broadcast in (False, True):
            gather_from_owners(flat, by_broadcast=by_broadcast)
            assert flat.tolist() == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]

    def test_receiving_from_anyone_is_left_alone(self) -> None:
        with checked():
            if on(0):
                assert {dist.recv(torch.zeros(1), None) for _ in range(4)} == {1, 2}
            else:
                for _ in range(2):
                    dist.send(ones(1), 0)
            dist.barrier()

    def test_notes_do_not_pile_up(self) -> None:
        """A long run must not fill the store."""
        with checked():
            counts = []
            for _ in range(3):
                for _ in range(20):
                    dist.all_reduce(ones(1))
                    reduce_to_owners(ones(3))
                dist.barrier()
                counts.append(num_keys())
                dist.barrier()
        # A barrier's own notes are still there, or are not, when the count is taken.
        assert max(counts) - min(counts) <= 6


def num_keys() -> int:
    from deepspeed.comm.process_groups import get_store

    return int(get_store().num_keys())


def test_limits_are_positive() -> None:
    with pytest.raises(ValueError, match=r"collectives_timeout \(timeout_s\) is 0"):
        intent.enable(0)
    assert not intent.is_enabled()


def test_nothing_remains_when_it_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    # A simulated device that ran in this process before listens for as long as the process lives.
    monkeypatch.setattr(observation, "chain", None)
    intent.enable()
    intent.enable(5.0)
    assert intent.is_enabled() and observation.chain is not None
    intent.disable()
    intent.disable()
    assert not intent.is_enabled() and observation.chain is None

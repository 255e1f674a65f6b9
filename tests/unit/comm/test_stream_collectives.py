"""Collectives of the simulated device: ordered by streams, never deadlocking, right numbers."""

from typing import Any

import pytest
import torch

from deepspeed import comm as dist
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.comm.shard_ops import gather_from_owners, reduce_to_owners
from unit.common import DistributedTest


class TestOrder(DistributedTest):
    """An asynchronous operation waits for the stream at the call, and is waited for by streams."""

    world_size = 2

    def test_handle_makes_the_current_stream_wait(self) -> None:
        # Kills: a collective that is done before its handle was waited for, and a wait that orders
        # nothing.
        with simulate() as sim:
            value = torch.full((4,), float(dist.get_rank() + 1))
            gathered = torch.empty(8)
            work = dist.all_gather_into_tensor(gathered, value, async_op=True)
            assert not work.is_completed()
            assert gathered.isnan().all().item()
            work.wait()
            assert gathered.tolist() == [1.0] * 4 + [2.0] * 4
            sim.synchronize()
            assert work.is_completed()

    def test_reads_what_the_calling_stream_made(self) -> None:
        # Kills: a collective that waits for the default stream, or that doesn't wait, and a
        # simulation begun after the process group that leaves collectives off the streams.
        with simulate() as sim:
            side = sim.Stream()
            with sim.stream(side):
                ordered = torch.ones(3) * 2
                dist.all_reduce(ordered)
            with sim.stream(sim.Stream()):
                racing = torch.ones(3) * 2
            dist.all_reduce(racing)
            assert racing.isnan().all().item()
            sim.current_stream().wait_stream(side)
            assert ordered.tolist() == [4.0] * 3

    def test_ranks_that_force_different_operations_meet(self) -> None:
        # Kills: starting operations in the order in which they are forced.
        with simulate() as sim:
            streams = [sim.Stream() for _ in range(2)]
            values = [torch.full((3,), float(index + 1)) for index in range(2)]
            groups = [dist.new_group([0, 1]) for _ in range(2)]
            for stream, value, group in zip(streams, values, groups, strict=True):
                stream.wait_stream(sim.default_stream())
                with sim.stream(stream):
                    dist.all_reduce(value, group=group)
            streams[dist.get_rank()].synchronize()
            sim.synchronize()
            assert [value.tolist() for value in values] == [[2.0] * 3, [4.0] * 3]

    def test_pairs_that_send_before_they_receive_meet(self) -> None:
        # Kills: point-to-point operations that are started one by one.
        with simulate():
            rank, other = dist.get_rank(), 1 - dist.get_rank()
            sent, received = torch.full((1000,), float(rank)), torch.empty(1000)
            works = [dist.isend(sent, other), dist.irecv(received, other)]
            for work in works:
                work.wait()
            assert received.tolist() == [float(other)] * 1000


def everything(rank: int) -> list[torch.Tensor]:
    """Every collective once, on this rank's numbers."""
    mine = torch.arange(6.0) + 10 * rank
    out: list[Any] = [mine.clone() for _ in range(3)]
    dist.all_reduce(out[0])
    dist.broadcast(out[1], src=1)
    dist.all_reduce_coalesced([out[2], extra := mine.clone()], op=dist.ReduceOp.MAX)
    halves = [torch.zeros(3), torch.zeros(3)]
    dist.reduce_scatter_tensor(halves[0], mine.clone())
    dist.all_to_all_single(exchanged := torch.zeros(6), mine.clone())
    dist.all_gather(lists := [torch.zeros(6), torch.zeros(6)], mine)
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, rank)
    reduced = torch.stack(reduce_to_owners(mine.clone()).wait()).sum(0)
    gathered = torch.full((6,), -1.0)
    gathered[3 * rank : 3 * rank + 3] = float(rank)
    gather_from_owners(gathered)
    return [*out, extra, halves[0], exchanged, *lists, torch.tensor(objects), gathered, reduced]


class TestResults(DistributedTest):
    """The same numbers as over the host backend alone."""

    world_size = 2

    @pytest.mark.parametrize("schedule", [0, 1, 2])
    def test_every_operation(self, schedule: int) -> None:
        # Kills: outputs stored in the wrong tensor, an operation that the host backend gets
        # wrongly.
        rank = dist.get_rank()
        expected = everything(rank)
        with simulate(schedule=schedule):
            found = [value.clone() for value in everything(rank)]
        for index, (wanted, value) in enumerate(zip(expected, found, strict=True)):
            assert torch.equal(wanted, value), f"result {index}: {value} is not {wanted}"

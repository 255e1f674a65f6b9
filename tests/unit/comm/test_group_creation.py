"""Groups are made by who is in them: few calls in any world, and nobody waits for nobody."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from deepspeed import comm as dist
from deepspeed.comm import group_creation, group_store, process_groups, rank_lists
from deepspeed.comm.parallel_map import ParallelMap, make_mesh
from deepspeed.comm.process_groups import _connected_again
from deepspeed.runtime.pipe import p2p
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology
from unit.common import DistributedTest

WORLDS = (8, 64, 512, 4096)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[int]]]:
    """The ranks of every group that torch is asked for."""
    made: list[list[int]] = []
    original = torch_dist.new_group

    def recorded(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        made.append(ranks)
        return original(ranks, *args, **kwargs)

    monkeypatch.setattr(torch_dist, "new_group", recorded)
    yield made
    if torch_dist.is_initialized():
        torch_dist.destroy_process_group()
    group_store.forget()


def begin(world: int, rank: int) -> None:
    torch_dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())


def grid(world: int) -> None:
    PipelineParallelGrid(PipeModelDataParallelTopology(2, 2, world // 4))


def channels(world: int) -> None:
    """Those of 4 stages with two model chunks, of all pipelines."""
    pipelines = [range(first, world, world // 4) for first in range(world // 4)]
    pairs = []
    for ranks in pipelines:
        for before, behind in zip(ranks, [*ranks[1:], ranks[0]], strict=True):
            pairs += [(before, behind), (behind, before)]
    groups = p2p._make_channel_groups(pairs, torch.device("cpu"))
    own = dist.get_rank()
    assert [group is not None for group in groups] == [own in pair for pair in pairs]


def experts_and_instances(world: int) -> None:
    plain = ParallelMap()
    plain.make_experts(4)
    plain.optimizer_instances(2)


def sequences(world: int) -> None:
    mesh = make_mesh(world // 4, 4)
    assert ParallelMap(mesh=mesh).sequence.size == 4


@pytest.mark.parametrize(
    "make, count",
    # The grid: data, pipe, tensor, one copy of the model. Channels: two kinds of two neighbours;
    # none of the ranks makes one for others.
    [(grid, 4), (channels, 4), (experts_and_instances, 4), (sequences, 2)],
)
def test_calls_do_not_grow_with_the_world(
    calls: list[list[int]], monkeypatch: pytest.MonkeyPatch, make: Callable[[int], None], count: int
) -> None:
    # Kills: a rank that makes other ranks' groups, or a group for itself alone.
    monkeypatch.setattr(p2p, "transfers_are_ordered", lambda device: True)
    for world in WORLDS:
        for rank in (0, world // 2 + 1):
            calls.clear()
            begin(world, rank)
            make(world)
            assert len(calls) == count, f"world {world}: {len(calls)}"
            assert all(rank in ranks and 1 < len(ranks) for ranks in calls)
            torch_dist.destroy_process_group()
            group_store.forget()


def test_an_axis_of_one_rank_costs_one_call(calls: list[list[int]]) -> None:
    # Kills: groups of one for every rank of the world, and for every axis.
    begin(64, 7)
    PipelineParallelGrid(PipeModelDataParallelTopology(1, 1, 64))
    ParallelMap().tensor.group  # noqa: B018  # makes the group
    assert calls == [[7]]


def test_options_of_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    # Kills: a receive that waits on as many processors as its backend likes; options for a backend
    # that does not have them.
    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self.config = SimpleNamespace(min_ctas=0, max_ctas=0)

    nccl = SimpleNamespace(Options=Options)
    monkeypatch.setattr(torch_dist, "ProcessGroupNCCL", nccl, raising=False)
    monkeypatch.setattr(process_groups, "get_backend_name", lambda group=None: "gloo")
    assert process_groups.message_options() is None
    monkeypatch.setattr(process_groups, "get_backend_name", lambda group=None: "nccl")
    options = process_groups.message_options()
    assert options.is_high_priority_stream
    assert (options.config.min_ctas, options.config.max_ctas) == (1, process_groups.MESSAGE_CTAS)
    assert options._timeout == process_groups._group_timeout


class TestUneven(DistributedTest):
    """Ranks that are in different numbers of groups."""

    world_size = 4

    def test_meet(self) -> None:
        # Kills: members that take torch's names for the same and wait under different ones.
        rank = dist.get_rank()
        torch_dist.new_group([0, 1, 2])
        torch_dist.new_group([2])
        chain = [[0, 1], [2, 3]], [[1, 2]], [[0, 3]], [[1, 3]], [[0, 1, 2, 3]], [[0, 1], [2, 3]]
        for division in chain:
            group = group_creation.make_own(division)
            own = next((ranks for ranks in division if rank in ranks), None)
            assert (group is None) == (own is None)
            if own is not None:
                value = torch.tensor([rank])
                dist.all_reduce(value, group=group)
                assert value.item() == sum(own)
                assert dist.get_all_ranks_from_group(group) == own

    def test_scripts_make_groups_after_it(self) -> None:
        # Kills: newer torch's count of groups that differs between members and others, by which
        # it names groups that all ranks make.
        group_creation.make_own([[0, 1]])
        later = torch_dist.new_group([1, 2])
        if dist.get_rank() in (1, 2):
            value = torch.ones(1)
            torch_dist.all_reduce(value, group=later)
            assert value.item() == 2.0

    def test_names_are_used_once(self) -> None:
        # Kills: a name that is free again after a group was destroyed, with what is left of its
        # members' meeting in the store.
        first = group_creation.make_own([[0, 1], [2, 3]])
        group_creation.make_own([[0, 1], [2, 3]])
        dist.destroy_process_group(first)
        third = group_creation.make_own([[0, 1], [2, 3]])
        value = torch.ones(1)
        dist.all_reduce(value, group=third)
        assert value.item() == 2.0

    def test_mesh(self) -> None:
        # Kills: an axis of the mesh with another axis's groups.
        mesh = dist.initialize_mesh_device((2, 2), ("rows", "columns"))
        rank = dist.get_rank()
        rows, columns = (mesh.get_group(mesh_dim=name) for name in ("rows", "columns"))
        assert dist.get_all_ranks_from_group(rows) == [rank % 2, rank % 2 + 2]
        assert dist.get_all_ranks_from_group(columns) == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert mesh.get_local_rank("rows") == rank // 2 and mesh.size() == 4
        value = torch.tensor([rank])
        dist.all_reduce(value, group=rows)
        assert value.item() == 2 * (rank % 2) + 2


def test_lists_of_ranks() -> None:
    # Instances are consecutive replicas. Kills: strided ones; groups across of different places.
    split = rank_lists.optimizer_instances([(0, 2, 4, 6), (1, 3, 5, 7)], 2)
    assert split.rows == [[0, 2], [4, 6], [1, 3], [5, 7]]
    assert split.columns == [[0, 4], [2, 6], [1, 5], [3, 7]]
    # Data groups beside sequences take one place of each.
    assert rank_lists.beside_sequences([(0, 1), (2, 3), (4, 5)]) == [[0, 2, 4], [1, 3, 5]]
    with pytest.raises(ValueError, match=r"different sizes, \[1, 2\]"):
        rank_lists.beside_sequences([(0, 1), (2,)])
    # A partition is told in one order.
    assert rank_lists.partition_of([[2, 3], (0, 1), (2, 3), [0, 1]]) == [(0, 1), (2, 3)]
    assert rank_lists.holding(3, [[0, 1], [2, 3]]) == [2, 3]


@pytest.mark.parametrize(
    "sharded, blocks",
    [(True, [(0, 2), (1, 3), (4, 6), (5, 7)]), (False, [(0, 1, 2, 3), (4, 5, 6, 7)])],
)
def test_blocks_of_experts(sharded: bool, blocks: list[tuple[int, ...]]) -> None:
    # Two stages of two data by two tensor ranks. Kills: tokens of other slices, or of other stages,
    # in one sum.
    replicas = [(0, 2), (1, 3), (0, 2), (1, 3), (4, 6), (5, 7), (4, 6), (5, 7)]
    slices = [(0, 1), (0, 1), (2, 3), (2, 3), (4, 5), (4, 5), (6, 7), (6, 7)]
    assert rank_lists.expert_blocks(list(zip(replicas, slices, strict=True)), sharded) == blocks


def test_a_store_of_old_torch_is_connected_to_again(tmp_path: Path) -> None:
    """Kills: a second connection without the first's prefixes, which finds an earlier attempt's."""
    server = torch_dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def attempt(number: int) -> torch_dist.Store:
        return torch_dist.PrefixStore("group", torch_dist.PrefixStore(f"attempt{number}", server))

    ranks = [_connected_again(attempt(number)) for number in (1, 1, 2, 2)]
    ranks[0].set("key", "of the first attempt")
    assert ranks[1].get("key") == b"of the first attempt"
    assert [rank.check(["key"]) for rank in ranks] == [True, True, False, False]
    assert not attempt(1).check(["key"])
    # One without a server stays as it is.
    file = torch_dist.PrefixStore("group", torch_dist.FileStore(str(tmp_path / "store"), 1))
    assert _connected_again(file) is file

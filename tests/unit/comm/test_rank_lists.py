"""How ranks divide into groups, and connections to the store in which they meet, without any
process group; expert groups are in v1/moe.
"""

from pathlib import Path

import pytest
import torch.distributed as torch_dist

from deepspeed.comm import rank_lists
from deepspeed.comm.process_groups import _connected_again


def test_optimizer_instances_are_consecutive_replicas() -> None:
    # Kills: strided instances; groups across of different places.
    split = rank_lists.optimizer_instances([(0, 2, 4, 6), (1, 3, 5, 7)], 2)
    assert split.rows == [[0, 2], [4, 6], [1, 3], [5, 7]]
    assert split.columns == [[0, 4], [2, 6], [1, 5], [3, 7]]


def test_data_groups_beside_sequences_take_one_place_of_each() -> None:
    assert rank_lists.beside_sequences([(0, 1), (2, 3), (4, 5)]) == [[0, 2, 4], [1, 3, 5]]
    with pytest.raises(ValueError, match=r"different sizes, \[1, 2\]"):
        rank_lists.beside_sequences([(0, 1), (2,)])


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


def test_a_partition_is_told_in_one_order() -> None:
    assert rank_lists.partition_of([[2, 3], (0, 1), (2, 3), [0, 1]]) == [(0, 1), (2, 3)]
    assert rank_lists.holding(3, [[0, 1], [2, 3]]) == [2, 3]


def test_a_store_of_old_torch_is_connected_to_again() -> None:
    """Kills: a second connection without the first's prefixes, which finds an earlier attempt's."""
    server = torch_dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def attempt(number: int) -> torch_dist.Store:
        return torch_dist.PrefixStore("group", torch_dist.PrefixStore(f"attempt{number}", server))

    ranks = [_connected_again(attempt(number)) for number in (1, 1, 2, 2)]
    ranks[0].set("key", "of the first attempt")
    assert ranks[1].get("key") == b"of the first attempt"
    assert [rank.check(["key"]) for rank in ranks] == [True, True, False, False]
    assert not attempt(1).check(["key"])


def test_a_store_without_a_server_stays_as_it_is(tmp_path: Path) -> None:
    file = torch_dist.PrefixStore("group", torch_dist.FileStore(str(tmp_path / "store"), 1))
    assert _connected_again(file) is file

"""How ranks divide into groups, without any process group; expert groups are in v1/moe."""

import pytest

from deepspeed.comm import rank_lists


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

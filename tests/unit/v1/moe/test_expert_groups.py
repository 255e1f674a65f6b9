"""Which ranks hold different experts, and which hold the same ones."""

import pytest

from deepspeed import comm as dist
from deepspeed.comm import rank_lists
from deepspeed.utils import groups
from unit.common import DistributedTest
from unit.v1.tensor.megatron import Mpu


@pytest.mark.parametrize(
    "blocks, ep_size, data_first, expert, data",
    [
        ([(0, 1, 2, 3)], 2, False, [[0, 1], [2, 3]], [[0, 2], [1, 3]]),
        ([(0, 1, 2, 3)], 2, True, [[0, 2], [1, 3]], [[0, 1], [2, 3]]),
        ([(0, 1, 2, 3)], 4, False, [[0, 1, 2, 3]], [[0], [1], [2], [3]]),
        ([(0, 1, 2, 3)], 1, False, [[0], [1], [2], [3]], [[0, 1, 2, 3]]),
        # Two tensor ranks with four data ranks each.
        (
            [(0, 2, 4, 6), (1, 3, 5, 7)],
            2,
            False,
            [[0, 2], [4, 6], [1, 3], [5, 7]],
            [[0, 4], [2, 6], [1, 5], [3, 7]],
        ),
        (
            [(0, 2, 4, 6), (1, 3, 5, 7)],
            2,
            True,
            [[0, 4], [2, 6], [1, 5], [3, 7]],
            [[0, 2], [4, 6], [1, 3], [5, 7]],
        ),
    ],
)
def test_rank_lists(
    blocks: list[tuple[int, ...]],
    ep_size: int,
    data_first: bool,
    expert: list[list[int]],
    data: list[list[int]],
) -> None:
    # Kills: swapped orders, strides over the world instead of over the block. The lists are
    # upstream's.
    assert rank_lists.expert_groups(blocks, ep_size, data_first) == (expert, data)


@pytest.mark.parametrize("ep_size", [0, -1, 3])
def test_sizes_that_do_not_divide_are_refused(ep_size: int) -> None:
    with pytest.raises(ValueError, match=f"ep_size={ep_size} does not divide the 4 ranks"):
        rank_lists.expert_groups([(0, 1, 2, 3)], ep_size, False)


class TestExpertGroups(DistributedTest):
    world_size = 4

    @pytest.mark.parametrize("ep_size", [1, 2, 4])
    def test_cover_the_data_ranks(self, ep_size: int) -> None:
        name = f"ep_size_{ep_size}"
        with pytest.raises(KeyError, match=f"no expert groups '{name}'"):
            groups._get_expert_parallel_group(name)
        groups.initialize(ep_size=ep_size)
        groups._create_expert_and_data_parallel(ep_size)
        rank = dist.get_rank()
        assert groups._get_expert_parallel_group_ranks(name) == list(
            range(rank // ep_size * ep_size, rank // ep_size * ep_size + ep_size)
        )
        assert groups._get_expert_data_parallel_group_ranks(name) == list(
            range(rank % ep_size, 4, ep_size)
        )
        assert groups._get_expert_parallel_world_size(name) == ep_size
        assert groups._get_expert_data_parallel_world_size(name) == 4 // ep_size
        assert groups._get_expert_parallel_rank(name) == rank % ep_size
        assert groups._get_expert_data_parallel_rank(name) == rank // ep_size
        assert groups._get_expert_parallel_src_rank(name) == rank // ep_size * ep_size
        assert groups._get_expert_broadcast_src_rank(name) == rank % ep_size
        assert (
            groups._get_max_expert_size() == ep_size and groups._get_max_expert_size_name() == name
        )
        assert (
            groups._get_max_expert_parallel_group()
            is groups._get_expert_parallel_group_dict()[name]
        )

    def test_are_made_once_and_under_one_setting(self) -> None:
        groups._create_expert_and_data_parallel(2)
        first = groups._get_expert_parallel_group("ep_size_2")
        groups._create_expert_and_data_parallel(2)
        assert groups._get_expert_parallel_group("ep_size_2") is first
        # Kills: silently keeping the first order, under which another rank holds the experts.
        with pytest.raises(ValueError, match="use_data_before_expert_parallel_=False"):
            groups._create_expert_and_data_parallel(2, use_data_before_expert_parallel_=True)
        with pytest.raises(ValueError, match="ep_size=3 does not divide"):
            groups.initialize(ep_size=3)

    @pytest.mark.parametrize("sharded", [False, True])
    def test_beside_tensor_parallelism(self, sharded: bool) -> None:
        rank = dist.get_rank()
        mpu = Mpu(2)
        groups.initialize(mpu=mpu)
        if sharded:
            groups._create_expert_data_and_model_parallel(2, mpu)
            assert groups._get_expert_parallel_group_ranks("ep_size_2") == [rank % 2, rank % 2 + 2]
            assert groups._get_expert_data_parallel_group_ranks("ep_size_2") == [rank]
        else:
            # Tensor ranks hold different tokens of one batch: their experts' gradients are parts of
            # one sum.
            groups._create_expert_and_data_parallel(2)
            assert groups._get_expert_parallel_group_ranks("ep_size_2") == [
                rank // 2 * 2,
                rank // 2 * 2 + 1,
            ]
            assert groups._get_expert_data_parallel_group_ranks("ep_size_2") == [
                rank % 2,
                rank % 2 + 2,
            ]

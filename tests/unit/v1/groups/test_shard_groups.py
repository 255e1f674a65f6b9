"""Groups of ranks that share shards, as upstream's `zero.mics_utils` makes them for scripts."""

import importlib
from typing import Any

import pytest
import torch

from deepspeed import comm as dist
from unit.common import DistributedTest


class TestShardGroups(DistributedTest):
    world_size = 4

    def test_places_and_sums(self) -> None:
        # Made without a file: type checkers do not know it.
        utils: Any = importlib.import_module("deepspeed.runtime.zero.mics_utils")
        rank = dist.get_rank()
        for size, shards, copies in ((4, 6, 0), (2, 1 if rank < 2 else 5, 2 + 2 * (rank % 2))):
            made = utils.create_mics_comm_groups(size, None)
            assert (made.param_shard_size, made.param_shard_rank) == (size, rank % size)
            assert (made.param_repli_size, made.param_repli_rank) == (4 // size, rank // size)
            # Kills: groups of every second rank where neighbours share shards.
            value = torch.tensor(float(rank))
            dist.all_reduce(value, group=made.param_shard_group)
            assert value == shards
            if size == 4:
                assert made.param_repli_group is None
                continue
            value = torch.tensor(float(rank))
            dist.all_reduce(value, group=made.param_repli_group)
            assert value == copies
        tensors = [torch.full((3,), 6.0), torch.ones(())]
        utils.scale_tensors(tensors, 4)
        assert tensors[0].tolist() == [1.5] * 3 and tensors[1] == 0.25
        with pytest.raises(ValueError, match=r"shard_size=3\): 4 data-parallel ranks"):
            utils.create_mics_comm_groups(3, None)
        with pytest.raises(ValueError, match="hierarchical_allgather=True"):
            utils.create_mics_comm_groups(2, None, hierarchical_allgather=True)

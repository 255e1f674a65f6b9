# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

import pytest
import torch

from deepspeed import comm as dist
from deepspeed.sequence.layer import single_all_to_all
from unit.common import DistributedTest

SEQUENCE, BATCH, HEADS, WIDTH = 6, 3, 4, 2


class TestAllToAllLayout(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("batch_dim_idx", [0, 1])
    def test_there_and_back(self, batch_dim_idx):
        sequence_dim = 1 - batch_dim_idx
        shape = ([SEQUENCE, BATCH, HEADS, WIDTH] if batch_dim_idx else [BATCH, SEQUENCE, HEADS, WIDTH])
        whole = torch.arange(SEQUENCE * BATCH * HEADS * WIDTH, dtype=torch.float).view(shape)
        group, rank = dist.new_group([0, 1]), dist.get_rank()
        mine = whole.chunk(2, dim=sequence_dim)[rank].contiguous()

        heads = single_all_to_all(mine, 2, sequence_dim, batch_dim_idx, group)
        assert torch.equal(heads, whole.chunk(2, dim=2)[rank])
        back = single_all_to_all(heads, sequence_dim, 2, batch_dim_idx, group)
        assert back.shape == mine.shape
        assert torch.equal(back, mine)

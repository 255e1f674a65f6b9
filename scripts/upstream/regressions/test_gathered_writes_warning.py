# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

from unittest import mock

import pytest
import torch

import deepspeed
from unit.common import DistributedTest


class TestGatheredWritesWarning(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize(
        "modifier_rank,write,warned",
        [(None, True, True), (None, False, False), (0, True, False)],
        ids=["lost", "read", "kept"],
    )
    def test(self, modifier_rank, write, warned):
        with deepspeed.zero.Init(config_dict_or_path={"train_batch_size": 2, "zero_optimization": {"stage": 3}}):
            layer = torch.nn.Linear(4, 4)
        with mock.patch("deepspeed.runtime.zero.partition_parameters.logger.warning") as warning:
            with (
                    deepspeed.zero.GatheredParameters(layer.weight, modifier_rank=modifier_rank),
                    torch.no_grad(),
            ):
                before = layer.weight.clone()
                if write:
                    layer.weight.fill_(3.0)
        said = [call.args[0] for call in warning.call_args_list if "modifier_rank" in str(call.args[0])]
        assert len(said) == int(warned)
        with deepspeed.zero.GatheredParameters(layer.weight):
            kept = torch.equal(layer.weight, torch.full_like(before, 3.0))
        assert kept == (write and not warned)

"""How ranks come to share sequences: mesh_param, configuration keys, and what contradicts."""

from typing import Any

import pytest
import torch

import deepspeed
from deepspeed import comm as dist
from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.utils import groups
from unit.common import DistributedTest
from unit.v1.sequence.test_training import make_mpu


def initialize(**more: Any) -> Any:
    """An engine of one linear layer."""
    model = torch.nn.Linear(3, 2)
    config = {"train_micro_batch_size_per_gpu": 1, **more.pop("config", {})}
    return deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), config=config, **more
    )[0]


class TestSetup(DistributedTest):
    world_size = 4

    def test_mesh_and_configuration_make_the_same_groups(self) -> None:
        # Kills: a mesh that outlives its engine, so that a later engine without one halves its
        # batch unnoticed.
        rank = dist.get_rank()
        for more in (
            {"mesh_param": (2, 2)},
            {"config": {"sequence_parallel_size": 2, "data_parallel_size": 2}},
        ):
            engine = initialize(**more)
            assert dist.get_all_ranks_from_group(groups._get_sequence_parallel_group()) == [
                rank // 2 * 2,
                rank // 2 * 2 + 1,
            ]
            assert groups._get_data_parallel_group_ranks() == [rank % 2, rank % 2 + 2]
            assert engine.train_batch_size() == 2 and engine.dp_world_size == 2
            engine.destroy()
            assert groups.mesh_device is None
        assert initialize().train_batch_size() == 4

    def test_upstreams_module_is_an_mpu(self) -> None:
        # Kills: getters of other groups than the engine's; what only a mesh could say.
        with pytest.raises(RuntimeError, match="call .*initialize_sequence_parallel"):
            parallel_state_sp.get_sequence_parallel_rank()
        with pytest.raises(AttributeError, match="hold the whole model"):
            parallel_state_sp.get_model_parallel_rank  # noqa: B018
        parallel_state_sp.initialize_sequence_parallel(2)
        rank = dist.get_rank()
        of_all = parallel_state_sp.get_sequence_data_parallel_group()
        assert dist.get_all_ranks_from_group(of_all) == [0, 1, 2, 3]
        assert parallel_state_sp.get_sequence_data_parallel_rank() == rank
        assert parallel_state_sp.get_sequence_data_parallel_world_size() == 4
        engine = initialize(mpu=parallel_state_sp)
        group = groups._get_sequence_parallel_group()
        assert group is parallel_state_sp.get_sequence_parallel_group()
        assert dist.get_all_ranks_from_group(group) == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert parallel_state_sp.get_sequence_parallel_world_size() == 2
        assert parallel_state_sp.get_sequence_parallel_rank() == rank % 2
        assert engine.train_batch_size() == 2 and engine.dp_world_size == 2
        engine.destroy()

    def test_ranks_of_a_sequence_get_the_same_samples(self) -> None:
        engine = initialize(mesh_param=(2, 2))
        loader = engine.deepspeed_io(list(range(8)))
        drawn = torch.cat(list(loader))
        everywhere = [torch.empty_like(drawn) for _ in range(4)]
        dist.all_gather(everywhere, drawn)
        assert torch.equal(everywhere[0], everywhere[1]) and torch.equal(
            everywhere[2], everywhere[3]
        )
        assert sorted(torch.cat(everywhere[::2]).tolist()) == list(range(8))
        engine.destroy()

    def test_contradictions_name_both_numbers(self) -> None:
        # All before a collective of one rank alone: no rank waits.
        mpu = make_mpu(2, 2)
        for error, match, more in (
            (ValueError, "2 data-parallel times 3 .* there are 4 ranks", {"mesh_param": (2, 3)}),
            (
                ValueError,
                r"expected \(data parallel ranks, sequence parallel ranks\), got \(4,\)",
                {"mesh_param": (4,)},
            ),
            (ValueError, "beside an mpu", {"mesh_param": (2, 2), "mpu": mpu}),
            (
                DeepSpeedConfigError,
                "sequence_parallel_size: 3 does not divide the 4",
                {"config": {"sequence_parallel_size": 3}},
            ),
            (
                DeepSpeedConfigError,
                "sequence_parallel_size: 4, but the mesh has 2",
                {"mesh_param": (2, 2), "config": {"sequence_parallel_size": 4}},
            ),
            (
                DeepSpeedConfigError,
                "but the mpu has 2",
                {"mpu": mpu, "config": {"sequence_parallel_size": 4}},
            ),
            (
                DeepSpeedConfigError,
                "data_parallel_size: 4, but there are 2 data-parallel ranks",
                {"config": {"sequence_parallel_size": 2, "data_parallel_size": 4}},
            ),
        ):
            with pytest.raises(error, match=match):
                initialize(**more)

    def test_gradients_travel_in_the_type_of_its_own_key(self) -> None:
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "communication_data_type": "bf16",
        }
        assert DeepSpeedConfig(config).communication_data_type == torch.bfloat16
        assert (
            DeepSpeedConfig({**config, "sequence_parallel_size": 2}).communication_data_type
            == torch.float32
        )
        half = {
            **config,
            "sequence_parallel_size": 2,
            "seq_parallel_communication_data_type": "bf16",
        }
        assert DeepSpeedConfig(half).communication_data_type == torch.bfloat16

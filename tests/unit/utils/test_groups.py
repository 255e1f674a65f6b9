"""Parallel groups: plain data parallelism, an external mpu, a mesh."""

from types import SimpleNamespace
from typing import Any

import pytest

from deepspeed import comm as dist
from deepspeed.utils import groups
from deepspeed.utils.bwc import bwc_tensor_model_parallel_world_size
from unit.common import DistributedTest


class TestPlain(DistributedTest):
    world_size = 2

    def test_all_ranks_share_the_data(self) -> None:
        assert groups._get_data_parallel_group() is dist.get_world_group()
        assert groups.get_data_parallel_world_size() == 2
        assert groups.get_data_parallel_rank() == dist.get_rank()
        assert groups._get_data_parallel_group_ranks() == [0, 1]
        assert groups._get_sequence_data_parallel_group() is dist.get_world_group()
        assert groups._get_sequence_data_parallel_world_size() == 2
        assert groups._get_sequence_data_parallel_rank() == dist.get_rank()
        assert groups._get_broadcast_src_rank() == 0

    def test_everything_else_is_alone(self) -> None:
        assert groups._get_model_parallel_world_size() == 1
        assert groups.get_tensor_model_parallel_world_size() == 1
        assert groups._get_model_parallel_rank() == groups.get_tensor_model_parallel_rank() == 0
        group = groups.get_model_parallel_group()
        assert group is groups.get_tensor_model_parallel_group()
        assert group is groups._get_model_parallel_group()
        assert dist.get_all_ranks_from_group(group) == [dist.get_rank()]
        assert groups.get_tensor_model_parallel_src_rank() == dist.get_rank()
        assert groups._get_sequence_parallel_world_size() == 1
        assert groups._get_sequence_parallel_rank() == 0
        with pytest.raises(KeyError, match="get_sequence_parallel_group"):
            groups._get_sequence_parallel_group()

    def test_groups_do_not_outlive_the_world(self, tmp_path: Any) -> None:
        old = groups.get_model_parallel_group()
        rank = dist.get_rank()
        dist.barrier()
        dist.destroy_process_group()
        store = f"file://{tmp_path}/store"
        dist.init_distributed("gloo", init_method=store, rank=rank, world_size=2)
        new = groups.get_model_parallel_group()
        assert new is not old and dist.get_all_ranks_from_group(new) == [rank]

    def test_reset_forgets(self) -> None:
        def tensor() -> tuple[int, int]:
            size = groups.get_tensor_model_parallel_world_size()
            return size, groups.get_tensor_model_parallel_rank()

        groups.initialize(mpu=SimpleNamespace(get_data_parallel_world_size=lambda: 7))
        groups.set_tensor_model_parallel_world_size(4)
        groups.set_tensor_model_parallel_rank(3)
        assert groups.get_data_parallel_world_size() == 7
        assert tensor() == (4, 3)
        groups.reset()
        assert groups.get_data_parallel_world_size() == 2
        assert tensor() == (1, 0)


class TestMesh(DistributedTest):
    world_size = 4

    def test_axes(self) -> None:
        names = ("data_parallel", "sequence_parallel")
        groups.mesh_device, rank = dist.initialize_mesh_device((2, 2), names), dist.get_rank()
        assert groups._get_data_parallel_world_size() == 2
        assert groups._get_sequence_parallel_world_size() == 2
        assert groups._get_data_parallel_rank() == rank // 2
        assert groups._get_sequence_parallel_rank() == rank % 2
        own = dist.get_all_ranks_from_group(groups._get_sequence_parallel_group())
        assert own == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert groups._get_data_parallel_group_ranks() == [rank % 2, rank % 2 + 2]
        assert groups._get_sequence_data_parallel_world_size() == 4


class TestMegatronMpu(DistributedTest):
    world_size = 4

    def test_two_by_two(self) -> None:
        rank = dist.get_rank()
        data = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
        tensor = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
        mpu = SimpleNamespace(
            get_data_parallel_group=lambda: data,
            get_tensor_model_parallel_group=lambda: tensor,
            get_tensor_model_parallel_world_size=lambda: 2,
            get_tensor_model_parallel_rank=lambda: rank % 2,
        )
        groups.initialize(mpu=mpu)
        assert groups.mpu is mpu
        assert groups._get_data_parallel_group() is data
        assert groups._get_data_parallel_world_size() == 2
        assert groups._get_data_parallel_rank() == rank // 2
        assert groups._get_sequence_data_parallel_group() is data
        assert groups._get_model_parallel_group() is tensor
        assert groups._get_model_parallel_world_size() == 2
        assert groups._get_model_parallel_rank() == rank % 2
        assert groups.get_tensor_model_parallel_src_rank() == rank // 2 * 2
        assert groups._get_broadcast_src_rank() == rank % 2

    def test_sequence_parallel(self) -> None:
        rank = dist.get_rank()
        sequence = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
        mpu = SimpleNamespace(
            get_sequence_parallel_group=lambda: sequence,
            get_sequence_parallel_world_size=lambda: 2,
            get_sequence_parallel_rank=lambda: rank % 2,
        )
        groups.initialize(mpu=mpu)
        assert groups._get_sequence_parallel_group() is sequence
        assert groups._get_sequence_parallel_world_size() == 2
        assert groups._get_sequence_parallel_rank() == rank % 2
        # Dense gradients are reduced over data times sequence: everybody, without other slices.
        assert groups._get_sequence_data_parallel_world_size() == 4
        # An mpu that knows sequences only: the same places of all sequences share the data.
        assert groups._get_data_parallel_group_ranks() == [rank % 2, rank % 2 + 2]
        assert groups._get_data_parallel_group() is groups._get_data_parallel_group()
        assert groups._get_data_parallel_rank() == rank // 2
        mpu.get_model_parallel_world_size = lambda: 2
        with pytest.raises(ValueError, match=r"get_data_parallel_group\(\)"):
            groups._get_data_parallel_group()
        with pytest.raises(ValueError, match=r"get_sequence_data_parallel_group\(\)"):
            groups._get_sequence_data_parallel_group()


def test_older_mpus_are_understood() -> None:
    # The first name that is there answers; later ones would give a wrong number.
    for kinds in ((), ("model",), ("slice", "model"), ("tensor_model", "model")):
        names = [f"get_{kind}_parallel_world_size" for kind in kinds]
        sizes = {name: lambda value=number: value for number, name in enumerate(names, 2)}
        mpu = SimpleNamespace(**sizes)
        assert bwc_tensor_model_parallel_world_size(mpu) == (2 if kinds else 1), kinds
    assert bwc_tensor_model_parallel_world_size(None) == 1

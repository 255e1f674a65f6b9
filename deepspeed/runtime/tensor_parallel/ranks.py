"""Neighbouring ranks, on one machine where possible, that share layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deepspeed import comm as dist
from deepspeed.comm import group_store, rank_lists
from deepspeed.runtime.config_utils import DeepSpeedConfigError


@dataclass(frozen=True, eq=False)
class TensorRanks:
    """An mpu: rank = data rank * size + tensor rank. `data_group` holds the same slices;
    `cuts_models`: the engine has cut the layers, and a model that is not cut is not for these
    ranks.
    """

    size: int
    tensor_group: Any
    data_group: Any
    cuts_models: bool = True

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorRanks:
        return self

    def get_tensor_model_parallel_group(self) -> Any:
        return self.tensor_group

    def get_tensor_model_parallel_rank(self) -> int:
        return dist.get_rank(group=self.tensor_group)

    def get_tensor_model_parallel_world_size(self) -> int:
        return self.size

    get_model_parallel_group = get_tensor_model_parallel_group
    get_model_parallel_rank = get_tensor_model_parallel_rank
    get_model_parallel_world_size = get_tensor_model_parallel_world_size

    def get_data_parallel_group(self) -> Any:
        return self.data_group

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(group=self.data_group)

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(group=self.data_group)


def tensor_ranks(size: int) -> TensorRanks:
    """Make the mpu of `size` ranks per model, once. Collective over the world when first asked."""
    world = dist.get_world_size()
    if world % size:
        raise DeepSpeedConfigError(
            f"tensor_parallel.autotp_size: {size} does not divide the {world} ranks; use a size "
            "that does"
        )
    lists = rank_lists.optimizer_instances([tuple(range(world))], world // size)
    return group_store.made_once(
        ("autotp", size),
        lambda: TensorRanks(
            size, group_store.shared_group(lists.rows), group_store.shared_group(lists.columns)
        ),
    )

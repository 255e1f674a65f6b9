"""Which process of the run an engine is: its device, its number, its groups."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.device_choice import select_device
from deepspeed.comm.parallel_map import ParallelMap, make_mesh
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.utils import groups


class EngineRanks:
    """Mixin of `DeepSpeedEngine`: process groups and the device.

    Attributes:
        parallel_map: Which ranks share what.
        device: Where the model trains.
        local_rank: This process's ordinal on its machine.
        global_rank: Its number among all.
        world_size: How many there are.
        data_parallel_group: The ranks that see other data and have the same model.
        dp_world_size: How many these are.
        mp_world_size: How many ranks share one copy of the model.
    """

    _config: DeepSpeedConfig
    parallel_map: ParallelMap
    device: torch.device
    local_rank: int
    global_rank: int
    world_size: int
    data_parallel_group: Any
    dp_world_size: int
    mp_world_size: int

    def _configure_distributed(self, args: Any, mpu: Any, mesh_device: Any) -> None:
        sequence = self._config.sequence_parallel_size
        if mesh_device is None and mpu is None and sequence > 1:
            mesh_device = make_mesh(self._config.world_size, sequence)
        self.parallel_map = groups.map_of(mpu, mesh_device)
        self._map_in_force = groups.put_in_force(self.parallel_map)
        self.local_rank, told_by = self._local_rank(args)
        select_device(self.local_rank, told_by)
        self.device = torch.device(get_accelerator().current_device_name())
        self.global_rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.data_parallel_group = self.parallel_map.data.group
        self.dp_world_size = self.parallel_map.data.size
        self.mp_world_size = self.parallel_map.model.size
        if self._config.tree.comms_logger.enabled:
            dist.configure(self._config.tree)

    @staticmethod
    def _local_rank(args: Any) -> tuple[int, str]:
        """This process's ordinal on its machine, and who said so."""
        for name in ("local_rank", "device_rank"):
            value = getattr(args, name, None)
            if value is not None and value >= 0:
                return int(value), f"args.{name}"
        return dist.get_local_rank(), "LOCAL_RANK"

    @property
    def seq_data_parallel_group(self) -> Any:
        """The ranks that have the same model, those that share sequences too."""
        return self.parallel_map.replicas.group

    @property
    def expert_data_parallel_group(self) -> dict[str, Any]:
        """The ranks that hold the same experts, by the name of the experts' group."""
        return {name: axes.data.group for name, axes in self.parallel_map.all_experts.items()}

    def get_data_parallel_rank(self) -> int:
        """This process's place among the data-parallel ranks."""
        return self.parallel_map.data.rank

    def get_model_parallel_rank(self) -> int:
        """The same among the model-parallel ranks."""
        return self.parallel_map.model.rank

    def get_tensor_parallel_rank(self) -> int:
        """The same among the tensor-parallel ranks."""
        return self.parallel_map.tensor.rank

    def get_sequence_parallel_group(self) -> Any:
        """The ranks that share sequences."""
        return self.parallel_map.sequence.group

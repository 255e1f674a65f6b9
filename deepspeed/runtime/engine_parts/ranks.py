"""Which process of the run an engine is: its device, its number, its groups."""

from __future__ import annotations

from typing import NamedTuple

import torch

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.device_choice import select_device
from deepspeed.comm.parallel_map import ParallelMap, make_mesh
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.utils import groups


class Place(NamedTuple):
    """Where a process stands: on which device, and who shares what with it."""

    parallel_map: ParallelMap
    map_in_force: groups.MapInForce
    local_rank: int
    device: torch.device


def take_place(config: DeepSpeedConfig, args: object, mpu: object, mesh_device: object) -> Place:
    """Make the process groups of a new engine and put them in force, and choose its device."""
    sequence = config.sequence_parallel_size
    if mesh_device is None and mpu is None and sequence > 1:
        mesh_device = make_mesh(config.world_size, sequence)
    parallel_map = groups.map_of(mpu, mesh_device)
    map_in_force = groups.put_in_force(parallel_map)
    local_rank, told_by = _local_rank(args)
    select_device(local_rank, told_by)
    if config.tree.comms_logger.enabled:
        dist.configure(config.tree)
    device = torch.device(get_accelerator().current_device_name())
    return Place(parallel_map, map_in_force, local_rank, device)


def _local_rank(args: object) -> tuple[int, str]:
    """This process's ordinal on its machine, and who said so."""
    for name in ("local_rank", "device_rank"):
        value = getattr(args, name, None)
        if value is not None and value >= 0:
            return int(value), f"args.{name}"
    return dist.get_local_rank(), "LOCAL_RANK"

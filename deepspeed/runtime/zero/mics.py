"""Upstream's path of `MiCS_Init`, whose shards `mics_shard_size` ranks share, and of groups."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.comm.parallel_map import split_into_instances
from deepspeed.runtime.config_utils import DeepSpeedConfigError
from deepspeed.runtime.zero.init_context import Init, configured_shard_size


class MiCS_Init(Init):  # upstream's name
    """`zero.Init`, of whose arguments these are some, of a configuration that has to have
    `zero_optimization.mics_shard_size`.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: dist.Group = None,
        sequence_data_parallel_group: dist.Group = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: object = None,
        config: object = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: object = None,
    ) -> None:
        source = config_dict_or_path if config_dict_or_path is not None else config
        if enabled and configured_shard_size(source) <= 0:
            raise DeepSpeedConfigError(
                "MiCS_Init needs a configuration with zero_optimization.mics_shard_size above 0 "
                "(config_dict_or_path=...); without it use deepspeed.zero.Init"
            )
        super().__init__(
            module,
            data_parallel_group,
            mem_efficient_linear,
            remote_device,
            pin_memory,
            source,
            enabled=enabled,
            dtype=dtype,
            mpu=mpu,
            sequence_data_parallel_group=sequence_data_parallel_group,
        )


@dataclass
class MiCS_CommGroups:  # upstream's name
    """This rank's two groups: of those that share shards (`param_shard_*`), and of those that hold
    the same shard (`param_repli_*`; None if this rank alone does). Gathers are not done in steps,
    so the other groups are None.
    """

    param_shard_group: dist.Group = None
    param_shard_size: int = -1
    param_shard_rank: int = -1
    param_repli_group: dist.Group = None
    param_repli_size: int = -1
    param_repli_rank: int = -1
    param_intra_node_group: dist.Group = None
    param_inter_node_shard_group: dist.Group = None


def create_mics_comm_groups(
    shard_size: int, dp_group: dist.Group, hierarchical_allgather: bool = False, mpu: Any = None
) -> MiCS_CommGroups:
    """Split `dp_group` (None: the mpu's, or all) into groups of `shard_size` consecutive ranks;
    ValueError unless that is even, and for `hierarchical_allgather`. All ranks call it.
    """
    if hierarchical_allgather:
        raise ValueError(
            "create_mics_comm_groups(hierarchical_allgather=True): gathers are not done in steps "
            "inside nodes and between them; leave it out"
        )
    if dp_group is None:
        dp_group = dist.get_world_group() if mpu is None else mpu.get_data_parallel_group()
    ranks = dist.get_world_size(dp_group)
    if shard_size < 1 or ranks % shard_size:
        raise ValueError(
            f"create_mics_comm_groups(shard_size={shard_size}): {ranks} data-parallel ranks cannot "
            "be split into groups of that size; give a divisor"
        )
    made = split_into_instances(dp_group, ranks // shard_size)
    return MiCS_CommGroups(
        made.inside, shard_size, dist.get_rank(made.inside), made.across, made.count, made.index
    )


def scale_tensors(tensors: Iterable[torch.Tensor], scale: float) -> None:
    """Divide each tensor by `scale`, in place."""
    for tensor in tensors:
        tensor.div_(scale)

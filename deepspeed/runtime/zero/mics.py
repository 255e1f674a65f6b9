"""Upstream's path of `MiCS_Init`: `zero.Init` whose shards `mics_shard_size` ranks share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.runtime.config_utils import DeepSpeedConfigError
from deepspeed.runtime.zero.init_context import Init, configured_shard_size


class MiCS_Init(Init):  # upstream's name
    """`zero.Init` of a configuration with `zero_optimization.mics_shard_size`, with which `Init`
    does the same.

    Args:
        module, data_parallel_group, sequence_data_parallel_group, mem_efficient_linear,
            remote_device, pin_memory, config_dict_or_path, config, enabled, dtype, mpu: See `Init`.

    Raises:
        DeepSpeedConfigError: The configuration has no such key.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: dist.Group = None,
        sequence_data_parallel_group: dist.Group = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
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

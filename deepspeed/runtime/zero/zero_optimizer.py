"""`ZeROOptimizer`: a master-weight optimizer whose masters are sharded over the data-parallel ranks.

Adds to `MasterWeightOptimizer` the names under which upstream's users look at shards.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.runtime.base_optimizer import MasterWeightOptimizer


class ZeROOptimizer(MasterWeightOptimizer):
    """Base of `DeepSpeedZeroOptimizer` and `BF16_Optimizer`.

    Args:
        init_optimizer: torch optimizer over the model's parameters.
        param_names: Name of each parameter, in model order.
        dp_process_group: Ranks over which state is sharded; None is the world.
        elastic_checkpoint: Save moments without padding, so that another world size can cut them anew.
        kwargs: See `MasterWeightOptimizer`.
    """

    def __init__(
        self,
        init_optimizer: torch.optim.Optimizer,
        param_names: Mapping[nn.Parameter, str],
        *,
        dp_process_group: Any = None,
        elastic_checkpoint: bool = False,
        **kwargs: Any,
    ) -> None:
        self.dp_process_group = dp_process_group if dp_process_group is not None else dist.get_world_group()
        self.elastic_checkpoint = elastic_checkpoint
        super().__init__(init_optimizer, param_names, shard_group=self.dp_process_group, **kwargs)

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the state, in upstream's layout."""

    @property
    def bit16_groups(self) -> list[list[nn.Parameter]]:
        """Trainable parameters of each group, in flat order."""
        return [group.params for group in self.groups]

    @property
    def partition_count(self) -> list[int]:
        """Number of shards of each group."""
        return [self.num_shards] * len(self.groups)

    @property
    def group_paddings(self) -> list[int]:
        """Trailing elements of this rank's shard of each group that belong to no parameter."""
        return [group.table.shard_padding(self.shard_rank) for group in self.groups]

"""`ZeROOptimizer`: a master-weight optimizer whose masters are sharded over the data-parallel
ranks.

Adds to `MasterWeightOptimizer` the names under which upstream's users look at shards, and optimizer
instances.

[Note: optimizer instances]
`zero_optimization.num_optimizer_instances` = n splits the D data-parallel ranks into n instances of
D/n consecutive ranks. Masters and moments are sharded inside an instance, so there are n copies of
each shard. In the reduce rule's terms (its N is D)

    g = post * sum_{r<D} pre * g[r] = post * sum_{i<n} ( sum_{r in instance i} pre * g[r] ),

the inner sum is reduced onto the shard's owner inside the instance, the outer one all-reduced over
the n owners of the same shard; pre and post are as for one instance, no factor knows of n. After
that all copies of a shard have the same gradient bit for bit. They stay equal because all that they
are multiplied by is equal too: the norm (and with it clipping and the decision to skip) is reduced
over all D ranks, and only instance 0 adds its shards, so that each element counts once. Instances
that each took their own norm could disagree in its last bit and drift apart. Parameters are
gathered inside the instance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.comm.parallel_map import OptimizerInstances
from deepspeed.runtime.optimizers.master_weights import MasterWeightOptimizer
from deepspeed.runtime.optimizers.state_layout import OwnShard, StateLayout
from deepspeed.runtime.zero.sharded_state import (
    CheckpointMismatchError,
    as_sharded_state,
    check_fits,
    without_padding,
)


def _counts_elsewhere(param: nn.Parameter) -> bool:
    """The norm's selection outside instance 0, whose ranks count every element already."""
    return False


class ZeROOptimizer(MasterWeightOptimizer):
    """Base of `DeepSpeedZeroOptimizer` and `BF16_Optimizer`.

    Args:
        init_optimizer: torch optimizer over the model's parameters.
        param_names: Name of each parameter, in model order.
        instances: How the data-parallel ranks are split into replicas of the sharded state; None:
            one instance of all of them.
        elastic_checkpoint: Save moments without padding, so that another world size can cut them
            anew.
        kwargs: See `MasterWeightOptimizer`.
    """

    def __init__(
        self,
        init_optimizer: torch.optim.Optimizer,
        param_names: Mapping[nn.Parameter, str],
        *,
        dp_process_group: dist.Group = None,
        expert_data_parallel_group: Mapping[str, dist.Group] | None = None,
        instances: OptimizerInstances | None = None,
        elastic_checkpoint: bool = False,
        **kwargs: Any,
    ) -> None:
        dp_process_group = (
            dp_process_group if dp_process_group is not None else dist.get_world_group()
        )
        self.instances = instances or OptimizerInstances(inside=dp_process_group)
        if self.instances.count > 1 and expert_data_parallel_group:
            raise ValueError(
                f"zero_optimization.num_optimizer_instances: {self.instances.count} with experts "
                f"(groups {sorted(expert_data_parallel_group)}) is not supported: each family of "
                "experts is on other ranks and would have to be cut into instances of its own; use "
                "1"
            )
        self.elastic_checkpoint = elastic_checkpoint
        if self.instances.index > 0:
            kwargs["counts_in_norm"] = _counts_elsewhere
        super().__init__(
            init_optimizer,
            param_names,
            shard_group=self.instances.inside,
            dp_process_group=dp_process_group,
            expert_data_parallel_group=expert_data_parallel_group,
            **kwargs,
        )

    # State

    @property
    def state_layout(self) -> StateLayout:
        """See base class."""
        shard = OwnShard(self.shard_rank, self.num_shards, self.instances.across)
        return StateLayout(shard, has_masters=True, lists_frozen=True)

    def fits(self, saved: Mapping[str, Any]) -> bool:
        """See base class."""
        try:
            check_fits(self, saved)
        except CheckpointMismatchError:
            return False
        return True

    def rebuilt_state(
        self, base: dict[str, Any], masters: Sequence[torch.Tensor], scaler: Mapping[str, Any]
    ) -> dict[str, Any]:
        """See base class."""
        lean = [
            without_padding(group, master)
            for group, master in zip(self.groups, masters, strict=True)
        ]
        return as_sharded_state(self, base, lean)

    @property
    def bit16_groups(self) -> list[list[nn.Parameter]]:
        """Trainable parameters of each group, in the order of files."""
        return [group.params for group in self.groups]

    @property
    def partition_count(self) -> list[int]:
        """Number of shards of each group."""
        return [group.num_shards for group in self.groups]

    @property
    def group_paddings(self) -> list[int]:
        """Trailing elements of this rank's shard of each group, as files have it, that belong to no
        parameter.
        """
        return [group.file_table.shard_padding(group.shard_rank) for group in self.groups]

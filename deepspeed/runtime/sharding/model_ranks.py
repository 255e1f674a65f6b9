"""Which ranks hold which parameters of a model, as reduction, norm and the first broadcast need to
know it.

The axes are the engine's `ParallelMap`'s; this is the view of it from one model: who averages the
gradient of a parameter, and which one of the ranks that hold it counts it in the global norm.

[Note: who counts]
Every element of the whole model is counted by one rank. Of the ranks that average its gradient, the
owner of its shard counts it, or the first rank where state is not sharded. Of the ranks that hold
other parts of the model: a slice (`model_parallel` or `tensor_model_parallel` is true) counts on
every tensor-parallel rank, everything else on the first; a parameter that pipeline stages share
counts where it is not marked `ds_pipe_replicated`. The pipeline rank does not matter otherwise:
stages own different parameters. Experts that are spread over the tensor-parallel ranks too are
different ones on each of them, so all count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.comm.parallel_map import ParallelMap
from deepspeed.runtime.config_utils import DeepSpeedConfigError
from deepspeed.runtime.sharding.group import expert_group_of


def is_model_parallel_parameter(p: torch.Tensor) -> bool:
    """Whether the parameter is one rank's slice of a larger one."""
    return bool(getattr(p, "model_parallel", False) or getattr(p, "tensor_model_parallel", False))


def norm_selection(tensor_rank: int) -> Callable[[torch.Tensor], bool]:
    """Say which dense parameters this tensor-parallel rank counts; see [Note: who counts]."""

    def counts(param: torch.Tensor) -> bool:
        if getattr(param, "ds_pipe_replicated", False):
            return False
        return is_model_parallel_parameter(param) or tensor_rank == 0

    return counts


@dataclass(frozen=True)
class ModelRanks:
    """See module.

    Attributes:
        replicas: Ranks that average gradients of the same dense parameters: data times sequence
            parallel; `num_replicas` is N of the reduce rule.
        experts: By group name, the ranks that hold the same experts.
        spread_experts: Group names whose experts are different ones on each tensor-parallel rank.
        tensor_group: Ranks that hold slices of the same layers; None if this one holds them whole.
        has_parts: Other ranks hold other stages or slices of the model.
    """

    parallel_map: ParallelMap
    replicas: dist.Group
    num_replicas: int
    experts: Mapping[str, dist.Group] = field(default_factory=dict)
    spread_experts: frozenset[str] = frozenset()
    tensor_group: dist.Group = None
    has_parts: bool = False

    @classmethod
    def of(cls, model: nn.Module, parallel_map: ParallelMap) -> ModelRanks:
        """Find the ranks of this model's parameters. Experts' groups must have been made."""
        names = {expert_group_of(param) for param in model.parameters()} - {None}
        experts = {name: parallel_map.experts(name) for name in sorted(filter(None, names))}
        tensor = parallel_map.tensor
        return cls(
            parallel_map,
            replicas=parallel_map.replicas.group,
            num_replicas=parallel_map.replicas.size,
            experts={name: axes.data.group for name, axes in experts.items()},
            spread_experts=frozenset(name for name, axes in experts.items() if not axes.sharded),
            tensor_group=tensor.group if tensor.size > 1 else None,
            has_parts=parallel_map.model.size > 1 or parallel_map.pipe.size > 1,
        )

    def holders(self, param: torch.Tensor) -> dist.Group:
        name = expert_group_of(param)
        return self.replicas if name is None else self.experts[name]

    @property
    def everyone(self) -> dist.Group:
        """The ranks that together train this model."""
        return dist.get_world_group() if self.has_parts else self.replicas

    @property
    def norm_group(self) -> dist.Group:
        """The ranks over which squared sums are added up; None if that is this one alone."""
        return self.everyone if dist.get_world_size(group=self.everyone) > 1 else None

    @property
    def counts_shard(self) -> Callable[[torch.Tensor], bool] | None:
        """Whether this rank counts its shard of a parameter; None: always."""
        return self._counts if self.has_parts else None

    @property
    def is_whole(self) -> bool:
        """Whether a rank of the data-parallel group holds all parameters there are."""
        return not self.has_parts and not self.experts

    def counts_replica(self, param: torch.Tensor) -> bool:
        """Whether this rank, the first of its holders, counts a parameter that they have whole."""
        return self._counts(param) and dist.get_rank(group=self.holders(param)) == 0

    def _counts(self, param: torch.Tensor) -> bool:
        if expert_group_of(param) in self.spread_experts:
            return True
        return norm_selection(
            0 if self.tensor_group is None else dist.get_rank(group=self.tensor_group)
        )(param)

    def agree_on_num_groups(
        self,
        optimizer: torch.optim.Optimizer | None,
        device: torch.device,
        problem: str | None = None,
    ) -> int:
        """Agree on the length of the norm's tensor: the number of parameter groups of the rank that
        has most. Only ranks that hold other parts of the model can differ; without any nothing is
        communicated. All raise DeepSpeedConfigError if one's optimizer cannot train (`problem`), or
        only some have one: the others would wait for their norm.
        """
        own = 0 if optimizer is None else len(optimizer.param_groups)
        most, some_have_none, some_fail = own, False, problem is not None
        if self.has_parts:
            agreed = torch.tensor(
                [own, int(optimizer is None), int(some_fail)], dtype=torch.int64, device=device
            )
            dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=dist.get_world_group())
            most, some_have_none, some_fail = agreed.tolist()
        if some_fail:
            raise DeepSpeedConfigError(
                problem
                or "optimizer: that of another rank cannot train its part of the model; "
                "its error says why"
            )
        if most and some_have_none:
            own_answer = "none" if optimizer is None else "one"
            raise DeepSpeedConfigError(
                f"optimizer: rank {dist.get_rank()} has {own_answer}, others that hold parts of "
                "the model do the opposite. Give all ranks one (a stage without trainable "
                "parameters too: of its frozen parameters, or of the group {'params': []}), or none"
            )
        return int(most)

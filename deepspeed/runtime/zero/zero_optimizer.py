"""`ZeROOptimizer`: a step sequence whose masters are sharded over the data-parallel ranks.

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

from dataclasses import replace

from torch import nn

from deepspeed.comm.parallel_map import OptimizerInstances
from deepspeed.runtime.gradients.reduction import GradientContext
from deepspeed.runtime.optimizers.master_weights import MasterNames, MasterWeights
from deepspeed.runtime.optimizers.settings import ShardSettings, StepSettings
from deepspeed.runtime.optimizers.step_sequence import StepSequence


def _counts_elsewhere(param: nn.Parameter) -> bool:
    """The norm's selection outside instance 0, whose ranks count every element already."""
    return False


def instances_of(
    context: GradientContext, steps: StepSettings, shards: ShardSettings
) -> tuple[StepSettings, OptimizerInstances]:
    """The optimizer instances, and the settings with what this rank then counts in the norm.

    Raises:
        ValueError: Several instances with experts.
    """
    instances = shards.instances or OptimizerInstances(inside=context.dp_process_group)
    if instances.count > 1 and context.expert_data_parallel_group:
        raise ValueError(
            f"zero_optimization.num_optimizer_instances: {instances.count} with experts "
            f"(groups {sorted(context.expert_data_parallel_group)}) is not supported: each family "
            "of experts is on other ranks and would have to be cut into instances of its own; use 1"
        )
    if instances.index > 0:
        steps = replace(steps, counts_in_norm=_counts_elsewhere)
    return steps, instances


class ZeROOptimizer(MasterNames, StepSequence):
    """Base of `DeepSpeedZeroOptimizer`, `DeepSpeedZeroOptimizer_Stage3` and `BF16_Optimizer`."""

    masters: MasterWeights

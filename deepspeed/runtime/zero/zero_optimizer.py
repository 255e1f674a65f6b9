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

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from deepspeed import comm as dist
from deepspeed.comm.parallel_map import OptimizerInstances
from deepspeed.runtime.gradients.buckets import fill_buckets, in_flat_order
from deepspeed.runtime.gradients.reduction import GradientContext, ReductionSettings
from deepspeed.runtime.gradients.sequence_parts import has_parts
from deepspeed.runtime.optimizers.group_layout import GroupLayout
from deepspeed.runtime.optimizers.master_weights import MasterNames, MasterWeights
from deepspeed.runtime.optimizers.settings import ShardSettings, StepSettings
from deepspeed.runtime.optimizers.step_sequence import StepSequence
from deepspeed.runtime.sharding.fragments import FragmentTable


def _counts_elsewhere(param: nn.Parameter) -> bool:
    """The norm's selection outside instance 0, whose ranks count every element already."""
    return False


def instances_of(
    context: GradientContext, steps: StepSettings, shards: ShardSettings
) -> tuple[StepSettings, OptimizerInstances]:
    """Return the instances, and the settings with what this rank then counts in the norm."""
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


# Parts of a shard in memory are multiples of this, where it is laid out otherwise than in files:
# parts of two-byte elements then start at multiples of 16 bytes, which device collectives copy
# fastest.
PART_ALIGNMENT = 8


def in_memory(file_table: FragmentTable, sections: Sequence[Sequence[int]]) -> FragmentTable:
    """Return the layout in memory of a group with this one in files: the same if it is one section
    in the order of files, so that nothing is exchanged when state is saved or loaded.
    """
    if len(sections) < 2 and all(list(one) == sorted(one) for one in sections):
        return file_table
    return FragmentTable.build(file_table.numels, file_table.num_shards, PART_ALIGNMENT, sections)


class BucketLayout(GroupLayout):
    """A section per bucket, an equal part for every rank; an only owner has one section."""

    def __init__(
        self,
        context: GradientContext,
        settings: ShardSettings,
        reduction: ReductionSettings,
        shard_group: dist.Group,
    ) -> None:
        super().__init__(context, settings, shard_group)
        self._reduction = reduction

    def buckets(self, params: Sequence[nn.Parameter]) -> list[tuple[int, ...]]:
        """The parameters of each bucket of a group, the one that is complete first at the front."""
        # Those that are complete after all others have buckets of their own: no other waits.
        kinds = [(self._reduction.travels_in(param), has_parts(param)) for param in params]
        numels = [param.numel() for param in params]
        return fill_buckets(
            numels, self.positions(params), self._reduction.reduce_bucket_size, kinds
        )

    def _tables(
        self, params: Sequence[nn.Parameter], num_shards: int, alignment: int
    ) -> tuple[FragmentTable, FragmentTable]:
        in_files, _ = super()._tables(params, num_shards, alignment)
        if num_shards > 1:
            sections = self.buckets(params)[::-1]  # in the order of forward
        else:
            sections = [in_flat_order(range(len(params)), in_files.numels)]
        return in_files, in_memory(in_files, sections)


class ZeROOptimizer(MasterNames, StepSequence):
    """Base of `DeepSpeedZeroOptimizer`, `DeepSpeedZeroOptimizer_Stage3` and `BF16_Optimizer`."""

    masters: MasterWeights

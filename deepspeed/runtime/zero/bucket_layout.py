"""How stages 1 and 2 lay a group out in memory: `BucketLayout`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from deepspeed import comm as dist
from deepspeed.runtime.gradients.buckets import fill_buckets
from deepspeed.runtime.gradients.reduction import GradientContext, ReductionSettings
from deepspeed.runtime.gradients.sequence_parts import has_parts
from deepspeed.runtime.optimizers.group_layout import GroupLayout
from deepspeed.runtime.optimizers.settings import ShardSettings
from deepspeed.runtime.sharding.fragments import FragmentTable

# Parts of a shard in memory are multiples of this, where it is laid out otherwise than in files:
# parts of two-byte elements then start at multiples of 16 bytes, which device collectives copy
# fastest.
PART_ALIGNMENT = 8


def in_memory(file_table: FragmentTable, sections: Sequence[Sequence[int]]) -> FragmentTable:
    """The layout in memory of a group whose layout in files is `file_table`: the same if it is one
    section, so that nothing is exchanged when state is saved or loaded.
    """
    if len(sections) < 2:
        return file_table
    return FragmentTable.build(file_table.numels, file_table.num_shards, PART_ALIGNMENT, sections)


class BucketLayout(GroupLayout):
    """A section per bucket, of which every rank owns an equal part. Who owns everything has it in
    memory as files do.

    Args:
        context: See base class.
        settings: See base class.
        reduction: Sizes of buckets, and what travels.
        shard_group: See base class.
    """

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
        """See base class."""
        in_files, _ = super()._tables(params, num_shards, alignment)
        sections = self.buckets(params)[::-1] if num_shards > 1 else ()  # in the order of forward
        return in_files, in_memory(in_files, sections)

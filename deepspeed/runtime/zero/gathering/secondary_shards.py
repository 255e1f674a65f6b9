"""A unit's shards a second time, cut among the ranks of a node (hpZ, `zero_hpz_partition_size`).

The rows `[N, s]` of a gather are the shards of all N ranks. Of the h ranks of a node each keeps
N / h of them, which are neighbours, so together they have all, and the unit's next gather need not
leave the node. What it fills are the same rows, so nothing behind it differs in a bit.

[Note: how long a copy is right]
The first gather of a pass makes it. It is forgotten when shards change (an update, loading, a
script's edit) and when the next outermost forward begins: what a rank writes to its own shard
between two passes (`safe_set_local_*`) is then seen as without a copy, though no other rank hears
of it. Whether there is a copy decides over which ranks the next gather goes, so whatever makes one
or forgets it happens on all ranks alike.
"""

from __future__ import annotations

import torch

from deepspeed import comm as dist
from deepspeed.runtime.sharding.parameter_cuts import ParameterCutTable
from deepspeed.runtime.zero.gathering.memory_pool import poison


class SecondaryShards:
    """See module.

    Args:
        group: The ranks of this node; their number divides that of all.
        table: How the unit's parameters are cut among all ranks.

    Attributes:
        group: As given.
        own: The elements of the flattened rows that this rank keeps.
        update: After how many updates of the shards the copy was made.
    """

    def __init__(self, group: dist.Group, table: ParameterCutTable) -> None:
        self.group = group
        numel = table.padded_numel // dist.get_world_size(group=group)
        start = dist.get_rank(group=group) * numel
        self.own = slice(start, start + numel)
        self.update = -1
        self._is_wanted = False
        self._is_right = False
        self._memory: torch.Tensor | None = None

    @property
    def shard(self) -> torch.Tensor | None:
        """The copy, 1-D; None if there is none that is right."""
        return self._memory if self._is_right else None

    def expect(self, update: int) -> None:
        """A gather from all ranks begins; there were `update` updates so far."""
        self._is_wanted, self.update = True, update

    @torch.no_grad()
    def keep(self, rows: torch.Tensor) -> None:
        """Take the copy out of gathered rows, by the current stream; nothing if the shards were
        written since `expect`.

        Args:
            rows: `[padded_numel]`.
        """
        if not self._is_wanted:
            return
        if self._memory is None:
            self._memory = torch.empty_like(rows[self.own])
        self._memory.copy_(rows[self.own])
        self._is_wanted, self._is_right = False, True

    def forget(self) -> None:
        """The copy, or one that is about to be made, is not right any more."""
        self._is_wanted = self._is_right = False

    def poison(self) -> None:
        """Whoever reads a copy that was forgotten gets NaN; by the current stream."""
        if self._memory is not None:
            poison(self._memory)

    def drop(self) -> None:
        """The same, and let go of its memory, which is that of the stream that gathers."""
        self.forget()
        self._memory = None

"""What the optimizer of stage 3 does with updated masters."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.sharding.flattening import lies_on_host
from deepspeed.runtime.sharding.group import ShardedGroup
from deepspeed.runtime.sharding.publisher import Gather, Publisher


class ShardWriter(Publisher):
    """Rounds updated masters into this rank's shard of a group, and gathers nothing."""

    def __init__(self, group: ShardedGroup) -> None:
        super().__init__(group, group.table.padded_numel, by_broadcast=True)

    def _plan(self, bucket_size: int) -> Iterator[Gather]:
        sections = self._group.table.sections
        if sections:
            yield Gather(sections[0], 0, self._group.table.shard_numel)

    def _sections(self) -> Iterator[tuple[int, int]]:
        """Yield pieces on the way to the host: rounded ones take memory of the device."""
        return self.pieces() if lies_on_host(self._group.flat) else super()._sections()

    def _send(self, source: torch.Tensor, start: int) -> None:
        """Send to shards on the host too, from masters there or on the device."""
        own = self._group.own(start, start + source.numel())
        if not lies_on_host(own):
            super()._send(source, start)
        elif lies_on_host(source):
            own.copy_(source)
        else:
            # Rounded first: fewer bytes cross.
            self._copy(own, source.to(own.dtype), asynchronous=get_accelerator().is_pinned(own))

    def _gather(self, gather: Gather) -> None:
        """Gather nothing: who needs the parameters does."""

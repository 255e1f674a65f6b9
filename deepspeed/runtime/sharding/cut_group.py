"""One parameter group of stage 3: what this rank owns of its parameters, in one buffer.

As `ShardedGroup`, but no rank has the whole group: in the model's precision there is this rank's
shard and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from deepspeed.runtime.sharding.flattening import joined, lies_on_host, write_master
from deepspeed.runtime.sharding.fragments import NumEl
from deepspeed.runtime.sharding.group import ShardedGroup


class CutGroup(ShardedGroup):
    """See module.

    Args:
        params: Trainable parameters.
        shards: This rank's cut of each, 1-D; copied.
        kwargs: See `ShardedGroup`.

    Attributes:
        flat: The shard, in the model's precision; on the host with `offload_param`.
    """

    def __init__(
        self, params: Sequence[nn.Parameter], shards: Sequence[torch.Tensor], **kwargs: Any
    ) -> None:
        self._shards = list(shards)
        super().__init__(params, **kwargs)
        self._shards = []

    @property
    def is_one_piece(self) -> bool:
        """See base class."""
        return True

    def _shares_memory(self, offload: bool) -> bool:
        """See base class: shards on the host are read by copies under way, masters are written by
        whoever likes.
        """
        return super()._shares_memory(offload or lies_on_host(self.flat))

    def _flatten(self, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        if not self._shards:
            return torch.zeros(0, dtype=dtype, device=device)
        return joined(self._shards)

    def _write_master(self, master: torch.Tensor) -> None:
        write_master(master, self.flat)

    def own(self, start: NumEl, end: NumEl) -> torch.Tensor:
        """See base class."""
        return self.flat[start:end]

    def own_parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """See base class."""
        return [flat]

    def cut_of(self, index: int, buffer: torch.Tensor) -> torch.Tensor:
        """The part of a buffer like the shard that holds the cut of parameter `index`."""
        table: Any = self.table
        start = table.cut_starts[index]
        return buffer[start : start + table.cuts[index]]

    def _pieces_of(self, buffer: torch.Tensor) -> list[tuple[int, int, int]]:
        """See base class."""
        return [
            (part.param, part.shard_start, part.numel)
            for part in self.table.of_shard(self.shard_rank)
        ]

    def release(self) -> None:
        """Let go of buffers; parameters have none here."""
        self._grad = None

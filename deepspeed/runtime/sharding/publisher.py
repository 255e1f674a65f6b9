"""How the updated shard of a group reaches every rank: rounded to the model dtype, copied to the
device, gathered from its owners.

Piece by piece, so that while the host updates one piece the pieces before it are on their way. Owns
the order and size of pieces, which depend on the group's layout alone: all ranks of a group gather
the same pieces in the same order. Does not own the update.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.shard_ops import PendingShards, gather_from_owners, gather_slices, is_pairwise
from deepspeed.runtime.sharding.group import ShardedGroup
from deepspeed.runtime.streams import StagingBuffers

# Elements updated at a time: so many that what a piece costs by itself is small, so few that little
# is left to be sent when the last one is updated.
UPDATE_NUMEL = 1 << 21
# One piece is on its way to the device while the next is written.
NUM_STAGED = 2
HALF_DTYPES = (torch.bfloat16, torch.float16)


class Publisher:
    """Sends one group's shard, in the order of `pieces`.

    Args:
        group: Whose shard.
        allgather_bucket_size: Most elements that one gather fills on a rank.
        by_broadcast: One broadcast per owner instead of an all-gather.
    """

    def __init__(self, group: ShardedGroup, allgather_bucket_size: int, by_broadcast: bool) -> None:
        self._group = group
        self._by_broadcast = by_broadcast
        self._on_host = get_accelerator().is_synchronized_device()
        self._pairwise = (
            group.num_shards > 1
            and not by_broadcast
            and is_pairwise(group.flat, group.process_group)
        )
        self._gather_numel = self._numel_of_gather(allgather_bucket_size)
        self._staging = StagingBuffers(NUM_STAGED, pin=group.pin)
        # The buffer that the piece at hand is rounded to, if it is one.
        self._staged: torch.Tensor | None = None
        self._rounded = False  # whether the piece at hand has been rounded by the optimizer
        self._sent: Any = None  # the event of the last copy to the device
        self._gathers: deque[PendingShards] = deque()

    def _numel_of_gather(self, bucket_size: int) -> int:
        group = self._group
        if self._pairwise:
            # Slices go from shard to shard without a buffer: short ones cost nothing, and leave
            # early.
            return max(1, min(UPDATE_NUMEL, bucket_size // group.num_shards))
        # Each gather of a part needs a buffer, and of the whole none.
        whole = group.num_shards == 1 or group.table.padded_numel <= bucket_size
        return max(1, group.table.shard_numel if whole else bucket_size // group.num_shards)

    @property
    def grad(self) -> torch.Tensor:
        """The owned gradient, in the dtype in which it was accumulated."""
        return self._group.grad

    def pieces(self) -> Iterator[tuple[int, int]]:
        """First and last+1 element in the shard of each piece."""
        for start in range(0, self._group.table.shard_numel, self._gather_numel):
            end = min(start + self._gather_numel, self._group.table.shard_numel)
            yield from (
                (piece, min(piece + UPDATE_NUMEL, end)) for piece in range(start, end, UPDATE_NUMEL)
            )

    def low_precision_out(self, start: int, end: int) -> torch.Tensor | None:
        """Where an optimizer on the host may round the piece at hand to; None: `updated` reads the
        masters.
        """
        group = self._group
        if group.flat.dtype not in HALF_DTYPES:
            return None
        self._rounded = True
        if self._on_host:
            return group.shard[start:end]
        # Half the bytes of the masters cross to the device, and no fp32 copy is needed there.
        self._staged = self._staging.take(end - start, group.flat.dtype)
        return self._staged[: end - start]

    @torch.no_grad()
    def updated(self, start: int, end: int) -> None:
        """The masters of the piece at hand are final, and so is its `low_precision_out` if that was
        asked for.
        """
        group = self._group
        if self._staged is not None:
            self._send(self._staged[: end - start], start)
            self._staging.give_back(self._staged, self._sent)
            self._staged = None
        elif not self._rounded and not group.aliased:
            self._send(group.master[start:end], start)
        self._rounded = False
        if end % self._gather_numel == 0 or end == group.table.shard_numel:
            self._gather((end - 1) // self._gather_numel * self._gather_numel, end)

    def _send(self, source: torch.Tensor, start: int) -> None:
        self._group.shard[start : start + source.numel()].copy_(
            source, non_blocking=self._group.pin
        )
        if self._group.pin:
            self._sent = get_accelerator().Event()
            self._sent.record(get_accelerator().current_stream())

    def _gather(self, start: int, end: int) -> None:
        group, shard_numel = self._group, self._group.table.shard_numel
        if group.num_shards == 1:
            return
        if end - start == shard_numel and not self._pairwise:
            splits = [shard_numel] * group.num_shards
            gather = gather_from_owners(
                group.flat, splits, group.process_group, self._by_broadcast, async_op=True
            )
        else:
            while self._gathers and not self._pairwise:
                self._gathers.popleft().wait()  # one buffer at a time
            slices = [shard[start:end] for shard in group.flat.view(group.num_shards, shard_numel)]
            gather = gather_slices(slices, group.process_group, self._by_broadcast, async_op=True)
        self._gathers.append(gather)

    def publish(self) -> None:
        """All pieces, of masters that are final; `finish` completes it."""
        for start, end in self.pieces():
            self.updated(start, end)

    def finish(self) -> None:
        """Wait for the gathers (on the current stream, for backends with streams), and until no
        copy reads host memory any more.

        After it whoever likes may write to the masters: a checkpoint that is loaded, say.
        """
        while self._gathers:
            self._gathers.popleft().wait()
        if self._sent is not None:
            self._sent.synchronize()
            self._sent = None

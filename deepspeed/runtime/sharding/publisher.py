"""How the updated shard of a group reaches every rank: rounded, copied to the device, gathered.

A section of the layout (`fragments`) is one range of the flat buffer, gathered in place by one
collective. On the host it goes piece by piece: while one is updated those before it are on their
way; a device rounds a section at a time. Order and size of pieces depend on the layout alone, so
all ranks of a group gather the same ones. Who waits for gathers beside the next forward is
`parameter_arrivals`'s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from deepspeed.accelerator import get_accelerator, runs_ahead
from deepspeed.comm.shard_ops import PendingShards, gather_from_owners, gather_slices, is_pairwise
from deepspeed.comm.watch import lone_waits
from deepspeed.runtime.module_hooks.parameter_arrivals import ParameterArrivals
from deepspeed.runtime.sharding.flattening import lies_on_host
from deepspeed.runtime.sharding.fragments import NumEl, Section
from deepspeed.runtime.sharding.group import ShardedGroup
from deepspeed.runtime.streams import StagingBuffers

# Elements updated at a time: so many that what a piece costs by itself is small, so few that little
# is left to be sent when the last one is updated.
UPDATE_NUMEL = 1 << 21
# One piece is on its way to the device while the next is written.
NUM_STAGED = 2
HALF_DTYPES = (torch.bfloat16, torch.float16)


class Gather(NamedTuple):
    """What one collective sends: elements `start` to `end` of each rank's shard, of one section."""

    section: Section
    start: NumEl
    end: NumEl


class Publisher:
    """Sends one group's shard, in the order of `pieces`.

    Args:
        allgather_bucket_size: Most elements that one gather by pieces fills on a rank. A section
            that is gathered in place needs no memory, and is not cut.
        by_broadcast: One broadcast per owner instead of an all-gather.
        arrivals: Leave gathers to it; None: `finish` waits for them.
    """

    def __init__(
        self,
        group: ShardedGroup,
        allgather_bucket_size: int,
        by_broadcast: bool,
        arrivals: ParameterArrivals | None = None,
    ) -> None:
        self._group = group
        self._by_broadcast = by_broadcast
        # Masters that are a part of what is gathered may be written before the next update, by a
        # checkpoint that is loaded, say.
        self._arrivals = None if group.aliased else arrivals
        self._on_host = get_accelerator().is_synchronized_device() or lies_on_host(group.flat)
        gathers = group.num_shards > 1 and not by_broadcast
        self._pairwise = gathers and is_pairwise(group.flat, group.process_group)
        # By the end in the shard: when that is updated, the gather may go.
        self._planned = {gather.end: gather for gather in self._plan(allgather_bucket_size)}
        self._staging = StagingBuffers(NUM_STAGED, pin=group.pin)
        # The buffer that the piece at hand is rounded to, if it is one.
        self._staged: torch.Tensor | None = None
        self._rounded = False  # whether the piece at hand has been rounded by the optimizer
        self._updated_to = 0  # the end of the last piece of this pass
        self._sent: Any = None  # the event of the last copy to the device
        self._gathers: deque[PendingShards] = deque()

    def _plan(self, bucket_size: int) -> Iterator[Gather]:
        """Yield the gathers, in order. Slices that need no buffer are short, and leave early."""
        short = max(1, min(UPDATE_NUMEL, bucket_size // self._group.num_shards))
        for section in self._group.table.sections:
            size = short if self._pairwise else section.part_numel
            end = section.shard_start + section.part_numel
            for start in range(section.shard_start, end, size):
                yield Gather(section, start, min(start + size, end))

    @property
    def grad(self) -> torch.Tensor:
        return self._group.grad

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Yield first and last+1 element in the shard of each piece."""
        for gather in self._planned.values():
            for start in range(gather.start, gather.end, UPDATE_NUMEL):
                yield start, min(start + UPDATE_NUMEL, gather.end)

    def low_precision_out(self, start: int, end: int) -> torch.Tensor | None:
        """Return where the host may round the piece to; None: `updated` reads the masters."""
        group = self._group
        if group.flat.dtype not in HALF_DTYPES:
            return None
        self._rounded = True
        return group.own(start, end) if self._on_host else self._stage(end - start)

    def _stage(self, numel: int) -> torch.Tensor:
        """Half the bytes of the masters cross to the device, and no fp32 copy is needed there."""
        self._staged = self._staging.take(numel, self._group.flat.dtype)
        return self._staged[:numel]

    @torch.no_grad()
    def updated(self, start: int, end: int) -> None:
        """Send the piece at hand: its masters, and `low_precision_out` if asked for, are final."""
        group = self._group
        if not self._rounded and not self._on_host and lies_on_host(group.master):
            self._stage(end - start).copy_(group.master[start:end])
        if self._staged is not None:
            self._send(self._staged[: end - start], start)
            self._staging.give_back(self._staged, self._sent)
            self._staged = None
        elif not self._rounded and not group.aliased:
            self._send(group.master[start:end], start)
        self._rounded = False
        self._updated_to = end
        if end in self._planned:
            self._gather(self._planned[end])

    def abandon(self) -> None:
        """Gather the pieces that have not been sent as they are: their update has failed, and other
        ranks gather theirs.
        """
        if self._staged is not None:
            self._staging.give_back(self._staged, self._sent)
        self._staged, self._rounded = None, False
        for end, gather in self._planned.items():
            if end > self._updated_to:
                self._gather(gather)

    def _send(self, source: torch.Tensor, start: int) -> None:
        own = self._group.own(start, start + source.numel())
        self._copy(own, source, asynchronous=self._group.pin)

    def _copy(self, own: torch.Tensor, source: torch.Tensor, asynchronous: bool) -> None:
        own.copy_(source, non_blocking=asynchronous)
        if asynchronous:
            self._sent = get_accelerator().Event()
            self._sent.record(get_accelerator().current_stream())

    def _gather(self, gather: Gather) -> None:
        group, section = self._group, gather.section
        if group.num_shards == 1:
            return
        whole = group.flat[section.start : section.start + section.padded_numel]
        if self._pairwise:
            first, last = gather.start - section.shard_start, gather.end - section.shard_start
            parts = whole.view(group.num_shards, section.part_numel)
            slices = [part[first:last] for part in parts]
            self._gathers.append(gather_slices(slices, group.process_group, async_op=True))
            return
        start = partial(
            gather_from_owners, whole, group.process_group, self._by_broadcast, async_op=True
        )
        if self._arrivals is None:
            self._gathers.append(start())
        else:
            self._arrivals.begin(start, [group.params[index] for index in section.params])

    def publish(self) -> None:
        """Send all pieces, of masters that are final; `finish` completes it."""
        # Pieces are for a host's caches and its buffers: on the device one kernel rounds a section.
        whole = runs_ahead(self._group.master)
        for start, end in self._sections() if whole else self.pieces():
            self.updated(start, end)

    def _sections(self) -> Iterator[tuple[int, int]]:
        for gather in self._planned.values():
            yield gather.start, gather.end

    def finish(self) -> None:
        """Wait for gathers (on the current stream, where there are streams), and until no copy
        reads host memory: whoever likes may write to the masters then.
        """
        self._updated_to = 0
        while self._gathers:
            with lone_waits.watch.waiting(lambda: "updated parameters"):
                self._gathers.popleft().wait()
        if self._sent is not None:
            self._sent.synchronize()
            self._sent = None

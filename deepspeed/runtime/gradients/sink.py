"""Where a reduced slice goes: added into the owner's gradient, on the device or on the host.

A sink remembers which buckets were written since the last step, so the first write replaces what an earlier step left behind and no
pass over memory is spent on zeroing.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.gradients.buckets import Segment
from deepspeed.runtime.sharding.group import ShardedGroup


class DeviceSink:
    """Adds reduced pieces to `group.grad` where it lies on the device of the pieces."""

    def __init__(self) -> None:
        self._written: set[int] = set()

    @property
    def is_empty(self) -> bool:
        """Whether nothing was added since the last `clear`."""
        return not self._written

    @torch.no_grad()
    def add(
        self, bucket: int, group: ShardedGroup, segments: tuple[Segment, ...], pieces: list[torch.Tensor], factor: float
    ) -> None:
        """Gradient of the shard += factor * sum of `pieces`.

        Args:
            bucket: Which bucket; its first contribution since `clear` replaces.
            group: Whose gradient.
            segments: Where the piece's elements lie in the shard, in piece order.
            pieces: Tensors of as many elements as the segments hold together.
            factor: From the reduce rule.
        """
        first = bucket not in self._written
        self._written.add(bucket)
        start = 0
        for segment in segments:
            target = group.grad[segment.shard_start : segment.shard_start + segment.numel]
            parts = [piece[start : start + segment.numel] for piece in pieces]
            self._accumulate(target, parts, factor, first)
            start += segment.numel

    def _accumulate(self, target: torch.Tensor, parts: list[torch.Tensor], factor: float, first: bool) -> None:
        if first:
            target.copy_(parts[0])
            target.mul_(factor)
            parts = parts[1:]
        for part in parts:
            target.add_(part, alpha=factor)

    def finish(self) -> None:
        """Return when `group.grad` is complete."""

    def clear(self) -> None:
        """Forget all contributions."""
        self._written.clear()


class HostSink(DeviceSink):
    """The same for gradients offloaded to the host: device slices are staged in page-locked buffers and added by the host.

    Args:
        buffer_count: How many staged slices may be in flight; bounds page-locked memory (`offload_optimizer.buffer_count`).
    """

    def __init__(self, buffer_count: int) -> None:
        super().__init__()
        self._buffer_count = max(1, buffer_count)
        self._in_flight: deque[tuple[torch.Tensor, list[torch.Tensor], float, bool, Any]] = deque()

    def _accumulate(self, target: torch.Tensor, parts: list[torch.Tensor], factor: float, first: bool) -> None:
        accelerator = get_accelerator()
        if accelerator.on_accelerator(target):
            super()._accumulate(target, parts, factor, first)
            return
        while len(self._in_flight) >= self._buffer_count:
            self._land()
        staged = [accelerator.pin_memory(torch.empty(part.shape, dtype=part.dtype)) for part in parts]
        for host, part in zip(staged, parts, strict=True):
            host.copy_(part, non_blocking=True)
        # The copies are only ordered on the device; the host may read `staged` once this event has passed.
        event = accelerator.Event()
        event.record(accelerator.current_stream())
        self._in_flight.append((target, staged, factor, first, event))

    def _land(self) -> None:
        target, staged, factor, first, event = self._in_flight.popleft()
        event.synchronize()
        super()._accumulate(target, staged, factor, first)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for all copies and add them."""
        while self._in_flight:
            self._land()

    def clear(self) -> None:
        """Forget all contributions, those in flight too."""
        self._in_flight.clear()
        super().clear()

"""Where a reduced slice goes: added into the owner's gradient, on the device or on the host.

A sink remembers which buckets were written since the last step, so the first write replaces what an
earlier step left behind and no pass over memory is spent on zeroing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from deepspeed.accelerator import get_accelerator, runs_ahead
from deepspeed.ops.early_update import SpeculativeUpdate
from deepspeed.runtime.gradients.buckets import Segment
from deepspeed.runtime.gradients.norm import joined
from deepspeed.runtime.sharding.group import ShardedGroup
from deepspeed.runtime.streams import SideStream, StagingBuffers

# Elements that a thread of the host widens and adds at a time: what it widens stays in its cache. A
# whole slice would cost memory of its own, and adding a narrow tensor to a wide one directly takes
# torch several times as long.
HOST_CHUNK = 1 << 17
# Elements of one staged copy: bounds page-locked memory, and lets the host add while the rest of a
# large slice is still on its way.
STAGE_NUMEL = 1 << 22


def accumulate(
    target: torch.Tensor, parts: Sequence[torch.Tensor], factor: float, first: bool
) -> None:
    """Add factor * sum of `parts` to `target`, in its dtype, in order; `first` replaces it."""
    if first and factor == 1.0:
        target.copy_(parts[0])
        parts, first = parts[1:], False
    if not runs_ahead(target) and any(part.dtype != target.dtype for part in parts):
        size = HOST_CHUNK * torch.get_num_threads()
        for start in range(0, target.numel(), size):
            chunk = slice(start, start + size)
            _accumulate_all(
                target[chunk], [part[chunk].to(target.dtype) for part in parts], factor, first
            )
    else:
        _accumulate_all(target, parts, factor, first)


def _accumulate_all(
    target: torch.Tensor, parts: Sequence[torch.Tensor], factor: float, first: bool
) -> None:
    if first:
        if parts[0].dtype == target.dtype:
            torch.mul(parts[0], factor, out=target)
        elif torch.promote_types(parts[0].dtype, target.dtype) == target.dtype:
            # One element, not a number: the product is rounded to the target's dtype alone.
            torch.mul(parts[0], target.new_full((1,), factor), out=target)
        else:
            target.copy_(parts[0]).mul_(factor)
        parts = parts[1:]
    for part in parts:
        target.add_(part, alpha=factor)


class Sums:
    """How pieces join the owned gradient: added as they come."""

    def add(
        self, target: torch.Tensor, parts: Sequence[torch.Tensor], factor: float, first: bool
    ) -> None:
        """Add factor * sum of `parts` to `target`; `first` replaces it."""
        accumulate(target, parts, factor, first)

    def finish(self) -> None:
        """Write what is not written yet, before the owned gradient is read."""

    def clear(self) -> None:
        """Forget what is not written."""

    def state(self, grads: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
        """What is not written, of targets in `grads`: the tensors."""
        return []

    def load_state(self, grads: Sequence[torch.Tensor], saved: Sequence[Mapping[str, Any]]) -> None:
        """Go on where the `state` of an equal run was."""


class _Target(NamedTuple):
    """Where pieces are added, and how."""

    param: torch.Tensor  # whose gradient it is, to the optimizer
    grad: torch.Tensor
    segments: Sequence[Segment]
    factor: float
    first: bool
    is_last: bool


class DeviceSink:
    """Adds reduced pieces to `group.grad` where it lies on the device of the pieces; tells `early`
    what is final.
    """

    def __init__(self, sums: Sums, early: SpeculativeUpdate | None = None) -> None:
        self.written: set[int] = set()
        self.sums = sums
        self.early = early
        self._final: set[int] = set()

    @property
    def is_empty(self) -> bool:
        return not self.written

    @torch.no_grad()
    def add(
        self,
        bucket: int,
        group: ShardedGroup,
        segments: tuple[Segment, ...],
        pieces: list[torch.Tensor],
        factor: float,
        is_last: bool = False,
    ) -> Any:
        """Add factor * sum of `pieces` to the gradient of the shard.

        Args:
            bucket: Which bucket; its first contribution since `clear` replaces.
            group: Whose gradient.
            segments: Where the piece's elements lie in the shard, in piece order.
            pieces: Tensors of as many elements as the segments hold together.
            factor: From the reduce rule.
            is_last: Whether it should be the last before the step.

        Returns:
            None if the pieces have been read by what is issued on the current stream; otherwise an
            event: who overwrites their memory waits for it.
        """
        first = bucket not in self.written
        self.written.add(bucket)
        if self.early is not None and bucket in self._final:
            self.early.forget()
        if is_last:
            self._final.add(bucket)
        to = _Target(group.masters[0], group.grad, segments, factor, first, is_last)
        return self._add(to, pieces)

    def _add(self, to: _Target, pieces: list[torch.Tensor]) -> Any:
        if self.early is not None:
            self.early.landing(to.param, to.grad)
        start = 0
        for segment in to.segments:
            target = to.grad[segment.shard_start : segment.shard_start + segment.numel]
            parts = [piece[start : start + segment.numel] for piece in pieces]
            self.sums.add(target, parts, to.factor, to.first)
            start += segment.numel
        if self.early is not None:
            ranges = [(one.shard_start, one.shard_start + one.numel) for one in to.segments]
            self.early.landed(to.param, to.grad, joined(ranges) if to.is_last else [])
        return None

    def settle(self) -> None:
        """Return when all pieces were added."""

    @torch.no_grad()
    def finish(self) -> None:
        """Return when `group.grad` is complete."""
        self.settle()
        self.sums.finish()

    def clear(self) -> None:
        self.written.clear()
        self._final.clear()
        self.sums.clear()
        if self.early is not None:
            self.early.clear()


class _Staged(NamedTuple):
    """Reduced pieces on their way to the host, in buffers that `event` completes."""

    target: _Target
    buffers: list[torch.Tensor]
    event: Any


class HostSink(DeviceSink):
    """Adds gradients offloaded to the host: copied to page-locked buffers and added by the host.

    Copies go on a stream of their own, so neither backward nor the next reduction waits for them.
    The host adds what has arrived when it comes by with the next bucket, and waits only where all
    `buffer_count` buffers are on their way.
    """

    def __init__(
        self, sums: Sums, buffer_count: int, early: SpeculativeUpdate | None = None
    ) -> None:
        super().__init__(sums, early)
        self._buffer_count = max(1, buffer_count)
        self._buffers = StagingBuffers(self._buffer_count)
        self._copies = SideStream(overlap=True, name="gradient offload stream")
        self._in_flight: deque[_Staged] = deque()

    def _add(self, to: _Target, pieces: list[torch.Tensor]) -> Any:
        if get_accelerator().on_accelerator(to.grad):
            return super()._add(to, pieces)
        # The pieces are complete after what is issued on the stream that adds them, and are its
        # memory.
        owner = self._copies.current_stream()
        self._copies.wait_for([owner])
        event = None
        for start in range(0, pieces[0].numel(), STAGE_NUMEL):
            while self._in_flight and (
                len(self._in_flight) >= self._buffer_count or self._in_flight[0].event.query()
            ):
                self._land()
            parts = [piece[start : start + STAGE_NUMEL] for piece in pieces]
            buffers, event = self._stage(parts)
            within = to._replace(segments=_cut(to.segments, start, start + STAGE_NUMEL))
            self._in_flight.append(_Staged(within, buffers, event))
        self._copies.keep_alive(pieces, [owner])
        return event

    def _stage(self, parts: list[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        """Start copying `parts` to the host; returns copies and the event completing them."""
        buffers = [self._buffers.take(part.numel(), part.dtype) for part in parts]
        with self._copies.issue():
            for host, part in zip(buffers, parts, strict=True):
                host[: part.numel()].copy_(part, non_blocking=True)
            # The copies are only ordered on the device; the host may read `buffers` once this event
            # has passed.
            event = get_accelerator().Event()
            event.record(get_accelerator().current_stream())
        return buffers, event

    def _land(self) -> None:
        target, buffers, event = self._in_flight.popleft()
        event.synchronize()
        super()._add(target, buffers)
        for buffer in buffers:
            self._buffers.give_back(buffer)

    @torch.no_grad()
    def settle(self) -> None:
        while self._in_flight:
            self._land()
        self._copies.join()

    def clear(self) -> None:
        while self._in_flight:
            staged = self._in_flight.popleft()
            for buffer in staged.buffers:
                # It may still arrive: memory that is let go is unlocked at once.
                self._buffers.give_back(buffer, staged.event)
        super().clear()


def _cut(segments: Sequence[Segment], begin: int, end: int) -> list[Segment]:
    """The parts of `segments` that elements `begin` to `end` of a piece belong to."""
    found = []
    position = 0
    for segment in segments:
        first, last = max(begin, position), min(end, position + segment.numel)
        if first < last:
            skipped = first - position
            found.append(
                Segment(segment.bucket_start + skipped, segment.shard_start + skipped, last - first)
            )
        position += segment.numel
    return found

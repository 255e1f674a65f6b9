"""The channels of one pipeline rank: activations and gradients, in and out, of each model chunk."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from deepspeed import comm as dist
from deepspeed.runtime.pipe.messages.channel import Channel, messages_ahead
from deepspeed.runtime.pipe.messages.failure import FailureWatch
from deepspeed.runtime.pipe.messages.posting import Arrival, ChannelKey, Lane
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.pipe.p2p import make_channel_groups


class ChunkChannels(NamedTuple):
    """What one model chunk hands over; None at the ends of the pipeline."""

    activations_in: Channel | None
    activations_out: Channel | None
    gradients_in: Channel | None
    gradients_out: Channel | None


class _LaneKey(NamedTuple):
    """What has a group: global ranks, and whether gradients are sent."""

    src: int
    dst: int
    backwards: bool


class _Lane:
    """Receives that share a communicator, in the order in which their messages are sent."""

    def __init__(self) -> None:
        self._coming: deque[tuple[Channel, int]] = deque()
        self._issued = 0
        self._ahead = messages_ahead()
        self._num_posted = 0
        self._last: Channel | None = None  # whose message was posted last

    def expect(self, coming: Sequence[tuple[Channel, int]]) -> None:
        """Begin a batch: these channels' messages come, each after so many instructions."""
        self._coming = deque(coming)
        self._issued = self._num_posted = 0
        self._last = None

    def issued(self, count: int) -> None:
        self._issued = count
        self.post()

    def post(self) -> None:
        """Post what depends on issued instructions only, `messages_ahead()` at most."""
        while (
            self._coming
            and self._coming[0][1] <= self._issued
            and self._num_posted < self._ahead
            and not (self._last is not None and self._last.awaits_description)
            and self._post_next()
        ):
            pass

    def _post_next(self) -> bool:
        channel = self._coming[0][0]
        if not channel.post_one():
            return False
        self._coming.popleft()
        self._num_posted += 1
        self._last = channel
        return True

    def require(self, channel: Channel) -> None:
        """Have the next message of a channel posted, and all that are sent before it."""
        while not channel.has_posted:
            if self._last is not None and self._last.awaits_description:
                self._last.read_description()
            if not self._coming or not self._post_next():
                raise RuntimeError(f"{channel.name}: a message is received that nobody announced")

    def received(self) -> None:
        self._num_posted -= 1


class StageChannels:
    """The channels of this rank. Construction is collective over the world."""

    def __init__(self, module: PipelineModule, device: torch.device, watch: FailureWatch) -> None:
        self._module = module
        self._num_parts = module.num_stages * module.num_model_chunks
        self._device = device
        self._watch = watch
        borders = range(1, self._num_parts)
        stages = module.num_stages
        # On backends that order everything of a pair on one communicator each lane has a group of
        # its own; see [Note: lanes] of `posting`. All ranks list those of all pipelines in one
        # order; the borders of later chunks repeat those of the first.
        keys = [
            _LaneKey(*pair, bool(backwards))
            for pipeline in self._pipelines()
            for border in borders[:stages]
            for backwards, pair in enumerate(self._pairs(pipeline, border))
            if pair[0] != pair[1]
        ]
        made = make_channel_groups([(key.src, key.dst) for key in keys])
        groups = dict(zip(keys, made, strict=True))
        own = module.grid.get_global_rank()
        self._made: dict[ChannelKey, Channel] = {}
        self._lanes: dict[Lane, _Lane] = {}
        (mine,) = [pipeline for pipeline in self._pipelines() if own in pipeline]
        for border in borders:
            for backwards, (src, dst) in enumerate(self._pairs(mine, border)):
                if own not in (src, dst):
                    continue
                group = groups.get(_LaneKey(src, dst, bool(backwards)))
                channel = self._channel(src, dst, border, bool(backwards), group)
                self._made[ChannelKey(border, bool(backwards))] = channel
                if own == dst != src:
                    sender = (border if backwards else border - 1) % stages
                    key = Lane(sender, bool(backwards))
                    channel.lane = self._lanes.setdefault(key, _Lane())
        self.chunks = [self._of_chunk(chunk) for chunk in range(module.num_model_chunks)]

    def _pipelines(self) -> Iterator[list[int]]:
        """The ranks of every pipeline of the world, in stage order."""
        yield from self._module.topology().get_axis_comm_lists("pipe") or [
            [self._module.grid.get_global_rank()]
        ]

    def _pairs(self, pipeline: list[int], border: int) -> list[tuple[int, int]]:
        """(source, destination) of activations into part `border`, and of gradients that return."""
        before, behind = (pipeline[part % self._module.num_stages] for part in (border - 1, border))
        return [(before, behind), (behind, before)]

    def _channel(
        self, src: int, dst: int, border: int, backwards: bool, group: dist.Group
    ) -> Channel:
        what = (
            f"gradients of part {border}'s inputs"
            if backwards
            else f"activations into part {border}"
        )
        return Channel(
            src,
            dst,
            2 * border + backwards,
            group=group,
            device=self._device,
            dynamic=self._module.dynamic_shape,
            name=f"{what} (rank {src} to rank {dst})",
            watch=self._watch,
        )

    def _of_chunk(self, chunk: int) -> ChunkChannels:
        part = chunk * self._module.num_stages + self._module.stage_id
        made = self._made
        return ChunkChannels(
            made.get(ChannelKey(part, False)),
            made.get(ChannelKey(part + 1, False)),
            made.get(ChannelKey(part + 1, True)),
            made.get(ChannelKey(part, True)),
        )

    def __iter__(self) -> Iterator[Channel]:
        return iter(self._made.values())

    def expect(self, micro_batches: int, arrivals: dict[Lane, list[Arrival]]) -> None:
        """Begin a batch: so many messages per channel of activations, these through lanes."""
        for key, lane in self._lanes.items():
            lane.expect([(self._made[channel], needs) for channel, needs in arrivals.get(key, [])])
        for chunk in self.chunks:
            if chunk.activations_in is not None:
                chunk.activations_in.expect(micro_batches)

    def issued(self, count: int) -> None:
        """Post what depends on the batch's first `count` instructions only."""
        for lane in self._lanes.values():
            lane.issued(count)

    def finish(self) -> None:
        """Return when everything that was sent has left."""
        for channel in self:
            channel.finish()

    def reset(self) -> None:
        """Forget shapes: the next message of each channel says its own."""
        for channel in self:
            channel.reset()

"""The channels of one pipeline rank: activations in and out, gradients in and out, of each of its
model chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from deepspeed import comm as dist
from deepspeed.runtime.pipe.failure import FailureWatch
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.pipe.p2p import Channel, make_channel_groups


class ChunkChannels(NamedTuple):
    """What one model chunk hands over; None at the ends of the pipeline.

    Attributes:
        activations_in: From the part before.
        activations_out: To the part behind.
        gradients_in: Of this chunk's outputs, from the part behind.
        gradients_out: Of this chunk's inputs, to the part before.
    """

    activations_in: Channel | None
    activations_out: Channel | None
    gradients_in: Channel | None
    gradients_out: Channel | None


class StageChannels:
    """See module. Construction is collective over the world.

    Args:
        module: Its grid says who is behind whom.
        device: Where received tensors live.
        watch: Ends waits when another rank has failed.
    """

    def __init__(self, module: PipelineModule, device: torch.device, watch: FailureWatch) -> None:
        self._module = module
        self._num_parts = module.num_stages * module.num_model_chunks
        self._device = device
        self._watch = watch
        borders = range(1, self._num_parts)
        # [Note: channels and groups] On backends that order everything of a pair on one
        # communicator each channel has its own group, and new_group is collective: all ranks list
        # all channels of all pipelines, in one order.
        pairs = [
            pair
            for pipeline in self._pipelines()
            for border in borders
            for pair in self._pairs(pipeline, border)
        ]
        groups = make_channel_groups(pairs)
        own = module.grid.get_global_rank()
        self._made: dict[tuple[int, bool], Channel] = {}
        at = 0
        for pipeline in self._pipelines():
            for border in borders:
                for backwards, (src, dst) in enumerate(self._pairs(pipeline, border)):
                    if own in (src, dst):
                        self._made[border, bool(backwards)] = self._channel(
                            src, dst, border, bool(backwards), groups[at]
                        )
                    at += 1
        self.chunks = [self._of_chunk(chunk) for chunk in range(module.num_model_chunks)]

    def _pipelines(self) -> Iterator[list[int]]:
        """The ranks of every pipeline of the world, in stage order."""
        yield from self._module.topology().get_axis_comm_lists("pipe") or [
            [self._module.grid.get_global_rank()]
        ]

    def _pairs(self, pipeline: list[int], border: int) -> list[tuple[int, int]]:
        """(source, destination) of the activations that cross into part `border`, and of the
        gradients that come back.
        """
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
            made.get((part, False)),
            made.get((part + 1, False)),
            made.get((part + 1, True)),
            made.get((part, True)),
        )

    def __iter__(self) -> Iterator[Channel]:
        """Every channel of this rank, once."""
        return iter(self._made.values())

    def expect(self, micro_batches: int) -> None:
        """A batch begins: so many messages will come through each channel of activations."""
        for chunk in self.chunks:
            if chunk.activations_in is not None:
                chunk.activations_in.expect(micro_batches)

    def finish(self) -> None:
        """Return when everything that was sent has left."""
        for channel in self:
            channel.finish()

    def reset(self) -> None:
        """Forget shapes: the next message of each channel says its own."""
        for channel in self:
            channel.reset()

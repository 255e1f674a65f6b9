"""Leaves of the canonical sum from a pipeline: the gradient of each micro-batch by itself, the same
bits on any number of stages and with any schedule.

A leaf is what one process has in `param.grad` after the backward of the whole micro-batch. All
schedules run the backwards of a model chunk in the order of micro-batches, which is the tree's.

- Chunks: what later chunks of a stage have is kept until the first one's backward.
- Weights that parts share: autograd adds what each use of a weight has, from the last use to the
  first. So the last part hands its gradient to the one before, which adds its own, down to the
  first, whose sum is the leaf. It has the whole gradient of the step alone, and the other stages
  get it before the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.runtime.config_utils import DeepSpeedConfigError
from deepspeed.runtime.optimizers.master_weights import MasterWeights
from deepspeed.runtime.pipe.layer_spec import PipelineError
from deepspeed.runtime.pipe.messages.channel import Channel
from deepspeed.runtime.pipe.messages.failure import FailureWatch
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.pipe.p2p import make_channel_groups


@dataclass
class _Link:
    """Tied weights in one of this stage's parts, and the parts next to it that use them."""

    weights: list[nn.Parameter]
    from_later: Channel | None = None
    to_earlier: Channel | None = None


class CanonicalLeaves:
    """The leaves of one stage. Construction is collective over the world.

    Raises:
        DeepSpeedConfigError: A part adds uses of a tied weight before others' are added.
    """

    def __init__(self, module: PipelineModule, device: torch.device, watch: FailureWatch) -> None:
        self._module, self._device, self._watch = module, device, watch
        self._params = [param for param in module.parameters() if param.requires_grad]
        self._links: dict[int, list[_Link]] = {}  # by chunk
        self._channels: list[Channel] = []
        self._kept: dict[int, dict[nn.Parameter, torch.Tensor]] = {}  # by micro-batch
        self._leaving: list[tuple[Channel, list[torch.Tensor]]] = []
        self._next = 0  # micro-batch
        uses = {key: self._uses(key, indices) for key, indices in module.tied_layers().items()}
        self._connect({key: parts for key, parts in uses.items() if len(parts) > 1})

    # Construction

    def _uses(self, key: str, indices: list[int]) -> list[int]:
        """The parts with a use of this key, the last one first."""
        parts = [self._module.part_of(index) for index in indices]
        found = sorted(set(parts), reverse=True)
        many = [part for part in found[1:] if parts.count(part) > 1]
        if many:
            raise DeepSpeedConfigError(
                f"reproducibility.world_size_invariant: true with the tied layers {key!r}, of "
                f"which part {many[0]} has {parts.count(many[0])} and a later part more: they "
                "would be added in another order than on one stage. Cut the model "
                "(partition_method) so that only the last part with one of them has several"
            )
        return found

    def _connect(self, uses: dict[str, list[int]]) -> None:
        module, stages = self._module, self._module.num_stages
        borders = [(key, *pair) for key, parts in uses.items() for pair in pairwise(parts)]
        lines = module.topology().get_axis_comm_lists("pipe") or [[module.grid.get_global_rank()]]
        pairs = [
            (line[later % stages], line[earlier % stages])
            for line in lines
            for _, later, earlier in borders
        ]
        # One for each channel: what is received first need not be what was sent first.
        groups = make_channel_groups(pairs, self._device)
        (number,) = [n for n, line in enumerate(lines) if module.grid.get_global_rank() in line]
        mine = slice(number * len(borders), (number + 1) * len(borders))
        links = {
            (key, part): _Link(module.tied_weights(key))
            for key, parts in uses.items()
            for part in parts
            if part % stages == module.stage_id
        }
        ends = zip(borders, pairs[mine], groups[mine], strict=True)
        for tag, ((key, later, earlier), pair, group) in enumerate(ends):
            channel = Channel(
                *pair,
                tag,
                group=group,
                device=self._device,
                dynamic=False,
                name=f"gradients of tied {key!r} from part {later} (ranks {pair[0]} to {pair[1]})",
                watch=self._watch,
            )
            if (key, later) in links:
                links[key, later].to_earlier = channel
                self._channels.append(channel)
            if (key, earlier) in links:
                links[key, earlier].from_later = channel
        for (_, part), link in links.items():
            self._links.setdefault(part // stages, []).append(link)

    # In the order of a batch

    def begin(self) -> None:
        self._next = 0

    def is_whole(self, micro_batch: int, chunk: int) -> bool:
        """Take in the gradients of a backward; whether `param.grad` are leaves now."""
        for link in self._links.get(chunk, ()):
            self._join(link)
        if chunk > 0:
            self._kept[micro_batch] = self._taken(micro_batch)
            return False
        if micro_batch != self._next:
            raise PipelineError(
                "reproducibility.world_size_invariant: true with a schedule that runs the backward "
                f"of micro-batch {micro_batch} where that of {self._next} is next"
            )
        self._next += 1
        for param, grad in self._taken(micro_batch).items():
            param.grad = grad
        return True

    def _taken(self, micro_batch: int) -> dict[nn.Parameter, torch.Tensor]:
        """What later chunks have, and what this one has added."""
        found = self._kept.pop(micro_batch, {})
        for param in self._params if self._module.num_model_chunks > 1 else ():
            if param.grad is not None:
                found[param] = found[param] + param.grad if param in found else param.grad
                param.grad = None
        return found

    def _join(self, link: _Link) -> None:
        """Add what later parts have, and hand the sum on if an earlier one has something to add."""
        own = [torch.zeros_like(w) if w.grad is None else w.grad for w in link.weights]
        if link.from_later is not None:
            for grad, later in zip(own, link.from_later.recv_like(own), strict=True):
                grad.add_(later)
        for weight, grad in zip(link.weights, own, strict=True):
            weight.grad = grad if link.to_earlier is None else None
        if link.to_earlier is not None:
            self._leaving.append((link.to_earlier, own))

    def send(self) -> None:
        """Hand on sums of tied weights. After the gradients of activations, which the receiver
        needs before: a device may run one transfer after the other.
        """
        for channel, grads in self._leaving:
            channel.send_like(grads)
        self._leaving.clear()

    @torch.no_grad()
    def share(self, masters: MasterWeights) -> None:
        """Give the step's gradients of tied weights to the stages that hold them too."""
        for channel in self._channels:
            channel.finish()
        module = self._module
        for key, comm in module.tied_comms.items():
            first = module.grid.stage_to_global(module.stage_owner(module.tied_layers()[key][0]))
            for weight in module.tied_weights(key):
                group, index = masters.places[weight]
                grads = [one.grad for one in masters.groups]
                is_first = not getattr(weight, "ds_pipe_replicated", False)
                whole = (
                    masters.gather_full([(group, index)], grads)[0]
                    if is_first
                    else torch.empty(weight.shape, dtype=torch.float32, device=self._device)
                )
                dist.broadcast(whole, src=first, group=comm["group"])
                owned = masters.groups[group].owned(index)
                if owned is not None and not is_first:
                    grads[group][owned.in_shard].copy_(whole.view(-1)[owned.in_param])

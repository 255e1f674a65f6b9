"""Reading what ranks own of masters, moments and gradients: `ReadableMasters`.

For observers, reports, `safe_get_*` and those who set a parameter.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.runtime.gradients.scope import GradientPiece
from deepspeed.runtime.optimizers.owner_steps import OwnerSteps
from deepspeed.runtime.optimizers.step_sequence import StepSequence
from deepspeed.runtime.sharding.group import ShardedGroup
from deepspeed.utils.tensor_fragment import logical_shape

if TYPE_CHECKING:
    from deepspeed.runtime.gradients.local_accumulator import LocalAccumulator


def _reader(group: ShardedGroup, start: int, numel: int) -> Callable[[], torch.Tensor]:
    """Reads the owned gradient at the time of the call: its buffer is made late and may be
    replaced.
    """
    return lambda: group.grad[start : start + numel]


class ReadableMasters(StepSequence):
    """A step sequence over sharded groups whose owned state can be read.

    Attributes:
        groups: Flat groups of parameters, and what this rank owns of each.
        param_names: Name of each parameter, in model order.
        communication_data_type: What gradients travel in; None is the dtype of their sums.
    """

    groups: list[ShardedGroup]
    param_names: dict[nn.Parameter, str]
    # Sum of micro-batches in a dtype of its own, if there is one.
    accumulator: LocalAccumulator | None
    communication_data_type: torch.dtype | None

    def named_memory(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names of buffers, for reports; see `deepspeed.utils.memory_names`."""
        for index, group in enumerate(self.groups):
            names = [self.param_names.get(param, "?") for param in group.params]
            yield from group.named_memory(index, names)
            grads = ((name, param.grad) for name, param in zip(names, group.params, strict=True))
            yield from ((f"gradient of {name}", grad) for name, grad in grads if grad is not None)

    def gradient_pieces(self) -> list[GradientPiece]:
        """See base class: the fragments of all parameters."""
        pieces = []
        for group in self.groups:
            for index, param in enumerate(group.params):
                for fragment in group.table.of_param(index):
                    read = (
                        _reader(group, fragment.shard_start, fragment.numel)
                        if fragment.shard == group.shard_rank
                        else None
                    )
                    pieces.append(
                        GradientPiece(
                            param, fragment.param_start, fragment.numel, read, self._sums_in(param)
                        )
                    )
        return pieces

    def _sums_in(self, param: nn.Parameter) -> torch.dtype:
        """The narrowest dtype that a sum of this parameter's gradients passes through."""
        local = param.dtype if self.accumulator is None else self.accumulator.flats[0].dtype
        return max(
            (local, self._travels_in(param, local)), key=lambda dtype: torch.finfo(dtype).eps
        )

    def _travels_in(self, param: nn.Parameter, local: torch.dtype) -> torch.dtype:
        """The dtype of this parameter's gradient during reduction; `local` is that of its sum on
        this rank.
        """
        return self.communication_data_type or local

    @property
    @abstractmethod
    def has_reduced_gradients(self) -> bool:
        """See base class: and can be read."""

    @property
    def read_factor(self) -> float:
        """By what the accumulated gradient is multiplied to be the one that the optimizer will see
        (before clipping).
        """
        return self.reduce_rule.step_factor / (self._step_divisor * self.loss_scale)

    def gather_full(
        self, links: Sequence[tuple[int, int]], shards: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Whole tensors of several parameters from their owners, with one collective per process
        group that shares them.

        All ranks that hold the parameters must call it alike.

        Args:
            links: Group and index of each parameter.
            shards: For each group, this rank's shard of the wanted quantity (master, moment or
                gradient).

        Returns:
            fp32 tensors in the parameters' shapes, on the model's device.
        """
        by_group: dict[dist.Group, list[int]] = {}
        for position, (group, _) in enumerate(links):
            by_group.setdefault(self.groups[group].process_group, []).append(position)
        values: dict[int, torch.Tensor] = {}
        for process_group, positions in by_group.items():
            pieces = self._gather_from(
                [links[position] for position in positions], shards, process_group
            )
            values.update(zip(positions, pieces, strict=True))
        return [values[position] for position in range(len(links))]

    def _gather_from(
        self,
        links: Sequence[tuple[int, int]],
        shards: Sequence[torch.Tensor],
        process_group: dist.Group,
    ) -> list[torch.Tensor]:
        numels = [self.groups[group].table.numels[index] for group, index in links]
        flat = torch.zeros(sum(numels), dtype=torch.float32, device=self.device)
        start = 0
        for (group, index), numel in zip(links, numels, strict=True):
            owned = self.groups[group].owned(index)
            if owned is not None:
                whole = flat[start : start + numel]
                whole[owned.in_param].copy_(shards[group][owned.in_shard])
            start += numel
        # Every element is non-zero on its owner at most, so the sum is exact.
        if process_group is not None:
            dist.all_reduce(flat, group=process_group)
        shapes = [logical_shape(self.groups[group].params[index]) for group, index in links]
        return [piece.view(shape) for piece, shape in zip(flat.split(numels), shapes, strict=True)]

    @property
    def owner_steps(self) -> OwnerSteps | None:
        """The wrapped optimizer, if it keeps state of whole parameters with their owners."""
        return self.optimizer if isinstance(self.optimizer, OwnerSteps) else None

    def set_param(self, param: nn.Parameter, value: torch.Tensor) -> None:
        """Model-precision value of `param` <- `value`, the same on all ranks; its master is set
        already.
        """
        with torch.no_grad():
            param.copy_(value)

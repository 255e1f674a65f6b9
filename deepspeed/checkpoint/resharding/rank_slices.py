"""The tensor-parallel slices of one rank, taken of consolidated parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint.resharding.consolidation import ConsolidatedParameters
from deepspeed.checkpoint.resharding.saved_optimizer import FP32, SavedFragment
from deepspeed.checkpoint.resharding.tensor_parallel import SlicePatterns, slice_of_rank


class RankSlices:
    """What one rank takes of whole parameters, in the form of `SavedOptimizer`'s fragments."""

    def __init__(
        self,
        parameters: ConsolidatedParameters,
        shapes: Mapping[str, Sequence[int]],
        rank: int,
        size: int,
        patterns: SlicePatterns | None = None,
    ) -> None:
        self.parameters = parameters
        self.options = parameters.options
        self.scaler = parameters.scaler
        self._shapes, self._rank, self._size = shapes, rank, size
        self._patterns = patterns
        self._known = set(parameters.names())

    @property
    def is_resliced(self) -> bool:
        """Whether the run that saved them had another number of tensor-parallel ranks."""
        return self.parameters.tensor_size != self._size

    @property
    def has_state(self) -> bool:
        """Whether the run that saved them had an optimizer."""
        return bool(self.options)

    def weight(self, name: str) -> torch.Tensor | None:
        """The rank's slice of a weight in fp32; None if only files of weights may have it."""
        if name not in self._known or FP32 not in self.parameters.slots(name):
            return None
        return self._own(name, FP32)

    def fragments(self) -> Iterator[SavedFragment]:
        for name, shape in self._shapes.items():
            if name in self._known:
                values = {
                    slot: self._own(name, slot).reshape(-1) for slot in self.parameters.slots(name)
                }
                group = self.parameters.group(name)
                options = {} if group is None else self.options[group]
                yield SavedFragment(
                    name,
                    0,
                    torch.Size(shape).numel(),
                    values,
                    self.parameters.shared(name),
                    options,
                    group,
                )

    def _own(self, name: str, slot: str) -> torch.Tensor:
        entry = self.parameters.entry(name, slot)
        if self._patterns is not None:
            entry = self._patterns.merged(name, [entry[keys.PARAM]])
        return slice_of_rank(name, entry, self._shapes[name], self._rank, self._size)

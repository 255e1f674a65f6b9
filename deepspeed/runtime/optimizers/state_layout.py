"""What an optimizer says of its state, so that saving, loading and resharding ask it and need not
know which one it is.

An optimizer answers by `StepSequence.state_layout` how its state is spread over files, and by
`StepSequence.own_tensors` which elements of which parameters it holds. A further one brings answers
of its own; whoever asks stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from deepspeed.runtime.sharding.fragments import ShardRank
from deepspeed.utils.tensor_fragment import logical_shape


@dataclass(frozen=True)
class OwnShard:
    """Which of the shards that together are the state this rank has; each is a file.

    Attributes:
        rank: Its number.
        count: How many shards there are.
        holders: Process group of the ranks that hold this same shard, of which one writes it; None:
            no other rank does.
    """

    rank: ShardRank
    count: int
    holders: Any = None


@dataclass(frozen=True)
class StateLayout:
    """How an optimizer's state lies in checkpoint files.

    Attributes:
        shard: This rank's shard; None: this rank has the state of all its parameters whole.
        has_masters: fp32 masters are part of it, apart from the model's weights.
        has_weights: The masters are the only copy of trained weights; the model file of each shard
            has none.
        lists_frozen: Frozen parameters stand in the model file a second time, where tools that make
            whole weights of shards look for them.
    """

    shard: OwnShard | None = None
    has_masters: bool = False
    has_weights: bool = False
    lists_frozen: bool = False


class ParamRun(NamedTuple):
    """`numel` elements of a parameter, from `start`, that lie at `at` of a tensor."""

    param: nn.Parameter
    start: int
    at: int
    numel: int


class OwnTensor(NamedTuple):
    """A tensor that the wrapped optimizer updates.

    Attributes:
        tensor: What its state is kept by.
        group: Number of its parameter group.
        runs: The parts of parameters that lie in it, as files have it; what they leave is padding.
        required: It is trained, so a checkpoint that is loaded must have its state.
        filed_as: Its shape in files where that is another than in memory.
        has_state: The optimizer keeps state by it. Where an optimizer updates whole parameters that
            are dealt to ranks, shards have the masters, and tensors of their own the state.
        beside: It has state only, which files have by this name beside that of its group's shard.
    """

    tensor: torch.Tensor
    group: int
    runs: Sequence[ParamRun]
    required: bool = True
    filed_as: tuple[int, ...] | None = None
    has_state: bool = True
    beside: str | None = None

    @classmethod
    def of_param(
        cls, tensor: torch.Tensor, group: int, param: nn.Parameter, required: bool = True
    ) -> OwnTensor:
        """One that holds a whole parameter in its shape."""
        return cls(tensor, group, (ParamRun(param, 0, 0, logical_shape(param).numel()),), required)

    @property
    def shape(self) -> torch.Size:
        """Its shape in files."""
        return self.tensor.shape if self.filed_as is None else torch.Size(self.filed_as)

    @property
    def is_whole(self) -> bool:
        """Whether it is one parameter, in its shape."""
        return len(self.runs) == 1 and self.shape == logical_shape(self.runs[0].param)

    @property
    def used(self) -> int:
        """Elements that belong to parameters."""
        return sum(run.numel for run in self.runs)

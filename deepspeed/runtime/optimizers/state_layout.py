"""What an optimizer says of its state, so that saving, loading and resharding ask it and need not
know which one it is.

Its part `StateFiles` answers how the state is spread over files and what this rank's has, and
`StepSequence.own_tensors` which elements of which parameters it holds. A further optimizer brings
answers of its own; whoever asks stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from deepspeed.checkpoint.constants import MASTER_KEYS
from deepspeed.runtime.sharding.fragments import ShardRank
from deepspeed.runtime.sharding.loading_in_place import load_apart
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


class StateFiles:
    """The state in checkpoints of an optimizer that updates the model's own parameters, each whole
    on every rank that has it. Others derive from it.

    Args:
        optimizer: The wrapped optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    @property
    def state_layout(self) -> StateLayout:
        """How the state lies in files."""
        return StateLayout()

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank's tensors."""
        state: dict[str, Any] = self._optimizer.state_dict()
        return state

    def load_state_dict(
        self,
        state_dict: dict[str, Any],
        load_optimizer_states: bool = True,
        load_from_fp32_weights: bool = True,
    ) -> None:
        """Restore what `state_dict` returned.

        Args:
            state_dict: As `state_dict()` returned it on this rank.
            load_optimizer_states: Restore moments and hyper-parameters, not only masters.
            load_from_fp32_weights: Restore masters, where there are any; otherwise round them up
                from the model-precision weights.
        """
        if load_optimizer_states:
            load_apart(self._optimizer, state_dict)

    def fits(self, saved: Mapping[str, Any]) -> bool:
        """Whether `saved`, of a run that is divided over its ranks as this one is, could be of this
        rank's `state_dict`; otherwise it is resharded.
        """
        return not MASTER_KEYS & saved.keys()

    def rebuilt_state(
        self, base: dict[str, Any], masters: Sequence[torch.Tensor], scaler: Mapping[str, Any]
    ) -> dict[str, Any]:
        """What `state_dict` would return if this were the state.

        Args:
            base: State dict of the wrapped optimizer.
            masters: The master of each of `own_tensors`, in its shape in files; padding is zero.
            scaler: State of the loss scale, of whatever kind of scaler; may be empty.
        """
        return base

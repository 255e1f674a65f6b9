"""What an optimizer says of its state, so that saving, loading and resharding need not know which
one it is: `StateFiles` of files, `own_tensors` of which elements of which parameters it has.
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
    """Which of the shards that together are the state this rank has; each is a file."""

    rank: ShardRank
    count: int
    # process group of the ranks that hold this same shard, of which one writes it; None: no other
    # rank does
    holders: Any = None


@dataclass(frozen=True)
class StateLayout:
    """How an optimizer's state lies in checkpoint files."""

    # this rank's shard; None: this rank has the state of all its parameters whole
    shard: OwnShard | None = None
    has_masters: bool = False  # fp32 masters are part of it, apart from the model's weights
    # the masters are the only copy of trained weights; the model file of each shard has none
    has_weights: bool = False
    # frozen parameters stand in the model file a second time, where tools that make whole weights
    # of shards look for them
    lists_frozen: bool = False


class ParamRun(NamedTuple):
    """`numel` elements of a parameter, from `start`, that lie at `at` of a tensor."""

    param: nn.Parameter
    start: int
    at: int
    numel: int


class OwnTensor(NamedTuple):
    """A tensor that the wrapped optimizer updates."""

    tensor: torch.Tensor  # what its state is kept by
    group: int
    # the parts of parameters that lie in it, as files have it; what they leave is padding
    runs: Sequence[ParamRun]
    required: bool = True  # it is trained, so a checkpoint that is loaded must have its state
    # its shape in files where that is another than in memory
    filed_as: tuple[int, ...] | None = None
    # The optimizer keeps state by it. Where an optimizer updates whole parameters that are dealt to
    # ranks, shards have the masters, and tensors of their own the state.
    has_state: bool = True
    # it has state only, which files have by this name beside that of its group's shard
    beside: str | None = None

    @classmethod
    def of_param(
        cls, tensor: torch.Tensor, group: int, param: nn.Parameter, required: bool = True
    ) -> OwnTensor:
        return cls(tensor, group, (ParamRun(param, 0, 0, logical_shape(param).numel()),), required)

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape if self.filed_as is None else torch.Size(self.filed_as)

    @property
    def is_whole(self) -> bool:
        return len(self.runs) == 1 and self.shape == logical_shape(self.runs[0].param)

    @property
    def used(self) -> int:
        return sum(run.numel for run in self.runs)


class StateFiles:
    """The state in checkpoints of an optimizer that updates the model's own parameters, each whole
    on every rank that has it. Others derive from it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    @property
    def state_layout(self) -> StateLayout:
        return StateLayout()

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._optimizer.state_dict()
        return state

    def load_state_dict(
        self,
        state_dict: dict[str, Any],
        load_optimizer_states: bool = True,
        load_from_fp32_weights: bool = True,
    ) -> None:
        """Restore what `state_dict` returned on this rank.

        Args:
            state_dict: The state.
            load_optimizer_states: Restore moments and hyper-parameters, not only masters.
            load_from_fp32_weights: Restore masters, where there are any; otherwise round them up
                from the model-precision weights.
        """
        self._load(state_dict, load_optimizer_states, load_from_fp32_weights)

    def _load(self, saved: dict[str, Any], with_moments: bool, with_masters: bool) -> None:
        if with_moments:
            load_apart(self._optimizer, saved)

    def fits(self, saved: Mapping[str, Any]) -> bool:
        """Return whether `saved`, of a run that is divided over its ranks as this one is, could be
        of this rank's `state_dict`; otherwise it is resharded.
        """
        return not MASTER_KEYS & saved.keys()

    def rebuilt_state(
        self, base: dict[str, Any], masters: Sequence[torch.Tensor], scaler: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return what `state_dict` would if this were the state.

        Args:
            base: State dict of the wrapped optimizer.
            masters: The master of each of `own_tensors`, in its shape in files; padding is zero.
            scaler: State of the loss scale, of whatever kind of scaler; may be empty.
        """
        return base

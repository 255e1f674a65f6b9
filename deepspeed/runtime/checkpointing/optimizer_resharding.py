"""Optimizer state that was saved by other ranks, stages or parameter groups, resharded: made into
what this rank would have saved.

`checkpoint.resharding` says what the files hold, in fragments by parameter name; here they are
copied to where this rank's optimizer has those elements. The result has the layout of the
optimizer's own `state_dict()`, so everything that comes after is the same as for state that need
not be resharded. Every element of every parameter of this rank must be there once; until that is
known nothing changes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint.resharding.rank_slices import RankSlices
from deepspeed.checkpoint.resharding.saved_optimizer import FP32, SavedFragment, SavedOptimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.optimizers.master_weights import MasterWeightOptimizer
from deepspeed.runtime.optimizers.step_sequence import StepSequence
from deepspeed.runtime.sharding.state import CheckpointMismatchError, slice_mapping
from deepspeed.runtime.zero.zero_optimizer import ZeROOptimizer

NameOf = Callable[[nn.Parameter], str]


class ReshardedState(NamedTuple):
    """State in the layout of the optimizer's `state_dict()`, and whether master weights are in
    it.
    """

    state: dict[str, Any]
    has_masters: bool


class _Place(NamedTuple):
    """Where `numel` elements of a parameter of `whole` elements, from `start`, lie in a tensor of
    this rank's optimizer.
    """

    tensor: _OwnTensor
    start: int
    at: int
    numel: int
    whole: int


@dataclass(eq=False)
class _OwnTensor:
    """One tensor that this rank's optimizer updates, being filled.

    Attributes:
        group: Its parameter group.
        numel: Elements, padding included.
        used: Elements that belong to parameters.
        shape: Shape of the optimizer's tensor.
        required: It is trained, so it must be in the checkpoint.
        values: Per-element state that was found, 1-D.
        filled: How many elements of it were found.
        shared: State that is not per element.
        names: The parameters in it.
    """

    group: int
    numel: int
    used: int
    shape: Sequence[int]
    required: bool = True
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    filled: dict[str, int] = field(default_factory=dict)
    found: int = 0
    shared: dict[str, Any] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)

    def take(self, place: _Place, fragment: SavedFragment) -> None:
        """Copy what this tensor has of a fragment."""
        first, last = (
            max(place.start, fragment.start),
            min(place.start + place.numel, fragment.start + fragment.numel),
        )
        if first >= last:
            return
        count, target, source = last - first, place.at + first - place.start, first - fragment.start
        for key, value in fragment.values.items():
            if key not in self.values:
                self.values[key] = torch.zeros(self.numel, dtype=value.dtype)
            self.values[key][target : target + count].copy_(value[source : source + count])
            self.filled[key] = self.filled.get(key, 0) + count
        self.found += count
        for key, value in fragment.shared.items():
            if not _same(self.shared.setdefault(key, value), value):
                raise CheckpointMismatchError(
                    f"{fragment.name}: its optimizer state {key!r} is {value}, that of "
                    f"{self.names[0]} {self.shared[key]}; here one tensor holds both and has one "
                    "value"
                )

    def resemble(self, fragment: SavedFragment) -> None:
        """Have the state of a tensor that holds padding only, as the optimizer would have made it
        with all others.
        """
        self.values = {
            key: torch.zeros(self.numel, dtype=value.dtype)
            for key, value in fragment.values.items()
        }
        self.shared = dict(fragment.shared)

    def check(self) -> None:
        """Raise unless every element was found, with all state that any of them has."""
        if self.required and self.found != self.used:
            raise CheckpointMismatchError(
                f"the checkpoint has optimizer state of {self.found} of the {self.used} elements "
                f"that this rank holds of {_listed(self.names)}: it is of another model, or of one "
                "with other parameters trained"
            )
        lacking = [key for key, count in self.filled.items() if count != self.found]
        if lacking:
            raise CheckpointMismatchError(
                f"in the checkpoint only some of {_listed(self.names)} have optimizer state "
                f"{lacking[0]!r}"
            )


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return torch.equal(left, right)
    return bool(left == right)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


class _Resharding:
    """This rank's tensors, by the names of the parameters in them."""

    def __init__(self, optimizer: Any, name_of: NameOf) -> None:
        self.optimizer = optimizer
        self.tensors: list[_OwnTensor] = []
        self.places: dict[str, list[_Place]] = {}
        self.options: dict[int, dict[str, Any]] = {}
        self._from: dict[int, str] = {}
        for tensor, runs in own_tensors(optimizer):
            self.tensors.append(tensor)
            for param, start, at, numel in runs:
                name = name_of(param)
                tensor.names.append(name)
                self.places.setdefault(name, []).append(
                    _Place(tensor, start, at, numel, param.numel())
                )

    def fill(self, saved: SavedOptimizer | RankSlices) -> None:
        """Take everything that is this rank's."""
        first: SavedFragment | None = None
        for fragment in saved.fragments():
            first = first or fragment
            for place in self.places.get(fragment.name, ()):
                if fragment.start + fragment.numel > place.whole:
                    raise CheckpointMismatchError(
                        f"{fragment.name} has {place.whole} elements, in the checkpoint at least "
                        f"{fragment.start + fragment.numel}"
                    )
                place.tensor.take(place, fragment)
                self._take_options(place.tensor.group, fragment)
        for tensor in self.tensors:
            tensor.check()
            if tensor.used == 0 and first is not None:
                tensor.resemble(first)
        for index, options in saved.options.items():
            # What is missing is a group without parameters on this stage.
            self.options.setdefault(index, dict(options))

    def _take_options(self, group: int, fragment: SavedFragment) -> None:
        known = self.options.setdefault(group, dict(fragment.options))
        first = self._from.setdefault(group, fragment.name)
        differing = [
            key
            for key in fragment.options
            if key not in known or not _same(known[key], fragment.options[key])
        ]
        if differing:
            raise CheckpointMismatchError(
                f"parameter group {group} holds {first} and {fragment.name}, which were saved with "
                f"different {differing[0]!r} ({known.get(differing[0])} and "
                f"{fragment.options[differing[0]]}): give them groups of their own, as before"
            )

    def base_state(self) -> dict[str, Any]:
        """State dict of the wrapped torch optimizer."""
        groups: list[dict[str, Any]] = []
        numbers = iter(range(len(self.tensors)))
        for index, group in enumerate(self.optimizer.param_groups):
            own = {key: value for key, value in group.items() if key != "params"}
            groups.append(
                {
                    **own,
                    **self.options.get(index, {}),
                    "params": [next(numbers) for _ in group["params"]],
                }
            )
        return {"state": dict(self._states()), "param_groups": groups}

    def _states(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, tensor in enumerate(self.tensors):
            moments = {
                key: value.view(tensor.shape) for key, value in tensor.values.items() if key != FP32
            }
            if moments or tensor.shared:
                yield number, {**tensor.shared, **moments}

    @property
    def has_masters(self) -> bool:
        """Whether every trained tensor's master weight was saved."""
        return all(
            FP32 in tensor.values for tensor in self.tensors if tensor.used and tensor.required
        )

    def masters(self) -> list[torch.Tensor]:
        """The master of each tensor without padding, in its shape if there is none; zeros where
        none was saved.
        """
        flat = [tensor.values.get(FP32, torch.zeros(tensor.numel)) for tensor in self.tensors]
        return [
            value.view(tensor.shape) if tensor.used == tensor.numel else value[: tensor.used]
            for value, tensor in zip(flat, self.tensors, strict=True)
        ]


_ParamRun = tuple[nn.Parameter, int, int, int]


def own_tensors(optimizer: Any) -> Iterator[tuple[_OwnTensor, list[_ParamRun]]]:
    """Every tensor that the wrapped optimizer updates, in its order, with parts of parameters as
    (param, start, at, numel).
    """
    if not isinstance(optimizer, MasterWeightOptimizer):
        for index, param_group in enumerate(optimizer.param_groups):
            for param in param_group["params"]:
                tensor = _OwnTensor(
                    index, param.numel(), param.numel(), param.shape, required=param.requires_grad
                )
                yield tensor, [(param, 0, 0, param.numel())]
        return
    for index, group in enumerate(optimizer.groups):
        # Where masters are not one tensor per group, they are one per parameter.
        if isinstance(optimizer, FP16_UnfusedOptimizer):
            for param in group.params:
                yield (
                    _OwnTensor(index, param.numel(), param.numel(), param.shape),
                    [(param, 0, 0, param.numel())],
                )
            continue
        fragments = group.table.of_shard(group.shard_rank)
        runs = [
            (group.params[part.param], part.param_start, part.shard_start, part.numel)
            for part in fragments
        ]
        numel = group.table.shard_numel
        used = numel - group.table.shard_padding(group.shard_rank)
        yield _OwnTensor(index, numel, used, (numel,)), runs


def reshard_optimizer_state(
    sequence: StepSequence, saved: SavedOptimizer | RankSlices, name_of: NameOf
) -> ReshardedState:
    """What `sequence` (or the client's optimizer, where that has the state) would have saved on
    this rank.

    Args:
        sequence: This rank's optimizer.
        saved: The checkpoint.
        name_of: A parameter's name in checkpoints; experts are numbered over all ranks.

    Raises:
        CheckpointMismatchError: Something of a parameter is missing, or fits no tensor of this run.
        CheckpointError: A file is missing or damaged.
    """
    owner = sequence if isinstance(sequence, MasterWeightOptimizer) else sequence.optimizer
    resharding = _Resharding(owner, name_of)
    resharding.fill(saved)
    base = resharding.base_state()
    if isinstance(sequence, ZeROOptimizer):
        state = _zero_state(sequence, base, resharding.masters(), saved.scaler)
    elif isinstance(sequence, FP16_Optimizer):
        state = {
            **saved.scaler,
            keys.OPTIMIZER_STATE_DICT: base,
            **_fp16_masters(sequence, resharding.masters()),
        }
    else:
        state = base
    return ReshardedState(state, resharding.has_masters)


def _zero_state(
    optimizer: ZeROOptimizer,
    base: dict[str, Any],
    masters: list[torch.Tensor],
    scaler: Mapping[str, Any],
) -> dict[str, Any]:
    return {
        keys.CLIP_GRAD: optimizer.clip_grad,
        keys.BASE_OPTIMIZER_STATE: base,
        keys.SINGLE_PARTITION_OF_FP32_GROUPS: masters,
        keys.GROUP_PADDINGS: optimizer.group_paddings,
        keys.PARTITION_COUNT: optimizer.partition_count,
        keys.PARAM_SLICE_MAPPINGS: [slice_mapping(optimizer, group) for group in optimizer.groups],
        keys.LOSS_SCALER: _moved_scaler(optimizer.loss_scaler, scaler),
        "overflow": False,
    }


def _moved_scaler(own: Any, saved: Mapping[str, Any]) -> Any:
    """A scaler like this run's at the place where the saved one was."""
    scaler = copy.copy(own)
    for key in keys.SCALER_KEYS:
        if key in saved and hasattr(scaler, key):
            setattr(scaler, key, saved[key])
    return scaler


def _fp16_masters(optimizer: FP16_Optimizer, masters: list[torch.Tensor]) -> dict[str, Any]:
    if not isinstance(optimizer, FP16_UnfusedOptimizer):
        return {keys.FP32_GROUPS_FLAT: masters}
    following = iter(masters)
    return {
        keys.FP32_GROUPS: [[next(following) for _ in group.masters] for group in optimizer.groups]
    }

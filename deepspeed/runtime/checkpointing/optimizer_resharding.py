"""Optimizer state that was saved by other ranks, stages or parameter groups, made into what this
rank would have saved, in the layout of `state_dict()`. Every element of every parameter of this
rank must be there once; until that is known nothing changes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from deepspeed.checkpoint.constants import STATE_OF_PARAMETERS
from deepspeed.checkpoint.resharding.rank_slices import RankSlices
from deepspeed.checkpoint.resharding.saved_optimizer import FP32, SavedFragment, SavedOptimizer
from deepspeed.moe.expert_rows import first_element, whole_shape
from deepspeed.ops.parameter_runs import STATE_BY_PARAMETER, same_state, same_value
from deepspeed.runtime.optimizers.state_layout import OwnTensor, ParamRun
from deepspeed.runtime.optimizers.step_sequence import StepSequence
from deepspeed.runtime.zero.sharded_state import CheckpointMismatchError

NameOf = Callable[[nn.Parameter], str]
# What a schedule of torch's has for each parameter group.
_BY_GROUP = frozenset(("base_lrs", "_last_lr", "lr_lambdas", "max_lrs", "min_lrs"))


class ReshardedState(NamedTuple):
    """What an optimizer is given.

    Attributes:
        state: In the layout of its `state_dict()`.
        has_masters: Whether master weights are in it.
        origins: For each of its parameter groups, the number of the saved group that its parameters
            were in; None: the groups are those that were saved.
    """

    state: dict[str, Any]
    has_masters: bool
    origins: Sequence[int] | None = None

    def schedule(self, saved: object) -> Any:
        """Saved state of a schedule, for the groups as they are now."""
        if not self.origins or not isinstance(saved, dict):
            return saved
        found = dict(saved)
        for key in _BY_GROUP & saved.keys():
            if isinstance(saved[key], list) and len(saved[key]) > max(self.origins):
                found[key] = [saved[key][origin] for origin in self.origins]
        if "_schedulers" in saved:  # a sequence of schedules
            found["_schedulers"] = [self.schedule(one) for one in saved["_schedulers"]]
        return found


class _Place(NamedTuple):
    """Where a run of a parameter of `whole` elements lies in a tensor of this rank's optimizer."""

    target: _Target
    run: ParamRun
    whole: int


@dataclass(eq=False)
class _Target:
    """One tensor that this rank's optimizer updates, being filled.

    `filled` counts elements found, `found` all, `unstepped` those of parameters that have taken no
    step (`new_names`), so have no state; `like`: whose state that of padding resembles, the one of
    its group that has taken the most steps, and `likeness` how much; `shared`: by parameter, state
    that is one value for all of its elements; `own_names`: the names of parameters on this rank, by
    those in files, where experts are numbered over all ranks.
    """

    own: OwnTensor
    names: list[str]
    own_names: dict[str, str]
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    filled: dict[str, int] = field(default_factory=dict)
    found: int = 0
    unstepped: int = 0
    new_names: set[str] = field(default_factory=set)
    shared: dict[str, dict[str, Any]] = field(default_factory=dict)
    like: SavedFragment | None = None
    likeness: tuple[int, float] = (0, 0.0)

    @property
    def numel(self) -> int:
        return self.own.shape.numel()

    def take(self, run: ParamRun, fragment: SavedFragment) -> None:
        """Copy what a run in this tensor has of a fragment."""
        if fragment.is_state_alone:
            self._take_alone(fragment)
            return
        first = max(run.start, fragment.start)
        last = min(run.start + run.numel, fragment.start + fragment.numel)
        if first >= last:
            return
        count, target, source = last - first, run.at + first - run.start, first - fragment.start
        for key, value in fragment.values.items():
            if not (self.own.beside is None if key == FP32 else self.own.has_state):
                continue
            if key not in self.values:
                self.values[key] = torch.zeros(self.numel, dtype=value.dtype)
            self.values[key][target : target + count].copy_(value[source : source + count])
            self.filled[key] = self.filled.get(key, 0) + count
        self.found += count
        if not self.own.has_state:
            return
        if fragment.options and not fragment.has_state:
            self.unstepped += count
            self.new_names.add(fragment.name)
            return
        known = self.shared.setdefault(fragment.name, dict(fragment.shared))
        for key, value in fragment.shared.items():
            if not same_value(known.get(key, value), value):
                raise CheckpointMismatchError(
                    f"{fragment.name}: fragments of it have optimizer state {key!r} {value} and "
                    f"{known[key]}"
                )

    def _take_alone(self, fragment: SavedFragment) -> None:
        if not self.own.has_state:
            return
        if not self.own.is_whole:
            raise CheckpointMismatchError(
                f"{fragment.name}: its optimizer state ({', '.join(sorted(fragment.shared))}) is "
                "that of an optimizer which updates whole parameters, and this run's updates "
                "shards: use the optimizer that saved it, or load_optimizer_states=False"
            )
        self.shared.setdefault(fragment.name, {}).update(fragment.shared)

    def shared_state(self) -> dict[str, Any]:
        """Return the state that is one value for all elements; under `STATE_BY_PARAMETER`, that of
        the parameters that have taken fewer steps than others.
        """
        known = [*self.shared.values(), *([] if self.like is None else [self.like.shared])]
        of_most_steps = max(known, key=_steps, default={})
        distinct: list[dict[str, Any]] = []
        fewer: dict[str, dict[str, Any]] = {}
        for name, own in self.shared.items():
            if not same_state(own, of_most_steps):
                alike = next((one for one in distinct if same_state(one, own)), own)
                if alike is own:
                    distinct.append(own)
                fewer[self.own_names.get(name, name)] = alike
        if known:
            new: dict[str, Any] = {}
            fewer.update({self.own_names.get(name, name): new for name in self.new_names})
        return {**of_most_steps, **({STATE_BY_PARAMETER: fewer} if fewer else {})}

    @property
    def is_padding(self) -> bool:
        """Whether it holds no element of a parameter, and has state all the same."""
        return self.own.used == 0 and self.own.has_state and self.own.beside is None

    @property
    def may_lack_state(self) -> bool:
        """Whether all that it holds may have taken no step while other ranks have state for it."""
        return self.own.has_state and self.own.beside is None and not self.own.is_whole

    def resemble(self, fragment: SavedFragment, likeness: int) -> None:
        """Have the state of elements that have none of their own as the optimizer would have made
        it with what `fragment` is of.
        """
        found = (likeness, _steps(fragment.shared))
        if fragment.has_state and (self.like is None or found > self.likeness):
            self.likeness = found
            self.like = fragment

    def complete(self) -> None:
        """Make the state that other ranks have of the tensors of this group, where this one has
        found none.
        """
        if self.like is None or self.shared:
            return
        for key, value in self.like.values.items():
            self.values.setdefault(key, torch.zeros(self.numel, dtype=value.dtype))

    def check(self) -> None:
        """Raise unless every element was found, with all state that any of them has."""
        if self.own.required and self.found != self.own.used:
            raise CheckpointMismatchError(
                f"the checkpoint has optimizer state of {self.found} of the {self.own.used} "
                f"elements that this rank holds of {_listed(self.names)}: it is of another model, "
                "or of one with other parameters trained"
            )
        stepped = self.found - self.unstepped
        lacking = [
            key
            for key, count in self.filled.items()
            if count != (self.found if key == FP32 else stepped)
        ]
        if lacking:
            raise CheckpointMismatchError(
                f"in the checkpoint only some of {_listed(self.names)} have optimizer state "
                f"{lacking[0]!r}"
            )


def _steps(state: Mapping[str, Any]) -> float:
    return float(state.get("step", 0))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


class _Resharding:
    """This rank's tensors, by the names of the parameters in them."""

    def __init__(self, sequence: StepSequence, name_of: NameOf) -> None:
        self.sequence = sequence
        self.targets: list[_Target] = []
        self.places: dict[str, list[_Place]] = {}
        self.options: dict[int, dict[str, Any]] = {}
        # Also of parameters that other ranks have: what is said of groups is the same on all.
        self._group_of = {
            name_of(param): index
            for index, group in enumerate(sequence.numbered_params())
            for param in group
        }
        self._first: dict[int, SavedFragment] = {}
        self._num_saved_groups = 0
        # Of all ranks' parameters, so that all ranks say the same.
        self.has_masters = True
        for own in sequence.own_tensors():
            names = [name_of(run.param) for run in own.runs]
            here = [sequence.context.name_of(run.param) for run in own.runs]
            target = _Target(own, names, dict(zip(names, here, strict=True)))
            self.targets.append(target)
            for run, name in zip(own.runs, target.names, strict=True):
                whole = run._replace(start=first_element(run.param) + run.start)
                place = _Place(target, whole, whole_shape(run.param).numel())
                self.places.setdefault(name, []).append(place)

    def fill(self, saved: SavedOptimizer | RankSlices) -> None:
        lacking = [one for one in self.targets if one.is_padding or one.may_lack_state]
        for fragment in saved.fragments():
            for target in lacking:
                self._offer(target, fragment)
            lacks = FP32 not in fragment.values and not fragment.is_state_alone
            if fragment.name in self._group_of:
                self.has_masters &= not lacks
                self._take_options(self._group_of[fragment.name], fragment)
            for place in self.places.get(fragment.name, ()):
                if fragment.start + fragment.numel > place.whole:
                    raise CheckpointMismatchError(
                        f"{fragment.name} has {place.whole} elements, in the checkpoint at least "
                        f"{fragment.start + fragment.numel}"
                    )
                place.target.take(place.run, fragment)
        for target in self.targets:
            target.check()
            target.complete()
        for index, options in saved.options.items():
            # What is missing is a group without parameters on this stage.
            self.options.setdefault(index, dict(options))
        self._num_saved_groups = len(saved.options)

    def _offer(self, target: _Target, fragment: SavedFragment) -> None:
        """Have what lacks state resemble its neighbours on other ranks; padding, if there are none,
        what is optimized alike.
        """
        if not fragment.options:  # it was not trained
            return
        own = self.sequence.param_groups[target.own.group]
        switches = [
            (own.get(key), value)
            for key, value in fragment.options.items()
            if isinstance(value, bool) and isinstance(own.get(key), bool)
        ]
        if self._group_of.get(fragment.name) == target.own.group:
            target.resemble(fragment, likeness=2)
        elif target.is_padding and all(here == there for here, there in switches):
            target.resemble(fragment, likeness=1)

    def _take_options(self, group: int, fragment: SavedFragment) -> None:
        if not fragment.options:  # it was not trained
            return
        first = self._first.setdefault(group, fragment)
        self.options.setdefault(group, dict(first.options))
        differing = [
            key
            for key in fragment.options
            if key not in first.options or not same_value(first.options[key], fragment.options[key])
        ]
        if differing:
            raise CheckpointMismatchError(
                f"parameter group {group} holds {first.name} and {fragment.name}, which were saved "
                f"with different {differing[0]!r} ({first.options.get(differing[0])} and "
                f"{fragment.options[differing[0]]}): give them groups of their own, as before"
            )

    @property
    def origins(self) -> list[int] | None:
        found = []
        for index in range(len(self.sequence.param_groups)):
            first = self._first.get(index)
            # One without parameters here goes on with that of its number, if there is one.
            alike = min(index, self._num_saved_groups - 1)
            found.append(alike if first is None or first.group is None else first.group)
        return None if found == list(range(self._num_saved_groups)) else found

    def base_state(self) -> dict[str, Any]:
        """State dict of the wrapped torch optimizer."""
        groups: list[dict[str, Any]] = []
        numbers = iter(range(len(self.targets)))
        for index, group in enumerate(self.sequence.param_groups):
            own = {key: value for key, value in group.items() if key != "params"}
            groups.append(
                {
                    **own,
                    **copy.deepcopy(self.options.get(index, {})),
                    "params": [next(numbers) for _ in group["params"]],
                }
            )
        return {"state": dict(self._states()), "param_groups": groups}

    def _states(self) -> Iterator[tuple[int, dict[str, Any]]]:
        of_parameters: dict[int, dict[str | None, Any]] = {}
        for number, target in enumerate(self.targets):
            moments = {
                key: value.view(target.own.shape)
                for key, value in target.values.items()
                if key != FP32
            }
            own = {**target.shared_state(), **moments}
            if own and target.own.beside is None:
                yield number, own
            elif own:  # a group's only shard has its number
                of_parameters.setdefault(target.own.group, {})[target.own.beside] = own
        for number, states in of_parameters.items():
            yield number, {STATE_OF_PARAMETERS: states}

    def masters(self) -> list[torch.Tensor]:
        """The master of each tensor in its shape in files; zeros where none was saved."""
        return [
            target.values.get(FP32, torch.zeros(target.numel)).view(target.own.shape)
            for target in self.targets
            if target.own.beside is None
        ]


def reshard_optimizer_state(
    sequence: StepSequence, saved: SavedOptimizer | RankSlices, name_of: NameOf
) -> ReshardedState:
    """What `sequence` would have saved on this rank."""
    resharding = _Resharding(sequence, name_of)
    resharding.fill(saved)
    state = sequence.rebuilt_state(resharding.base_state(), resharding.masters(), saved.scaler)
    return ReshardedState(state, resharding.has_masters, resharding.origins)

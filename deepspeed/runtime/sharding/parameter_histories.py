"""Which parameters of a flat group have missed steps: `ParameterHistories`.

[Note: parameters that miss a step]
A parameter that is frozen for a whole step, or left out of it otherwise, stays as it is: its
master, its moments and its count of steps, as with torch's optimizers. Moments stay because their
elements are in none of the runs that are stepped (`ops.parameter_runs`). The count is one value for
the flat parameter; a parameter that has missed a step from then on has a count of its own, in the
optimizer's state, under its name. All ranks of a group keep the counts of all its parameters, also
of those that they own no element of, so that a checkpoint can be read on other ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from deepspeed.ops.parameter_runs import STATE_BY_PARAMETER, ElementRun, is_by_element, shared_state
from deepspeed.runtime.sharding.fragments import ParamIndex
from deepspeed.runtime.sharding.group import ShardedGroup


class ParameterHistories:
    """The steps that the parameters of one flat group have taken.

    Args:
        group: Parameters, of which one flat shard is the optimizer's parameter.
        names: Name of each.
        optimizer: Keeps the state.
    """

    def __init__(
        self, group: ShardedGroup, names: Sequence[str], optimizer: torch.optim.Optimizer
    ) -> None:
        self._group = group
        self._names = names
        self._optimizer = optimizer
        self._runs: list[ElementRun] | None = None
        self._of_all: dict[str, Any] = {}  # state of the parameters that have missed no step

    @property
    def flat(self) -> torch.Tensor:
        return self._group.masters[0]

    def begin(self, left_out: Collection[nn.Parameter]) -> list[ElementRun] | None:
        """Return the elements that a step without these parameters updates; None: all of them,
        with one count. `end` has to follow.
        """
        self._runs = None
        params = self._group.params
        idle = (
            [index for index, param in enumerate(params) if param in left_out] if left_out else []
        )
        state = self._optimizer.state.get(self.flat, {})
        if not idle and not state.get(STATE_BY_PARAMETER):
            return None
        self._runs = self._planned(set(idle), state)
        return self._runs

    def _planned(self, idle: set[ParamIndex], state: Mapping[str, Any]) -> list[ElementRun]:
        own = dict(state.get(STATE_BY_PARAMETER, {}))
        shared = shared_state(state, self.flat)
        is_new = not any(isinstance(value, torch.Tensor) for value in state.values())
        alike, leaving, apart = self._sorted(idle, own)
        if leaving and (shared or is_new):
            kept = copy.deepcopy(shared)
            own.update({self._names[index]: kept for index in leaving})
        # Also where it is nobody's: the flat parameter counts all steps, on every rank.
        runs = self._runs_of(alike, shared, is_new)
        for members in apart:
            # A copy: the members that are left out go on having the old one.
            stepped = copy.deepcopy(own[self._names[members[0]]])
            own.update({self._names[index]: stepped for index in members})
            runs += self._runs_of(members, stepped, is_new=not stepped)
        self._of_all = shared
        if own:
            self._optimizer.state[self.flat][STATE_BY_PARAMETER] = own
        return runs

    def _sorted(
        self, idle: Collection[ParamIndex], own: Mapping[str, Any]
    ) -> tuple[list[ParamIndex], list[ParamIndex], list[list[ParamIndex]]]:
        """Return the parameters to be stepped that have missed no step, those that miss their first
        one, and those to be stepped that have missed some, by their history.
        """
        alike: list[ParamIndex] = []
        leaving: list[ParamIndex] = []
        apart: dict[int, list[ParamIndex]] = {}
        for index, name in enumerate(self._names):
            if name in own and index not in idle:
                apart.setdefault(id(own[name]), []).append(index)
            elif name not in own:
                (leaving if index in idle else alike).append(index)
        return alike, leaving, list(apart.values())

    def _runs_of(
        self, params: Collection[ParamIndex], shared: dict[str, Any], is_new: bool
    ) -> list[ElementRun]:
        """Return the runs of these parameters here; one without elements where there are none, so
        that counts are the same on all ranks.
        """
        chosen = set(params)
        runs: list[ElementRun] = []
        for part in self._group.table.of_shard(self._group.shard_rank):
            if part.param not in chosen:
                continue
            end = part.shard_start + part.numel
            if runs and runs[-1].end == part.shard_start:
                runs[-1] = runs[-1]._replace(end=end)
            else:
                runs.append(ElementRun(part.shard_start, end, shared, is_new))
        return runs or [ElementRun(0, 0, shared, is_new)]

    def end(self) -> None:
        """Keep the counts that the step has left."""
        if self._runs is None:
            return
        state = self._optimizer.state[self.flat]
        state.update(self._of_all)
        # Where an optimizer counts no steps, a parameter that has begun is like all others.
        own = state.pop(STATE_BY_PARAMETER, {})
        begun = {id(run.shared) for run in self._runs if not run.shared}
        left = {name: kept for name, kept in own.items() if id(kept) not in begun}
        if left:
            state[STATE_BY_PARAMETER] = left
        self._runs = None


def of_parameter(state: Mapping[str, Any], name: str, flat: torch.Tensor) -> dict[str, Any]:
    """Return the state of the flat parameter `flat` as the model's parameter `name` has it."""
    own = state.get(STATE_BY_PARAMETER, {})
    by_element = {key: one for key, one in state.items() if is_by_element(one, flat)}
    return {**by_element, **own.get(name, shared_state(state, flat))}

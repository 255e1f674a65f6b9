"""Steps of parts of a flat parameter, for parameters in it that have missed steps.

A torch optimizer leaves a parameter without a gradient as it is, its moments and its count of steps
too. A flat shard is one parameter to its optimizer and holds many of the model's, so a step that
leaves some of them out goes by `ElementRun`: consecutive elements whose parameters have taken the
same steps. Optimizers that know runs are given them; for torch's own, which update every element
from that element alone, each run is a parameter of its own while the step lasts
(`stepped_by_runs`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

# State of the flat parameter that is one value for all elements, of the model's parameters that
# have another value: by name. Steps that a parameter has missed are saved under it.
STATE_BY_PARAMETER = "state_by_parameter"


class ElementRun(NamedTuple):
    """Elements `start` to `end` of a flat parameter, which have taken the same steps.

    Attributes:
        shared: State that is one value for all of them (`step`). Runs of one history have one
            dictionary, which whoever steps them brings up to date.
        is_new: They have taken no step yet, so there is no state.
    """

    start: int
    end: int
    shared: dict[str, Any]
    is_new: bool = False


Runs = Mapping[torch.Tensor, Sequence[ElementRun]]


def is_by_element(value: object, like: torch.Tensor) -> bool:
    """Return whether a state has one element for each of the flat parameter `like`."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == like.shape


def shared_state(state: Mapping[str, Any], like: torch.Tensor) -> dict[str, Any]:
    """Return the part of a flat parameter's state that is one value for all elements."""
    return {
        key: value
        for key, value in state.items()
        if key != STATE_BY_PARAMETER and value is not None and not is_by_element(value, like)
    }


def state_of_run(state: Mapping[str, Any], like: torch.Tensor, run: ElementRun) -> dict[str, Any]:
    """Return the state of a run as that of a parameter of its own: views, and copies of `shared`.
    Empty for a new one, whose state the optimizer makes.
    """
    if run.is_new:
        return {}
    views = {
        key: value[run.start : run.end]
        for key, value in state.items()
        if is_by_element(value, like)
    }
    return {**views, **copy.deepcopy(run.shared)}


def keep_state_of_run(
    state: dict[str, Any], like: torch.Tensor, run: ElementRun, found: Mapping[str, Any]
) -> None:
    """Take over into the flat parameter's `state` the state that a step of a run has left."""
    part = slice(run.start, run.end)
    shared = {}
    for key, value in found.items():
        if not is_by_element(value, like[part]):
            shared[key] = value
            continue
        if not is_by_element(state.get(key), like):
            state[key] = torch.zeros_like(like, dtype=value.dtype)
        if value.data_ptr() != state[key][part].data_ptr():
            state[key][part] = value
    run.shared.clear()
    run.shared.update({key: value for key, value in shared.items() if value is not None})


def same_state(left: Mapping[str, object], right: Mapping[str, object]) -> bool:
    """Return whether two states have the same keys and equal values."""
    return left.keys() == right.keys() and all(same_value(left[key], right[key]) for key in left)


def same_value(left: object, right: object) -> bool:
    """Return whether values of state, tensors or not, are equal."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return torch.equal(left, right)
    return bool(left == right)


def settle_loaded(state: dict[str, Any]) -> None:
    """Make state by parameter that was loaded what steps leave: one dictionary for all that have
    the same, and tensors where the flat parameter's are (some optimizers count in numbers).
    """
    distinct: list[dict[str, Any]] = []
    by_parameter = state.get(STATE_BY_PARAMETER, {})
    for name, own in by_parameter.items():
        for key, value in own.items():
            like = state.get(key)
            if isinstance(like, torch.Tensor) and not isinstance(value, torch.Tensor):
                own[key] = torch.full_like(like, value)
        alike = next((one for one in distinct if same_state(one, own)), own)
        if alike is own:
            distinct.append(own)
        by_parameter[name] = alike


@contextmanager
def stepped_by_runs(optimizer: torch.optim.Optimizer, runs: Runs) -> Iterator[None]:
    """Let `optimizer` have each run as a parameter of its own, with its part of the gradient, in
    place of the flat parameters in `runs`; others stay as they are.
    """
    parts: list[tuple[torch.Tensor, ElementRun, nn.Parameter]] = []
    groups = [group["params"] for group in optimizer.param_groups]
    try:
        for group, params in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = []
            for flat in params:
                if flat not in runs:
                    group["params"].append(flat)
                    continue
                state = optimizer.state.get(flat, {})
                for run in runs[flat]:
                    part = nn.Parameter(flat.detach()[run.start : run.end])
                    part.grad = None if flat.grad is None else flat.grad[run.start : run.end]
                    own = state_of_run(state, flat, run)
                    if own:
                        optimizer.state[part] = own
                    group["params"].append(part)
                    parts.append((flat, run, part))
        yield
        for flat, run, part in parts:
            keep_state_of_run(optimizer.state[flat], flat, run, optimizer.state.get(part, {}))
    finally:
        for group, params in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = params
        for _, _, part in parts:
            optimizer.state.pop(part, None)

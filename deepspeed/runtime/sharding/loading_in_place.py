"""Loading state into a torch optimizer that others hold on to, in memory of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from deepspeed.ops.parameter_runs import settle_loaded

Memory = tuple[torch.device, int]


def load_in_place(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Call `load_apart`, keeping the dictionaries of groups, of which torch makes new ones: a
    schedule over another optimizer that shares these would set rates where nobody reads them.
    """
    groups = list(optimizer.param_groups)
    load_apart(optimizer, state)
    for group, loaded in zip(groups, optimizer.param_groups, strict=True):
        if group is not loaded:
            group.clear()
            group.update(loaded)
    optimizer.param_groups = groups


def load_apart(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load, after which nobody else has the memory of a parameter's state.

    torch takes tensors as they are given where device and dtype fit. A step count that stands in
    `state` for two parameters would be counted on twice in every step, and whoever gave `state`
    would see it change.
    """
    optimizer.load_state_dict(state)
    given = state.get("state")
    for own, key in _in_common(_states(optimizer), given.values() if given else ()):
        own[key] = own[key].clone()
    for loaded in _states(optimizer):
        if isinstance(loaded, dict):
            settle_loaded(loaded)


def check_apart(optimizer: object) -> None:
    """Raise AssertionError if two parameters' state shares memory: steps would count twice."""
    for own, key in _in_common(_states(optimizer)):
        raise AssertionError(
            f"optimizer state {key!r} of shape {tuple(own[key].shape)} was loaded into memory that "
            "another parameter's state has too: an update in place would happen to both"
        )


def _states(optimizer: object) -> Iterable[Any]:
    return getattr(optimizer, "state", {}).values()


def _in_common(
    states: Iterable[Any], given: Iterable[Any] = ()
) -> Iterator[tuple[dict[str, Any], str]]:
    """Each of `states`, and a key, whose tensor has memory of `given` or of a state before it."""
    taken = {memory for one in given for memory in _memory(one).values()}
    for own in states:
        memory = _memory(own)
        yield from ((own, key) for key, place in memory.items() if place in taken)
        taken.update(memory.values())


def _memory(state: object) -> dict[str, Memory]:
    """Map keys of a parameter's state to storage; none of subclasses, or without elements."""
    entries = state.items() if isinstance(state, dict) else ()
    return {
        key: (value.device, value.untyped_storage().data_ptr())
        for key, value in entries
        if type(value) is torch.Tensor and value.layout is torch.strided and value.numel()
    }

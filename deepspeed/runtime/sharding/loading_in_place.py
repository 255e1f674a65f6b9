"""Loading state into a torch optimizer that others hold on to, in memory of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

Memory = tuple[torch.device, int]


def load_in_place(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """`load_apart` that keeps the dictionaries of the optimizer's groups.

    torch makes new ones. A schedule over another optimizer that shares these groups (a client
    replaced its optimizer by one of ours for offload) would from then on set the learning rate
    where nobody reads it.
    """
    groups = list(optimizer.param_groups)
    load_apart(optimizer, state)
    for group, loaded in zip(groups, optimizer.param_groups, strict=True):
        if group is not loaded:
            group.clear()
            group.update(loaded)
    optimizer.param_groups = groups


def load_apart(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """`optimizer.load_state_dict(state)` after which nobody else has the memory of a parameter's
    state.

    torch takes tensors as they are given where device and dtype fit. A step count that stands in
    `state` for two parameters would be counted on twice in every step, and whoever gave `state`
    would see it change.
    """
    optimizer.load_state_dict(state)
    given = state.get("state")
    for own, key in _in_common(_states(optimizer), given.values() if given else ()):
        own[key] = own[key].clone()


def check_apart(optimizer: Any) -> None:
    """Make sure, after loading, that no two parameters' state shares memory.

    Raises:
        AssertionError: Two do, so a step would be counted twice.
    """
    for own, key in _in_common(_states(optimizer)):
        raise AssertionError(
            f"optimizer state {key!r} of shape {tuple(own[key].shape)} was loaded into memory that "
            "another parameter's state has too: an update in place would happen to both"
        )


def _states(optimizer: Any) -> Iterable[Any]:
    """Of each parameter; nothing of a client's optimizer that shows none."""
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


def _memory(state: Any) -> dict[str, Memory]:
    """By key, the storage of the tensors in one parameter's state; those of subclasses, which may
    have none, and those without elements are left out.
    """
    entries = state.items() if isinstance(state, dict) else ()
    return {
        key: (value.device, value.untyped_storage().data_ptr())
        for key, value in entries
        if type(value) is torch.Tensor and value.layout is torch.strided and value.numel()
    }

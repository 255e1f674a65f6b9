"""Loading state into a torch optimizer that others hold on to."""

from __future__ import annotations

from typing import Any

import torch


def load_in_place(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """`optimizer.load_state_dict(state)` that keeps the dictionaries of its groups.

    torch makes new ones. A schedule over another optimizer that shares these groups (a client
    replaced its optimizer by one of ours for offload) would from then on set the learning rate
    where nobody reads it.
    """
    groups = list(optimizer.param_groups)
    optimizer.load_state_dict(state)
    for group, loaded in zip(groups, optimizer.param_groups, strict=True):
        if group is not loaded:
            group.clear()
            group.update(loaded)
    optimizer.param_groups = groups

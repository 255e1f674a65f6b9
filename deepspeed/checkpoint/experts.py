"""Experts in checkpoints: a model numbers the experts of its own rank, files number all of them; of
a parameter that has a row for each expert a rank holds some rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from deepspeed.checkpoint import constants as keys

# prefix, number, rest of a parameter's name
_EXPERT = re.compile(r"^(.*\bdeepspeed_experts\.)(\d+)(\..+)$")


def expert_prefix(name: str) -> str | None:
    """What all experts of a parameter's layer have in common in their names."""
    match = _EXPERT.match(name)
    return None if match is None else match.group(1)


def expert_number(name: str) -> int | None:
    """The expert's number in the name; None for a dense parameter."""
    match = _EXPERT.match(name)
    return None if match is None else int(match.group(2))


def renumbered(name: str, offsets: Mapping[str, int]) -> str:
    """The name with its expert's number moved by what `offsets` has for its layer's prefix."""
    match = _EXPERT.match(name)
    if match is None:
        return name
    prefix, number, rest = match.groups()
    return f"{prefix}{int(number) + offsets.get(prefix, 0)}{rest}"


def experts_per_rank(names: Iterable[str]) -> dict[str, int]:
    """Return by layer prefix how many experts a rank holds that has these parameters."""
    found: dict[str, set[int]] = {}
    for name in names:
        match = _EXPERT.match(name)
        if match is not None:
            found.setdefault(match.group(1), set()).add(int(match.group(2)))
    return {prefix: len(numbers) for prefix, numbers in found.items()}


def of_first_expert(name: str) -> str:
    """The same parameter or buffer of its layer's first expert; dense names as they are."""
    return renumbered(name, {expert_prefix(name) or "": -(expert_number(name) or 0)})


def expert_rank(rank: int, ranks: int, group_size: int, data_first: bool) -> int:
    """Which share of a layer's experts a rank holds.

    `group_size` of the `ranks` have different ones, the others copies; `data_first`: ranks with the
    same experts are neighbours.
    """
    return rank * group_size // ranks if data_first else rank % group_size


def without_experts(state: dict[str, Any]) -> dict[str, Any]:
    """The entries of a state dict that every rank has alike, in a dictionary of the same type."""
    return type(state)((name, kept) for name, kept in state.items() if expert_prefix(name) is None)


def of_expert(state: Mapping[str, Any], prefix: str, number: int) -> dict[str, Any]:
    """The entries of one expert, as they are named."""
    start = f"{prefix}{number}."
    return {name: value for name, value in state.items() if name.startswith(start)}


class PackedExperts:
    """Which parameters have a row for each expert, of which each rank's optimizer file has some."""

    def __init__(self, model: Mapping[str, Any]) -> None:
        self._sizes = {
            f"{layer[keys.AUTOEP_EXPERT_KEY_PREFIX]}.": int(layer[keys.AUTOEP_EP_SIZE])
            for layer in model.get(keys.AUTOEP_LAYERS_KEY) or ()
        }

    def num_ranks(self, name: str) -> int:
        """Over how many ranks the rows of a parameter are spread; 1: each has it whole."""
        found = (size for prefix, size in self._sizes.items() if name.startswith(prefix))
        return next(found, 1)

    def whole_shape(self, name: str, shape: torch.Size) -> torch.Size:
        ranks = self.num_ranks(name)
        return shape if ranks == 1 else torch.Size((ranks * shape[0], *shape[1:]))

    def first_element(
        self, name: str, shape: torch.Size, rank: int, ranks: int, data_first: bool
    ) -> int:
        """Where what a rank has of a parameter, of `shape`, begins in the whole one."""
        size = self.num_ranks(name)
        return 0 if size == 1 else expert_rank(rank, ranks, size, data_first) * shape.numel()

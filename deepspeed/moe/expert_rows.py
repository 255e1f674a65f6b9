"""Parameters [experts, ...] that are spread over an expert group: they keep name and identity, have
another length, and carry their `ExpertRows`. Checkpoints have them whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepspeed.utils.tensor_fragment import logical_shape


@dataclass(frozen=True)
class ExpertRows:
    """Rows of a whole parameter: the first expert here, and how many there are over all ranks."""

    first: int
    num_experts: int

    def __deepcopy__(self, memo: dict[int, object]) -> ExpertRows:
        return self


def rows_of(param: torch.Tensor) -> ExpertRows | None:
    """Return the rows that a parameter is of; None for one that is not spread."""
    rows: ExpertRows | None = getattr(param, "ds_expert_rows", None)
    return rows


def whole_shape(param: torch.Tensor) -> torch.Size:
    """Return the parameter's shape over all ranks that hold some of its experts."""
    shape, rows = logical_shape(param), rows_of(param)
    return shape if rows is None else torch.Size((rows.num_experts, *shape[1:]))


def first_element(param: torch.Tensor) -> int:
    """Return the place of this rank's first element among those of the whole parameter."""
    shape, rows = logical_shape(param), rows_of(param)
    return 0 if rows is None else rows.first * shape[1:].numel()

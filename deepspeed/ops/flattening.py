"""Tensors as one flat tensor and back: what upstream's op `utils` does."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["flatten", "unflatten"]


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Put all elements in one contiguous tensor `[sum of numel]`, of one dtype and device."""
    flat: torch.Tensor = torch._utils._flatten_dense_tensors(tensors)
    return flat


def unflatten(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """View `flat` in the shapes of `tensors`, in order."""
    views: tuple[torch.Tensor, ...] = torch._utils._unflatten_dense_tensors(flat, tensors)
    return views

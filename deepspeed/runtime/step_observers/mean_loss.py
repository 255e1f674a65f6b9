"""The loss of a step: the mean over its micro-batches, kept where it was computed."""

from __future__ import annotations

import torch


class MeanLoss:
    """Adds up losses on their device: reading one would wait for its forward."""

    def __init__(self) -> None:
        self._sum: torch.Tensor | None = None
        self._count = 0

    def add(self, loss: torch.Tensor) -> None:
        """The loss of one micro-batch, one element."""
        value = loss.detach().float().sum()
        self._sum = value if self._sum is None else self._sum + value
        self._count += 1

    def take(self) -> torch.Tensor | None:
        """The mean since the last call, 0-d, fp32; None of nothing."""
        if self._sum is None:
            return None
        mean = self._sum / self._count
        self._sum, self._count = None, 0
        return mean

"""Refuses sums of micro-batches in `param.grad` that a replayed graph overwrites.

A graph's backward leaves its gradients where it left them before. Autograd made that memory
`param.grad` in the first micro-batch, so in the next one the sum is gone before anything could be
added to it, as in plain torch. Seen from a hook it is certain: the gradient that arrives *is* the
sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


class StaticSumGuard:
    """Compares each gradient that arrives with the sum that it is about to be added to.

    Args:
        params: Parameters and their names.

    Attributes:
        has_compared: Whether a second micro-batch of a window was seen.
    """

    def __init__(self, params: Iterable[tuple[nn.Parameter, str]]) -> None:
        self.has_compared = False
        self._handles: list[Any] = [
            param.register_hook(self._hook(param, name))  # type: ignore[no-untyped-call]  # torch's
            for param, name in params
        ]

    def _hook(self, param: nn.Parameter, name: str) -> Callable[[torch.Tensor], None]:
        def arrives(grad: torch.Tensor) -> None:
            total = param.grad
            if total is None:
                return
            self.has_compared = True
            if grad.numel() and grad.data_ptr() == total.data_ptr():
                raise RuntimeError(
                    f"zero_optimization.stage: 1 sums the micro-batches of {name} in its gradient, "
                    "which lies in static memory (a CUDA graph's): this micro-batch has "
                    "overwritten the sum. Use stage 2, or data_types.grad_accum_dtype, which sums "
                    "elsewhere"
                )

        return arrives

    def remove(self) -> None:
        """The end of comparing."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

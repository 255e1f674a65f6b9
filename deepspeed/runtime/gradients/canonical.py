"""The canonical sum: gradients that are the same bits on any number of ranks.

A step's gradient is one binary tree over its micro-batches 0 .. M-1, micro-batch `t` of rank `r`
being number `t * N + r`: neighbours first, (0+1), (2+3), then these. Leaves are gradients as
autograd leaves them, sums are fp32, and one division by M ends it. An owner gets the leaves of all
ranks one after the other, and keeps of them what a binary counter of M keeps: at most log2(M) + 1
sums. Which rank made a leaf, which one owns an element, and what travels beside it cannot be seen
in the result (see docs/reproducibility.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from deepspeed.runtime.gradients.sink import Sums, accumulate


class _Counter:
    """One tree: in place `k` the sum of 2^k leaves, or nothing. `target` is among its memory."""

    def __init__(self, target: torch.Tensor) -> None:
        self._target = target
        self._free = [target]
        self._places: list[torch.Tensor | None] = []
        self._is_summed = False

    def push(self, leaf: torch.Tensor) -> None:
        """Add the next leaf, which is not kept."""
        assert not self._is_summed, "a leaf after the sum was read"
        carry = None
        for place, own in enumerate(self._places):
            if own is None:
                break
            if carry is None:
                accumulate(own, [leaf], 1.0, first=False)
            else:
                own.add_(carry)
                self._free.append(carry)
            carry, self._places[place] = own, None
        else:
            place = len(self._places)
            self._places.append(None)
        if carry is None:
            carry = self._free.pop() if self._free else torch.empty_like(self._target)
            accumulate(carry, [leaf], 1.0, first=True)
        self._places[place] = carry

    def write_mean(self, divisor: float) -> None:
        """Join what an incomplete tree leaves, smallest first, and divide it, into the target."""
        if self._is_summed:
            return
        self._is_summed = True
        total = None
        for own in self._places:
            if own is not None:
                total = own if total is None else own.add_(total)
        if total is not None:
            torch.div(total, divisor, out=self._target)
        self._places, self._free = [], []


class CanonicalSums(Sums):
    """Trees of the elements that this rank owns, by where they are written to.

    Args:
        divisor: Tells M, the micro-batches of a step over all ranks.
    """

    def __init__(self, divisor: Callable[[], float]) -> None:
        self._divisor = divisor
        self._counters: dict[int, _Counter] = {}

    def add(
        self, target: torch.Tensor, parts: Sequence[torch.Tensor], factor: float, first: bool
    ) -> None:
        """Push `parts`, leaves in the order of ranks. They are as autograd left them: `factor` is
        1.
        """
        key = target.data_ptr()
        if first:
            self._counters[key] = _Counter(target)
        for part in parts:
            self._counters[key].push(part)

    def finish(self) -> None:
        divisor = self._divisor()
        for counter in self._counters.values():
            counter.write_mean(divisor)

    def clear(self) -> None:
        self._counters = {}

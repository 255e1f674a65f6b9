"""The canonical sum: gradients that are the same bits on any number of ranks.

A step's gradient is one binary tree over its micro-batches 0 .. M-1, micro-batch `t` of rank `r`
being number `t * N + r`: neighbours first, (0+1), (2+3), then these. Leaves are gradients as
autograd leaves them, sums are fp32, and one division by M ends it. An owner gets the leaves of all
ranks one after the other, and keeps of them what a binary counter of M keeps: at most log2(M) + 1
sums. Which rank made a leaf, which one owns an element, and what travels beside it cannot be seen
in the result (see docs/reproducibility.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from deepspeed.runtime.gradients.sink import Sums, accumulate
from deepspeed.utils.exceptions import MisuseError


class _Counter:
    """One tree: in place `k` the sum of 2^k leaves, or nothing. `target` is among its memory."""

    def __init__(self, target: torch.Tensor) -> None:
        self._target = target
        self._free = [target]
        self._places: list[torch.Tensor | None] = []
        self._is_summed = False

    @property
    def numel(self) -> int:
        return self._target.numel()

    def push(self, leaf: torch.Tensor) -> None:
        """Add the next leaf, which is not kept."""
        if self._is_summed:
            raise MisuseError(
                "reproducibility.world_size_invariant: true with a backward after gradients of the "
                "same step were read: read them between the boundary's backward and engine.step()"
            )
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

    def state(self) -> dict[str, Any]:
        """How far it is: the tensors."""
        return {"places": self._places, "is_summed": self._is_summed}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Go on where another one was. A mean is in the target already."""
        self._is_summed = saved["is_summed"]
        for own in saved["places"]:
            if own is not None:
                memory = self._free.pop() if self._free else torch.empty_like(self._target)
                own = memory.copy_(own)
            self._places.append(own)


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

    def state(self, grads: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
        found = []
        for key, counter in self._counters.items():
            offsets = ((key - grad.data_ptr()) // grad.element_size() for grad in grads)
            number, start = next(
                (number, start)
                for number, (start, grad) in enumerate(zip(offsets, grads, strict=True))
                if 0 <= start < grad.numel()
            )
            place = {"grad": number, "start": start, "numel": counter.numel}
            found.append({**place, **counter.state()})
        return found

    def load_state(self, grads: Sequence[torch.Tensor], saved: Sequence[Mapping[str, Any]]) -> None:
        for one in saved:
            target = grads[one["grad"]][one["start"] : one["start"] + one["numel"]]
            self._counters[target.data_ptr()] = _Counter(target)
            self._counters[target.data_ptr()].load_state(one)

"""What a rank has drawn itself for parameters of which all ranks have the first one's values.

Experts are the exception: each rank copies its own from a module that it has just made, when that
has been cut and has the first rank's weights. So this rank's own values of what was made last are
kept on the host, where they are others; ranks that draw alike keep nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

# Elements whose values are kept, of the parameters that were made last. An expert larger than that
# is refused where ranks draw otherwise.
KEPT_NUMEL = 1 << 28
_WORDS = 1 << 18  # looked at at once
_MASK = (1 << 62) - 1


def fingerprint(params: Iterable[torch.Tensor]) -> torch.Tensor:
    """Make one number, 0-dim int64, of the bits of all elements in order; 0 on meta."""
    total: torch.Tensor | None = None
    factors: torch.Tensor | None = None
    for param in params:
        if param.device.type == "meta":
            return torch.zeros((), dtype=torch.int64)
        raw = param.detach().contiguous().reshape(-1).view(torch.uint8)
        if raw.storage_offset() % 8:
            raw = raw.clone()
        whole = raw.numel() // 8 * 8
        for words in (*raw[:whole].view(torch.int64).split(_WORDS), raw[whole:].to(torch.int64)):
            # Products wrap around, and upper bits (signs) would be lost in that: they count below
            # too. Every place has a factor of its own.
            if factors is None or factors.numel() < words.numel() or factors.device != words.device:
                factors = torch.arange(1, 2 * words.numel() + 1, 2, device=words.device)
            own = (words >> 31).bitwise_xor_(words).mul_(factors[: words.numel()]).sum()
            total = own if total is None else total * 0x9E3779B97F4A7C1 + own
    return torch.zeros((), dtype=torch.int64) if total is None else total & _MASK


class OwnDraws:
    """This rank's own values, where they are others than the first rank's."""

    def __init__(self) -> None:
        self._values: dict[nn.Parameter, torch.Tensor] = {}
        self._lost: set[nn.Parameter] = set()
        self._numel = 0

    def keep(self, param: nn.Parameter, values: torch.Tensor) -> None:
        self.forget(param)
        self._values[param] = values.detach().to("cpu", copy=True)
        self._numel += values.numel()
        while self._numel > KEPT_NUMEL:
            oldest = next(iter(self._values))
            self.forget(oldest)
            self._lost.add(oldest)

    def forget(self, param: nn.Parameter) -> None:
        values = self._values.pop(param, None)
        if values is not None:
            self._numel -= values.numel()

    def follow(self, param: nn.Parameter, copied: nn.Parameter) -> None:
        values = self.of(param)
        if values is not None:
            self.keep(copied, values)
        if self.has_lost(param):
            self._lost.add(copied)

    def of(self, param: nn.Parameter) -> torch.Tensor | None:
        return self._values.get(param)

    def has_lost(self, param: nn.Parameter) -> bool:
        """Whether this rank had values of its own, and too much was made since to keep them."""
        return param in self._lost

    def clear(self) -> None:
        self._values.clear()
        self._lost.clear()
        self._numel = 0

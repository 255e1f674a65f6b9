"""What one process that sees the whole batch computes, in plain torch: what the parallel examples
are held to.

Owns that training step, the batches that both sides draw, and the comparison. Imports torch alone:
nothing of what it checks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from text_data import Windows
from torch import nn

# Sums in another order differ by rounding, which Adam's division enlarges where a gradient is
# nearly zero. The one process computes in fp32: a configuration with bf16 or fp16 differs from it
# by their rounding.
TOLERANCE = 1e-3
HALF_TOLERANCE = 0.02


class Step(NamedTuple):
    """What a training step reports.

    Attributes:
        loss: Mean over the whole batch, nats per byte.
        grad_norm: Of the mean's gradient, before clipping.
    """

    loss: float
    grad_norm: float

    def difference(self, other: Step) -> float:
        """The larger relative difference of the two numbers."""
        return max(
            _distance(abs(a - b) / max(abs(b), 1e-12)) for a, b in zip(self, other, strict=True)
        )


class OneProcess:
    """Trains a model alone.

    Args:
        model: The whole model.
        config: The same configuration that deepspeed gets: AdamW's arguments and the largest
            gradient norm are read from it.
    """

    def __init__(self, model: nn.Module, config: Mapping[str, Any]) -> None:
        self.model = model
        self.first = {name: param.detach().clone() for name, param in model.named_parameters()}
        self._optimizer = torch.optim.AdamW(model.parameters(), **config["optimizer"]["params"])
        self._largest_norm = float(config["gradient_clipping"])

    def step(self, batches: Iterable[Any], loss_of: Callable[[Any], torch.Tensor]) -> Step:
        """One step on the mean loss over `batches`."""
        listed = list(batches)
        total = 0.0
        for batch in listed:
            loss = loss_of(batch) / len(listed)
            loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self._largest_norm).item()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return Step(total, norm)

    @torch.no_grad()
    def difference(self, weights: Mapping[str, torch.Tensor]) -> float:
        """How far `weights` are from this model's of the same names, in units of the way that
        training has taken these.

        0 for weights in half precision: their rounding is nearly as large as the way of a few
        steps.
        """
        if any(weight.dtype != torch.float32 for weight in weights.values()):
            return 0.0
        named = dict(self.model.named_parameters())
        apart = sum(
            (weight.float() - named[name]).square().sum() for name, weight in weights.items()
        )
        way = sum((named[name] - self.first[name]).square().sum() for name in weights)
        return _distance(
            float((torch.as_tensor(apart) / torch.as_tensor(way).clamp(min=1e-30)).sqrt())
        )


def _distance(value: float) -> float:
    """NaN is infinitely far from everything; no comparison would notice it."""
    return math.inf if math.isnan(value) else value


def random_windows(windows: Windows, count: int, seed: int) -> torch.Tensor:
    """`count` windows of the text, int64 of shape [count, context + 1]; the same for one seed in
    every process.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.stack(
        [
            windows[int(index)]
            for index in torch.randint(len(windows), (count,), generator=generator)
        ]
    )


def verdict(difference: float, dtype: torch.dtype) -> str:
    """The end of a check in words.

    Args:
        difference: The largest that was seen, the same on all ranks.
        dtype: Of the model that was compared.

    Raises:
        SystemExit: The difference is more than rounding.
    """
    limit = TOLERANCE if dtype == torch.float32 else HALF_TOLERANCE
    if difference > limit:
        raise SystemExit(
            f"NOT equal to one process: largest relative difference {difference:.1e}, expected at "
            f"most {limit:g}"
        )
    return f"equal to one process to rounding: largest relative difference {difference:.1e}"

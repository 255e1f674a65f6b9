"""What is random in a run, fixed or turned off, so that two runs can be equal."""

from __future__ import annotations

import random

import numpy
import torch
from torch import nn

# Attributes that turn random behaviour on when they are floats above zero: nn.LSTM.dropout,
# attention_dropout, resid_pdrop ...
RANDOM_ATTRIBUTES = ("dropout", "pdrop", "drop_path", "drop_prob", "layerdrop")


def seed_everything(seed: int) -> None:
    """Make the user's functions draw the same numbers in every process."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def without_randomness(module: nn.Module) -> list[str]:
    """Turn dropout off in place: a run that draws other masks cannot equal the whole batch."""
    changed = []
    for name, part in module.named_modules():
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0:
            part.p = 0.0
            changed.append(name or type(part).__name__)
        for key, value in vars(part).items():
            if isinstance(value, float) and value > 0 and key.endswith(RANDOM_ATTRIBUTES):
                setattr(part, key, 0.0)
                changed.append(f"{name}.{key}")
    if not changed:
        return []
    return [
        f"dropout is set to 0 for the check in {len(changed)} places "
        f"({', '.join(changed[:3])}{', ...' * (len(changed) > 3)})"
    ]

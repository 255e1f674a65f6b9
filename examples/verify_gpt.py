"""The example's GPT for `ds_verify`: the README's demo model, small enough that a whole check takes
a minute.

    ds_verify --config examples/ds_config.json --model examples/verify_gpt.py:make_model

Returns (module, batches): the module returns its own loss, and batches are random bytes, since what
it learns is not checked.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from gpt import GPT, GPTConfig
from torch import nn

LAYERS = 4
WIDTH = 128
CONTEXT = 32
ROWS = 4

Batches = Callable[[int, int, int], torch.Tensor]


def make_model() -> tuple[nn.Module, Batches]:
    """The model with the demo's sizes and a shorter context, and its batches."""
    model = GPT(GPTConfig(LAYERS, WIDTH, WIDTH // 32, CONTEXT))
    for param in model.parameters():
        if not param.any():
            # It starts with zeros behind which no gradient passes in the first steps; a check of
            # few steps wants all of them.
            nn.init.normal_(param, std=WIDTH**-0.5)
    return model, random_bytes


def random_bytes(step: int, micro_batch: int, rank: int) -> torch.Tensor:
    """Windows of bytes, of shape [ROWS, CONTEXT + 1]: the same for the same place in every
    process.
    """
    generator = torch.Generator().manual_seed((step * 1009 + micro_batch) * 1009 + rank)
    return torch.randint(0, 256, (ROWS, CONTEXT + 1), generator=generator)

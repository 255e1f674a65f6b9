"""A model with much state and next to no activations, for tests that measure memory."""

import torch
from torch import nn


class Wide(nn.Module):
    """Square layers without bias, one after the other; the loss is the sum of what comes out."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width, bias=False) for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().sum()

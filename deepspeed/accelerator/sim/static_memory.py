"""Modules whose gradients lie in static memory, as a captured graph's do.

Replaying a graph writes where it wrote before: `torch.cuda.make_graphed_callables` hands autograd
the same memory in every backward, and autograd makes it `param.grad` without a copy. So the next
backward overwrites a gradient that somebody may still read, and no allocator knows of it. A module
made static here does the same, on every device; what is computed is the module's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class _Replay(torch.autograd.Function):
    """The module's forward, and a backward that leaves gradients in memory of its own."""

    @staticmethod
    def forward(
        ctx: Any,
        module: nn.Module,
        memory: list[torch.Tensor],
        x: torch.Tensor,
        *params: torch.Tensor,
    ) -> torch.Tensor:
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y = module(ctx.x)
        ctx.params, ctx.memory = params, memory
        result: torch.Tensor = ctx.y.detach()
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        inputs = (ctx.x, *ctx.params)
        found = torch.autograd.grad(ctx.y, inputs, grads)
        torch._foreach_copy_(ctx.memory, list(found[1:]))
        return None, None, found[0], *(memory.detach() for memory in ctx.memory)


class StaticGradients(nn.Module):
    """A module with one input and one output, whose parameters' gradients lie in the same memory in
    every backward.

    Args:
        module: It; all of its parameters need gradients.

    Attributes:
        module: It.
        memory: Where the gradients lie, made in the first forward.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.memory: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The module's forward."""
        params = list(self.module.parameters())
        if not self.memory:
            self.memory = [torch.zeros_like(param) for param in params]
        result: torch.Tensor = _Replay.apply(self.module, self.memory, x, *params)
        return result

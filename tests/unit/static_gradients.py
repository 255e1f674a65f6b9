"""Modules whose gradients lie in static memory, as a captured graph's do.

Replaying a graph writes where it wrote before: `torch.cuda.make_graphed_callables` hands autograd
the same memory in every backward, and autograd makes it `param.grad` without a copy. So the next
backward overwrites a gradient that somebody may still read, and no allocator knows of it. A module
made static here does the same, on every device; what is computed is the module's own.
"""

from typing import Any

import torch
from torch import nn


class _Replay(torch.autograd.Function):
    """The module's forward, and a backward that leaves gradients in memory of its own."""

    @staticmethod
    def forward(ctx: Any, static: "StaticGradients", x: torch.Tensor, *params: torch.Tensor) -> Any:
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y = static.module(ctx.x)
        ctx.params, ctx.memory = params, static.memory
        return ctx.y.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        found = torch.autograd.grad(ctx.y, (ctx.x, *ctx.params), grads)
        torch._foreach_copy_(ctx.memory, list(found[1:]))
        return None, found[0], *(memory.detach() for memory in ctx.memory)


class StaticGradients(nn.Module):
    """A module of one input and one output, whose parameters all need gradients; these lie in
    `memory`, made in the first forward.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.memory: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        params = list(self.module.parameters())
        self.memory = self.memory or [torch.zeros_like(param) for param in params]
        return _Replay.apply(self, x, *params)

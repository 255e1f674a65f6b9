"""Split tokens over the tensor-parallel ranks, which see the same ones, before an exchange with
other ranks, and gather them again. Each is the other's gradient.
"""

from __future__ import annotations

from typing import Any

import torch

from deepspeed import comm as dist
from deepspeed._lazy import lazy_attributes
from deepspeed.comm.parallel_map import Axis
from deepspeed.utils import groups

# Upstream's further names here say what to use instead.
__getattr__ = lazy_attributes(__name__)


def drop_tokens(input_: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Keep this tensor-parallel rank's part along ``dim``, whose size the ranks must divide."""
    return drop_tokens_over(groups.current().tensor, input_, dim)


def gather_tokens(input_: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Concatenate the parts of all tensor-parallel ranks along ``dim``."""
    return gather_tokens_over(groups.current().tensor, input_, dim)


def drop_tokens_over(tensor: Axis, input_: torch.Tensor, dim: int) -> torch.Tensor:
    """`drop_tokens` with the tensor-parallel ranks given."""
    return input_ if tensor.size == 1 else _DropTokens.apply(input_, dim, tensor)


def gather_tokens_over(tensor: Axis, input_: torch.Tensor, dim: int) -> torch.Tensor:
    """`gather_tokens` with the tensor-parallel ranks given."""
    return input_ if tensor.size == 1 else _GatherTokens.apply(input_, dim, tensor)


def _drop(input_: torch.Tensor, dim: int, tensor: Axis) -> torch.Tensor:
    size = tensor.size
    if input_.shape[dim] % size:
        raise ValueError(
            f"drop_tokens: {input_.shape[dim]} tokens along dim {dim} cannot be split over {size} "
            "tensor-parallel ranks"
        )
    return input_.chunk(size, dim=dim)[tensor.rank].contiguous()


def _gather(input_: torch.Tensor, dim: int, tensor: Axis) -> torch.Tensor:
    group = tensor.group
    own = input_.movedim(dim, 0).contiguous()
    whole = own.new_empty((own.shape[0] * dist.get_world_size(group=group), *own.shape[1:]))
    dist.all_gather_into_tensor(whole, own, group=group)
    return whole.movedim(0, dim)


class _DropTokens(torch.autograd.Function):
    """Keep the own part; the gradients of all parts are gathered."""

    @staticmethod
    def forward(ctx: Any, input_: torch.Tensor, dim: int, tensor: Axis) -> torch.Tensor:
        ctx.dim, ctx.tensor = dim, tensor
        return _drop(input_, dim, tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _gather(grads[0], ctx.dim, ctx.tensor), None, None


class _GatherTokens(torch.autograd.Function):
    """Gather all parts; keep the own part of the gradient, of which the others' are copies."""

    @staticmethod
    def forward(ctx: Any, input_: torch.Tensor, dim: int, tensor: Axis) -> torch.Tensor:
        ctx.dim, ctx.tensor = dim, tensor
        return _gather(input_, dim, tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _drop(grads[0], ctx.dim, ctx.tensor), None, None

"""Split tokens over the tensor-parallel ranks and gather them again.

Ranks of one tensor-parallel group see the same tokens. Before an exchange with other ranks each
keeps its part (`drop_tokens`); after it the parts are put together (`gather_tokens`). Each is the
other's gradient.
"""

from __future__ import annotations

from typing import Any

import torch

from deepspeed import comm as dist
from deepspeed.utils import groups


def drop_tokens(input_: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """This tensor-parallel rank's part of ``input_`` along ``dim``.

    Raises:
        ValueError: The size along ``dim`` is no multiple of the number of ranks.
    """
    if groups.get_tensor_model_parallel_world_size() == 1:
        return input_
    return _DropTokens.apply(input_, dim)


def gather_tokens(input_: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """The parts of all tensor-parallel ranks, concatenated along ``dim``."""
    if groups.get_tensor_model_parallel_world_size() == 1:
        return input_
    return _GatherTokens.apply(input_, dim)


def _drop(input_: torch.Tensor, dim: int) -> torch.Tensor:
    size, rank = (
        groups.get_tensor_model_parallel_world_size(),
        groups.get_tensor_model_parallel_rank(),
    )
    if input_.shape[dim] % size:
        raise ValueError(
            f"drop_tokens: {input_.shape[dim]} tokens along dim {dim} cannot be split over {size} "
            "tensor-parallel ranks"
        )
    return input_.chunk(size, dim=dim)[rank].contiguous()


def _gather(input_: torch.Tensor, dim: int) -> torch.Tensor:
    group = groups.get_tensor_model_parallel_group()
    own = input_.movedim(dim, 0).contiguous()
    whole = own.new_empty((own.shape[0] * dist.get_world_size(group=group), *own.shape[1:]))
    dist.all_gather_into_tensor(whole, own, group=group)
    return whole.movedim(0, dim)


class _DropTokens(torch.autograd.Function):
    """Keep the own part; the gradients of all parts are gathered."""

    @staticmethod
    def forward(ctx: Any, input_: torch.Tensor, dim: int) -> torch.Tensor:
        ctx.dim = dim
        return _drop(input_, dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _gather(grads[0], ctx.dim), None


class _GatherTokens(torch.autograd.Function):
    """Gather all parts; the own part of the gradient is kept: the others' losses are copies of the
    own one.
    """

    @staticmethod
    def forward(ctx: Any, input_: torch.Tensor, dim: int) -> torch.Tensor:
        ctx.dim = dim
        return _gather(input_, dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _drop(grads[0], ctx.dim), None

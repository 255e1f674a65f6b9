"""Sum of micro-batch gradients in a dtype of its own (`data_types.grad_accum_dtype`), on this rank:
summed in `param.grad`, eight bits of bf16 would lose small contributions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.sharding.group import ShardedGroup

# Elements of gradients that are widened together: bounds the memory that this takes.
WIDENED_NUMEL = 1 << 22


class LocalAccumulator:
    """One flat buffer per group, shape `[padded_numel]`, with a view per parameter."""

    def __init__(self, groups: Sequence[ShardedGroup], dtype: torch.dtype) -> None:
        self.flats = [
            torch.zeros(g.table.padded_numel, dtype=dtype, device=g.flat.device) for g in groups
        ]
        self.views = [g.param_views(flat) for g, flat in zip(groups, self.flats, strict=True)]
        self._sums: dict[torch.Tensor, torch.Tensor] = {
            param: view
            for group, views in zip(groups, self.views, strict=True)
            for param, view in zip(group.params, views, strict=True)
        }
        self._groups = groups
        self._dtype = dtype
        self._is_host = get_accelerator().is_synchronized_device()

    def sum_of(self, param: torch.Tensor) -> torch.Tensor | None:
        return self._sums.get(param)

    @torch.no_grad()
    def absorb(self, scale: float = 1.0) -> None:
        """Add every `param.grad`, times `scale`, and drop it."""
        for group, views in zip(self._groups, self.views, strict=True):
            present = [
                (view, param.grad)
                for view, param in zip(views, group.params, strict=True)
                if param.grad is not None
            ]
            self._add([view for view, _ in present], [grad for _, grad in present], scale)
            for param in group.params:
                param.grad = None

    def _add(self, views: list[torch.Tensor], grads: list[torch.Tensor], scale: float) -> None:
        """Add many gradients, in few kernels.

        A device adds tensors of two dtypes one by one, but converts many at a time: so they are
        widened first, at most `WIDENED_NUMEL` elements together. Sums are the same.
        """
        if not views:
            return
        if self._is_host or all(grad.dtype == self._dtype for grad in grads):
            torch._foreach_add_(views, grads, alpha=scale)
            return
        for some in _batches(grads):
            widened = _widened([grads[index] for index in some], self._dtype)
            torch._foreach_add_([views[index] for index in some], widened, alpha=scale)

    @torch.no_grad()
    def absorb_one(self, group: int, index: int, scale: float = 1.0) -> None:
        param = self._groups[group].params[index]
        if param.grad is not None:
            self.views[group][index].add_(param.grad, alpha=scale)
            param.grad = None

    def clear(self) -> None:
        for flat in self.flats:
            flat.zero_()


def _batches(grads: list[torch.Tensor]) -> Iterator[list[int]]:
    """Indices of neighbours that together have at most `WIDENED_NUMEL` elements, or of one."""
    batch: list[int] = []
    numel = 0
    for index, grad in enumerate(grads):
        if batch and numel + grad.numel() > WIDENED_NUMEL:
            yield batch
            batch, numel = [], 0
        batch.append(index)
        numel += grad.numel()
    yield batch


def _widened(grads: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    if len(grads) == 1:
        return grads  # one kernel converts and adds it
    flat = torch.empty(sum(grad.numel() for grad in grads), dtype=dtype, device=grads[0].device)
    pieces_of = flat.split_with_sizes([grad.numel() for grad in grads])
    pieces = [piece.view(grad.shape) for piece, grad in zip(pieces_of, grads, strict=True)]
    torch._foreach_copy_(pieces, grads)
    return pieces

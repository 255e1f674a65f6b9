"""Sum of micro-batch gradients in a dtype of its own (`data_types.grad_accum_dtype`), on this rank.

Autograd sums into `param.grad` in the parameter's dtype; eight bits of bf16 lose small
contributions after a few micro-batches. The accumulator takes each micro-batch's gradient out of
`param.grad` and adds it here.
"""

from __future__ import annotations

import torch

from deepspeed.runtime.sharding.group import ShardedGroup


class LocalAccumulator:
    """One flat buffer per group, shape `[padded_numel]`, with a view per parameter.

    Args:
        groups: Whose gradients are summed.
        dtype: In what they are summed.
    """

    def __init__(self, groups: list[ShardedGroup], dtype: torch.dtype) -> None:
        self.flats = [
            torch.zeros(g.table.padded_numel, dtype=dtype, device=g.flat.device) for g in groups
        ]
        self.views = [g.param_views(flat) for g, flat in zip(groups, self.flats, strict=True)]
        self._groups = groups

    @torch.no_grad()
    def absorb(self, scale: float = 1.0) -> None:
        """Add every `param.grad`, times `scale`, and drop it."""
        for group, views in zip(self._groups, self.views, strict=True):
            present = [
                (view, param.grad)
                for view, param in zip(views, group.params, strict=True)
                if param.grad is not None
            ]
            if present:
                torch._foreach_add_(
                    [view for view, _ in present], [grad for _, grad in present], alpha=scale
                )
            for param in group.params:
                param.grad = None

    @torch.no_grad()
    def absorb_one(self, group: int, index: int, scale: float = 1.0) -> None:
        """The same for one parameter, from inside its hook."""
        param = self._groups[group].params[index]
        if param.grad is not None:
            self.views[group][index].add_(param.grad, alpha=scale)
            param.grad = None

    def clear(self) -> None:
        """Forget all contributions."""
        for flat in self.flats:
            flat.zero_()

"""All-reduce of gradients that every rank keeps whole: stage 0, the fp16 optimizers without ZeRO,
BF16_Optimizer.

One flat buffer per group; buckets are ranges of it. All buckets are in flight at once and complete
before `reduce` returns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from deepspeed import comm as dist
from deepspeed.runtime.gradients.reduce_rule import ReduceFactors


class FlatGradients:
    """Gives each parameter's `.grad` a place in one flat buffer, so that reduction needs no further
    copies.

    Args:
        params: Trainable parameters of one dtype and device.
        like: A tensor of that dtype and device; None is the first parameter, of which there must
            then be one.
    """

    def __init__(
        self, params: Sequence[torch.nn.Parameter], like: torch.Tensor | None = None
    ) -> None:
        self.params = list(params)
        like = self.params[0] if like is None else like
        self.flat = torch.zeros(
            sum(p.numel() for p in self.params), dtype=like.dtype, device=like.device
        )
        self.views = []
        start = 0
        for param in self.params:
            self.views.append(self.flat[start : start + param.numel()].view(param.shape))
            start += param.numel()

    @torch.no_grad()
    def collect(self) -> None:
        """Move every gradient into the buffer; an absent one counts as zero. Afterwards `.grad` is
        the view.
        """
        moved = [(v, p) for v, p in zip(self.views, self.params, strict=True) if p.grad is not v]
        present = [(view, param.grad) for view, param in moved if param.grad is not None]
        if present:
            torch._foreach_copy_([view for view, _ in present], [grad for _, grad in present])
        absent = [view for view, param in moved if param.grad is None]
        if absent:
            torch._foreach_zero_(absent)
        for view, param in moved:
            param.grad = view


@torch.no_grad()
def all_reduce_flat(
    flats: Iterable[torch.Tensor],
    bucket_numel: int,
    factors: ReduceFactors,
    groups: Iterable[dist.Group],
    communication_data_type: torch.dtype | None,
) -> None:
    """All-reduce flat buffers in place, `bucket_numel` elements at a time, scaled by the reduce
    rule.

    Args:
        flats: 1-D buffers; every rank passes the same sizes in the same order.
        bucket_numel: Elements per collective.
        factors: From the reduce rule.
        groups: For each buffer, the ranks that hold the same parameters; None is the world.
        communication_data_type: What travels; None is each buffer's own dtype.
    """
    in_flight = []
    for flat, group in zip(flats, groups, strict=True):
        for chunk in torch.split(flat, max(1, bucket_numel)):
            if chunk.numel() == 0:
                continue
            payload = (
                chunk
                if communication_data_type in (None, chunk.dtype)
                else chunk.to(communication_data_type)
            )
            if factors.pre != 1.0:
                payload.mul_(factors.pre)
            work = dist.all_reduce(payload, group=group, async_op=True)
            in_flight.append((work, payload, chunk))
    for work, payload, chunk in in_flight:
        if work is not None:
            work.wait()
        if payload is not chunk:
            chunk.copy_(payload)
        if factors.post != 1.0:
            chunk.mul_(factors.post)

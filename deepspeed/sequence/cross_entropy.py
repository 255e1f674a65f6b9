"""Cross entropy over a sequence that is split over ranks: every rank has the logits of its own
positions and learns the losses of all ([Note: one divisor] in `deepspeed.sequence`).
"""

from __future__ import annotations

from typing import Any

import torch

from deepspeed import comm as dist

# Positions with this target take no part: loss and gradient are zero, as in torch's cross entropy.
IGNORE_INDEX = -100


class _VocabSequenceParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        vocab_seq_parallel_logits: torch.Tensor,
        target: torch.Tensor,
        sp_group: dist.Group,
    ) -> torch.Tensor:
        taking_part = target != IGNORE_INDEX
        target = target.masked_fill(~taking_part, 0)
        log_probabilities = torch.log_softmax(vocab_seq_parallel_logits.float(), dim=-1)
        own = -log_probabilities.gather(-1, target.unsqueeze(-1)).squeeze(-1)
        own = own.masked_fill(~taking_part, 0.0).contiguous()
        ctx.save_for_backward(log_probabilities, target, taking_part)
        ctx.group, ctx.dtype = sp_group, vocab_seq_parallel_logits.dtype
        world = dist.get_world_size(sp_group)
        losses = own.new_empty(world * own.shape[0], *own.shape[1:])
        dist.all_gather_into_tensor(losses, own, group=sp_group)
        return losses

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Sum every rank's gradient of this rank's losses, times the losses' by the logits."""
        log_probabilities, target, taking_part = ctx.saved_tensors
        grad = grad_output.new_empty(target.shape)
        dist.reduce_scatter_tensor(grad, grad_output.contiguous(), group=ctx.group)
        logits_grad = log_probabilities.exp()
        logits_grad.scatter_add_(-1, target.unsqueeze(-1), -torch.ones_like(grad).unsqueeze(-1))
        logits_grad *= (grad * taking_part).unsqueeze(-1)
        return logits_grad.to(ctx.dtype), None, None


def vocab_sequence_parallel_cross_entropy(
    vocab_parallel_logits: torch.Tensor, target: torch.Tensor, sp_group: dist.Group
) -> torch.Tensor:
    """Compute the losses [s, b], in fp32, of a sequence whose positions are split over `sp_group`,
    from logits [s / P, b, vocabulary], targets [s / P, b]; `IGNORE_INDEX`: nothing is learned.

    They are the same on all ranks. Take their mean, or any other function, on every rank: the
    engine's gradient is that of one process with the whole sequence.
    """
    if vocab_parallel_logits.shape[:-1] != target.shape or target.dim() < 1:
        raise ValueError(
            f"logits of shape {tuple(vocab_parallel_logits.shape)} do not fit targets of shape "
            f"{tuple(target.shape)}"
        )
    losses: torch.Tensor = _VocabSequenceParallelCrossEntropy.apply(
        vocab_parallel_logits, target, sp_group
    )
    return losses

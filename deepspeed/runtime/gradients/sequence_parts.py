"""Gradients of parameters marked `sequence_parallel`: each tensor-parallel rank sees its part of
the sequence, so it has a part of the gradient.

Megatron's own trainer sums `param.grad` after backward, which is too late here: buckets have left
by then, and a sum over several micro-batches that was averaged before would be summed twice. The
parts are summed right before a micro-batch is reduced, all parameters in one message, while other
buckets are on their way; the marked ones have buckets of their own, which leave after that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.runtime.sharding.flattening import in_pieces
from deepspeed.runtime.sharding.model_ranks import is_model_parallel_parameter

if TYPE_CHECKING:
    from deepspeed.runtime.optimizers.step_sequence import StepSequence

# Elements in one message, at most.
MESSAGE_NUMEL = 64 * 1024 * 1024
_MARK = "ds_has_parts"


def has_parts(param: torch.Tensor) -> bool:
    """Whether the gradient of a parameter is complete only right before a reduction."""
    return getattr(param, _MARK, False)


class SequenceParts:
    """Sums the parts of the marked parameters of `model`.

    Args:
        model: Those of its parameters that have parts are told so (`has_parts`).
        group: The tensor-parallel ranks, which run the same backward and so sum in the same order;
            None: there is only this one.
    """

    def __init__(self, model: nn.Module, group: dist.Group) -> None:
        self.group = group
        self.params = [
            param
            for param in (model.parameters() if group is not None else ())
            if param.requires_grad
            and getattr(param, "sequence_parallel", False)
            and not is_model_parallel_parameter(param)
        ]
        for param in self.params:
            setattr(param, _MARK, True)
        self._is_summed = True

    def opened(self) -> None:
        self._is_summed = False

    @torch.no_grad()
    def complete(self, sequence: StepSequence) -> None:
        """Sum this rank's local gradients over the tensor-parallel ranks, once per backward, right
        before they are reduced. The host waits for nothing.
        """
        if self._is_summed:
            return
        self._is_summed = True
        families: dict[torch.dtype, list[torch.Tensor]] = {}
        for param in self.params:
            grad = sequence.local_gradient(param)
            families.setdefault(grad.dtype, []).append(grad)
        for grads in families.values():
            for piece in in_pieces(grads, MESSAGE_NUMEL):
                flat = torch.cat([grad.reshape(-1) for grad in piece])
                dist.all_reduce(flat, group=self.group)
                parts = torch.split(flat, [grad.numel() for grad in piece])
                views = [part.view(grad.shape) for part, grad in zip(parts, piece, strict=True)]
                torch._foreach_copy_(piece, views)

    def close(self) -> None:
        for param in self.params:
            param.__dict__.pop(_MARK, None)
        self.params = []

"""Stage 0 without master weights: the client's own optimizer over the model's own parameters.

The engine hands the client its optimizer back unwrapped; this object runs the same step sequence as all other optimizers around it:
average, norm, non-finite check, clip, step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from deepspeed import comm as dist
from deepspeed.runtime.base_optimizer import StepSequence
from deepspeed.runtime.gradients.norm import local_squared_norm, reduce_squared_norm
from deepspeed.runtime.gradients.replicated import FlatGradients, all_reduce_flat

if TYPE_CHECKING:
    from collections.abc import Callable

    from deepspeed.runtime.gradients.ledger import GradientPiece


class ReplicatedLink(NamedTuple):
    """How `deepspeed.utils.safe_get_full_grad` finds what is left to be divided; set as `param._ds_replicated_by`."""

    optimizer: ReplicatedOptimizer

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Pickled as None: a saved module does not take the optimizer and its process groups along."""
        return type(None), ()


def _reader(view: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: view.view(-1)


class ReplicatedOptimizer(StepSequence):
    """See module.

    Args:
        init_optimizer: The client's optimizer.
        dp_process_group: Ranks whose gradients are averaged; None is the world.
        norm_group: Ranks that hold other parts of the model.
        counts_in_norm: Whether this rank counts the parameter in the norm.
        reduce_bucket_size: Elements per all-reduce.
        communication_data_type: What travels; None is the gradients' dtype.
        sequence: See `StepSequence`.
    """

    def __init__(
        self,
        init_optimizer: torch.optim.Optimizer,
        *,
        dp_process_group: Any = None,
        norm_group: Any = None,
        counts_in_norm: Any = None,
        reduce_bucket_size: int = 500_000_000,
        communication_data_type: torch.dtype | None = None,
        **sequence: Any,
    ) -> None:
        super().__init__(init_optimizer, **sequence)
        self.dp_process_group = dp_process_group if dp_process_group is not None else dist.get_world_group()
        self.norm_group = norm_group
        self._counts_in_norm = counts_in_norm
        self.reduce_bucket_size = reduce_bucket_size
        self.communication_data_type = communication_data_type
        self.gradients = self._flat_gradients()
        for gradients in self.gradients:
            for param in gradients.params:
                param._ds_replicated_by = ReplicatedLink(self)  # type: ignore[attr-defined]  # the link is dynamic

    def _flat_gradients(self) -> list[FlatGradients]:
        families: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                if param.requires_grad:
                    families.setdefault((param.dtype, param.device), []).append(param)
        if not families:
            raise ValueError("the optimizer has no trainable parameter: check requires_grad and model_parameters")
        return [FlatGradients(params) for params in families.values()]

    @property
    def _step_divisor(self) -> float:
        return self.accumulation_divisor

    @property
    def read_factor(self) -> float:
        """By what `param.grad` is multiplied to be what the optimizer will see (before clipping)."""
        return self.reduce_rule.step_factor / self._step_divisor

    def reduce_gradients(self) -> None:
        """See base class: only the boundary reduces."""
        if not self.tracker.is_boundary or self.tracker.in_no_sync:
            return
        for gradients in self.gradients:
            gradients.collect()
        flats = [gradients.flat for gradients in self.gradients]
        factors = self.reduce_rule.factors()
        all_reduce_flat(flats, self.reduce_bucket_size, factors, self.dp_process_group, self.communication_data_type)
        super()._settle(self.read_factor)

    def _settle(self, factor: float) -> None:
        """See base class: settled after the reduction already, because clients may clip `param.grad` themselves before the step."""

    def backward_prologue(self) -> None:
        """See base class."""
        if self.ledger is not None and all(param.grad is None for gradients in self.gradients for param in gradients.params):
            # The client has its own optimizer in hand, whose zero_grad() tells nobody.
            self.ledger.forget_contributions()

    def gradient_pieces(self) -> list[GradientPiece]:
        """See base class: every rank holds every parameter's gradient whole."""
        from deepspeed.runtime.gradients.ledger import GradientPiece  # startup: only with a ledger

        pieces = []
        for gradients in self.gradients:
            for param, view in zip(gradients.params, gradients.views, strict=True):
                travels = self.communication_data_type or param.dtype
                narrowest = max((param.dtype, travels), key=lambda dtype: torch.finfo(dtype).eps)
                if param.numel():
                    pieces.append(GradientPiece(param, 0, param.numel(), _reader(view), narrowest))
        return pieces

    def _norm_grads(self) -> list[torch.Tensor]:
        if self._counts_in_norm is None:
            return [gradients.flat for gradients in self.gradients]
        return [v for g in self.gradients for v, p in zip(g.views, g.params, strict=True) if self._counts_in_norm(p)]

    def scaled_global_norm(self) -> torch.Tensor:
        """See base class."""
        local = local_squared_norm(self._norm_grads(), self.gradients[0].flat.device)
        return reduce_squared_norm(local, self.norm_group).sqrt_()

    @torch.no_grad()
    def _update(self, factor: float) -> None:
        if factor != 1.0:
            for gradients in self.gradients:
                gradients.flat.mul_(factor)
        self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See base class."""
        for gradients in self.gradients:
            for param in gradients.params:
                param.grad = None
        super().zero_grad(set_to_none)

    def destroy(self) -> None:
        """See base class: the client's optimizer and parameters stay, without gradients and without a way back to here."""
        for gradients in self.gradients:
            for param in gradients.params:
                param.grad = None
                if hasattr(param, "_ds_replicated_by"):
                    del param._ds_replicated_by
        self.gradients = []

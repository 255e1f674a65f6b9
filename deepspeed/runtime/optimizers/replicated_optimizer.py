"""Stage 0 without master weights: the client's own optimizer over the model's own parameters.

The engine hands the client its optimizer back unwrapped; this object runs the same step sequence as
all other optimizers around it:
average, norm, non-finite check, clip, step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from deepspeed.runtime.gradients.norm import joined, local_squared_norm, reduce_squared_norm
from deepspeed.runtime.gradients.replicated import FlatGradients
from deepspeed.runtime.gradients.scope import GradientPiece
from deepspeed.runtime.optimizers.replicated_reduction import ReplicatedReduction
from deepspeed.runtime.optimizers.step_outcome import GradientScaling
from deepspeed.runtime.optimizers.step_sequence import StepSequence
from deepspeed.runtime.sharding.group import expert_group_of


class ReplicatedLink(NamedTuple):
    """How `deepspeed.utils.safe_get_full_grad` finds what is left to be divided; set as
    `param._ds_replicated_by`.
    """

    optimizer: ReplicatedOptimizer

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Pickled as None: a saved module does not take the optimizer and its process groups
        along.
        """
        return type(None), ()


def _reader(view: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: view.view(-1)


class Family(NamedTuple):
    """What parameters of one flat buffer have in common.

    Attributes:
        dtype: Theirs.
        device: Theirs.
        expert_group: Group name of experts; None for dense parameters.
    """

    dtype: torch.dtype
    device: torch.device
    expert_group: str | None


class ReplicatedOptimizer(StepSequence):
    """See module.

    Args:
        init_optimizer: The client's optimizer.
        reduce_bucket_size: Elements per all-reduce.
        communication_data_type: What travels; None is the gradients' dtype.
        reduction: See `ReplicatedReduction`: how, and under what names.
        sequence: See `StepSequence`.
    """

    def __init__(
        self,
        init_optimizer: torch.optim.Optimizer,
        *,
        reduce_bucket_size: int = 500_000_000,
        communication_data_type: torch.dtype | None = None,
        reduction: Mapping[str, Any] | None = None,
        **sequence: Any,
    ) -> None:
        super().__init__(init_optimizer, **sequence)
        self.reduce_bucket_size = reduce_bucket_size
        self.communication_data_type = communication_data_type
        self._families = self._sort_out()
        self.gradients = [FlatGradients(params) for params in self._families.values()]
        self._reduction = ReplicatedReduction(
            self,
            self.gradients,
            [self._replicas(family.expert_group) for family in self._families],
            bucket_numel=reduce_bucket_size,
            communication_data_type=communication_data_type,
            **(reduction or {}),
        )
        self._counted, self._counted_elsewhere = (
            self._parts(counted=True),
            self._parts(counted=False),
        )
        for gradients in self.gradients:
            for param in gradients.params:
                param._ds_replicated_by = ReplicatedLink(self)  # type: ignore[attr-defined]  # the link is dynamic

    def _sort_out(self) -> dict[Family, list[torch.nn.Parameter]]:
        families: dict[Family, list[torch.nn.Parameter]] = {}
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                if param.requires_grad:
                    families.setdefault(
                        Family(param.dtype, param.device, expert_group_of(param)), []
                    ).append(param)
        return families

    def _parts(self, counted: bool) -> list[list[torch.Tensor]]:
        """For each parameter group, the parts of the flat buffers that this rank counts in the
        norm, or another rank.
        """
        counts = self._counts_in_norm or (lambda param: True)
        found = []
        for group in self.optimizer.param_groups:
            own = {param for param in group["params"] if counts(param) is counted}
            parts = []
            for gradients in self.gradients:
                views = [
                    view
                    for view, param in zip(gradients.views, gradients.params, strict=True)
                    if param in own
                ]
                starts = [int(view.storage_offset()) for view in views]
                ranges = joined(
                    (start, start + view.numel()) for start, view in zip(starts, views, strict=True)
                )
                parts += [gradients.flat[start:end] for start, end in ranges]
            found.append(parts)
        return found

    @property
    def public_optimizer(self) -> Any:
        """See base class: the client's."""
        return self.optimizer

    @property
    def _step_divisor(self) -> float:
        return self.accumulation_divisor

    @property
    def read_factor(self) -> float:
        """By what `param.grad` is multiplied to be what the optimizer will see (before
        clipping).
        """
        return self.reduce_rule.step_factor / self._step_divisor

    def reduce_gradients(self) -> None:
        """See base class: only the boundary reduces."""
        if self.reduces_now:
            self._reduction.reduce()
            super()._settle(self.read_factor)

    def _settle(self, factor: float) -> None:
        """See base class: settled after the reduction already, because clients may clip
        `param.grad` themselves before the step.
        """

    def backward_prologue(self) -> None:
        """See base class."""
        # The client has its own optimizer in hand, whose zero_grad() tells nobody.
        self.observer.resumed(self._is_empty)
        self._reduction.backward_prologue()

    @property
    def works_during_backward(self) -> bool:
        """See base class."""
        return self._reduction.works_during_backward

    def exit_backward(self) -> None:
        """See base class."""
        self._reduction.exit_backward()

    def hold(self, params: Iterable[torch.nn.Parameter]) -> None:
        """See base class."""
        self._reduction.hold(params)

    def _is_empty(self) -> bool:
        return all(param.grad is None for gradients in self.gradients for param in gradients.params)

    def gradient_pieces(self) -> list[GradientPiece]:
        """See base class: every rank holds every parameter's gradient whole."""
        pieces = []
        for gradients in self.gradients:
            for param, view in zip(gradients.params, gradients.views, strict=True):
                travels = self.communication_data_type or param.dtype
                narrowest = max((param.dtype, travels), key=lambda dtype: torch.finfo(dtype).eps)
                if param.numel():
                    pieces.append(GradientPiece(param, 0, param.numel(), _reader(view), narrowest))
        return pieces

    def scaled_global_norm(self) -> torch.Tensor:
        """See base class."""
        squares = torch.zeros(self.num_norm_groups, dtype=torch.float32, device=self.device)
        for index, (own, others) in enumerate(
            zip(self._counted, self._counted_elsewhere, strict=True)
        ):
            squares[index] += local_squared_norm(own, self.device, others).squeeze()
        return self._norm_of(reduce_squared_norm(squares, self.norm_group))

    @torch.no_grad()
    def _update(self, scaling: GradientScaling) -> None:
        scaling.step(self.optimizer, [gradients.flat for gradients in self.gradients])

    def load_window_state(self, saved: Mapping[str, Any]) -> None:
        """See base class."""
        super().load_window_state(saved)
        for gradients in self.gradients:
            gradients.collect_present()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See base class."""
        self._reduction.clear()
        super().zero_grad(set_to_none)

    def destroy(self) -> None:
        """See base class: the client's optimizer and parameters stay, without gradients and without
        a way back to here.
        """
        self._reduction.destroy()
        for gradients in self.gradients:
            for param in gradients.params:
                if hasattr(param, "_ds_replicated_by"):
                    del param._ds_replicated_by
        self.gradients, self._counted, self._counted_elsewhere = [], [], []

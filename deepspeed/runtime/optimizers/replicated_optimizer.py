"""Stage 0 without master weights: the client's own optimizer over the model's own parameters.

The engine hands the client its optimizer back unwrapped; this object runs the step sequence around
it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from deepspeed.runtime.gradients.norm import joined, local_squared_norm, reduce_squared_norm
from deepspeed.runtime.gradients.reduction import GradientContext, ReductionSettings
from deepspeed.runtime.gradients.replicated import FlatGradients
from deepspeed.runtime.gradients.replicated_reduction import Replicated
from deepspeed.runtime.gradients.scope import GradientPiece
from deepspeed.runtime.optimizers.settings import StepSettings
from deepspeed.runtime.optimizers.state_layout import OwnTensor, StateFiles
from deepspeed.runtime.optimizers.step_outcome import GradientScaling
from deepspeed.runtime.optimizers.step_sequence import StepSequence, forwarded
from deepspeed.runtime.sharding.group import expert_group_of
from deepspeed.runtime.sharding.model_writes import refused_memory


class ReplicatedLink(NamedTuple):
    """Tells `safe_get_full_grad` what is left to be divided; see `param._ds_replicated_by`."""

    optimizer: StepSequence

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Pickle as None: a saved module takes no optimizer and process groups along."""
        return type(None), ()


def _reader(view: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: view.view(-1)


class Family(NamedTuple):
    """What parameters of one flat buffer have in common; `expert_group` is None for dense ones."""

    dtype: torch.dtype
    device: torch.device
    expert_group: str | None


def _families(optimizer: torch.optim.Optimizer) -> dict[Family, list[nn.Parameter]]:
    families: dict[Family, list[nn.Parameter]] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.requires_grad:
                family = Family(param.dtype, param.device, expert_group_of(param))
                families.setdefault(family, []).append(param)
    return families


class UnsharedParameters:
    """What scripts may do to parameters that are trained themselves: everything but convert them.

    Attributes:
        compares_all: Has no effect: there are no masters to compare with.
    """

    compares_all = False

    def __init__(self, gradients: Sequence[FlatGradients], context: GradientContext) -> None:
        self._gradients = gradients
        self._context = context

    def refuse_converted(self) -> None:
        """Refuse a converted model, as the first parameter of each buffer shows."""
        self._refuse(first_only=True)

    def rejoin(self) -> None:
        """Refuse parameters that were converted or moved: their gradients would not fit."""
        self._refuse(first_only=False)

    def _refuse(self, first_only: bool) -> None:
        for gradients in self._gradients:
            dtype, device = gradients.flat.dtype, gradients.flat.device
            for param in gradients.params[: 1 if first_only else None]:
                if param.dtype != dtype or param.device != device:
                    name = self._context.name_of(param)
                    raise RuntimeError(refused_memory(name, param, dtype, device))

    def take_in(self) -> None:
        """Refuse what cannot be trained; what was written is what is trained."""
        self.rejoin()


class WithoutGradients:
    """Leaves parameters out as torch's optimizers do: they have no gradient."""

    begins = False

    def leave_out(self, params: Collection[nn.Parameter]) -> None:
        for param in params:
            param.grad = None


class ModelParameters:
    """The model's own parameters, which the client's optimizer updates."""

    waits_for_gradients = False

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        context: GradientContext,
        steps: StepSettings,
        gradients: Sequence[FlatGradients],
    ) -> None:
        self.optimizer = optimizer
        self.device = context.device
        self.norm_group = steps.norm_group
        self.num_norm_groups = steps.num_norm_groups or len(optimizer.param_groups)
        self.group_squares: torch.Tensor | None = None
        self._gradients = gradients
        self.writes = UnsharedParameters(gradients, context)
        self.partial = WithoutGradients()
        counts = steps.counts_in_norm or (lambda param: True)
        self._counted = self._parts(lambda param: counts(param) is True)
        self._counted_elsewhere = self._parts(lambda param: counts(param) is False)

    def _parts(self, chosen: Callable[[nn.Parameter], bool]) -> list[list[torch.Tensor]]:
        """For each parameter group, the parts of the flat buffers that are of chosen parameters."""
        found = []
        for group in self.optimizer.param_groups:
            own = {param for param in group["params"] if chosen(param)}
            parts = []
            for gradients in self._gradients:
                pairs = zip(gradients.views, gradients.params, strict=True)
                views = [view for view, param in pairs if param in own]
                starts = [int(view.storage_offset()) for view in views]
                ranges = joined(
                    (start, start + view.numel()) for start, view in zip(starts, views, strict=True)
                )
                parts += [gradients.flat[start:end] for start, end in ranges]
            found.append(parts)
        return found

    def link(self, sequence: StepSequence) -> None:
        for gradients in self._gradients:
            for param in gradients.params:
                param._ds_replicated_by = ReplicatedLink(sequence)  # type: ignore[attr-defined]  # the link is dynamic

    state: Any = forwarded("optimizer")

    def scaled_global_norm(self) -> torch.Tensor:
        squares = torch.zeros(self.num_norm_groups, dtype=torch.float32, device=self.device)
        for index, (own, others) in enumerate(
            zip(self._counted, self._counted_elsewhere, strict=True)
        ):
            squares[index] += local_squared_norm(own, self.device, others).squeeze()
        return self._norm_of(reduce_squared_norm(squares, self.norm_group))

    def _norm_of(self, squares: torch.Tensor) -> torch.Tensor:
        self.group_squares = squares
        return squares.sum(0, keepdim=True).sqrt_()

    @torch.no_grad()
    def update(self, scaling: GradientScaling) -> None:
        scaling.step(self.optimizer, [gradients.flat for gradients in self._gradients])

    def gradient_pieces(
        self, sums_in: Callable[[nn.Parameter], torch.dtype]
    ) -> list[GradientPiece]:
        """Where reduced gradients lie: every rank holds every parameter's whole."""
        return [
            GradientPiece(param, 0, param.numel(), _reader(view), sums_in(param))
            for gradients in self._gradients
            for param, view in zip(gradients.params, gradients.views, strict=True)
            if param.numel()
        ]

    def numbered_params(self) -> list[list[nn.Parameter]]:
        return [group["params"] for group in self.optimizer.param_groups]

    def own_tensors(self) -> Iterator[OwnTensor]:
        for index, params in enumerate(self.numbered_params()):
            for param in params:
                yield OwnTensor.of_param(param, index, param, required=param.requires_grad)

    def refresh_fp32_params(self) -> None:
        """There are no masters."""

    def destroy(self) -> None:
        """Leave the client's optimizer and parameters, without a way back to here."""
        for gradients in self._gradients:
            for param in gradients.params:
                if hasattr(param, "_ds_replicated_by"):
                    del param._ds_replicated_by
        self._gradients, self._counted, self._counted_elsewhere = [], [], []


class ReplicatedOptimizer(StepSequence):
    """The step sequence around a client's optimizer; see module."""

    reduction: Replicated

    def __init__(
        self,
        init_optimizer: torch.optim.Optimizer,
        param_names: Mapping[nn.Parameter, str],
        steps: StepSettings,
        reduction: ReductionSettings,
    ) -> None:
        context = steps.context(init_optimizer, param_names)
        families = _families(init_optimizer)
        gradients = [FlatGradients(params) for params in families.values()]
        replicas = [context.replicas(family.expert_group) for family in families]
        super().__init__(
            init_optimizer,
            context,
            Replicated(context, gradients, replicas, reduction),
            ModelParameters(init_optimizer, context, steps, gradients),
            StateFiles(init_optimizer),
            steps.outcomes(),
        )

    @property
    def public_optimizer(self) -> torch.optim.Optimizer:
        """The client's, which `deepspeed.initialize` returns."""
        return self.optimizer

    def backward_prologue(self) -> None:
        # The client has its own optimizer in hand, whose zero_grad() tells nobody.
        self.observer.resumed(lambda: all(param.grad is None for param in self._trained()))
        super().backward_prologue()

    def _trained(self) -> Iterator[nn.Parameter]:
        return (param for gradients in self.reduction.gradients for param in gradients.params)

    def reduce_gradients(self) -> None:
        """Reduce at the boundary, and settle it: clients may clip `param.grad` before the step."""
        self.reduction.reduce_gradients()
        if self.reduces_now:
            super()._tell_settled(self.read_factor)

    def _tell_settled(self, factor: float) -> None:
        """Say nothing at the step; see `reduce_gradients`."""

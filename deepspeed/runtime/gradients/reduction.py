"""What reduces the gradients of an optimizer: the part `GradientReduction`, its settings, and what
it asks of the engine.

Called in this order by `optimizers.step_sequence`: `backward_prologue`, gradients, then
`backward_epilogue`, `reduce_gradients`, `exit_backward`; before a step `finish_gradients`, after it
`clear`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.runtime.gradients.accumulation import AccumulationTracker
from deepspeed.runtime.gradients.idle import IdleParameters
from deepspeed.runtime.gradients.local_accumulator import LocalAccumulator
from deepspeed.runtime.gradients.observer import UNOBSERVED, GradientObserver
from deepspeed.runtime.gradients.reduce_rule import ReduceRule
from deepspeed.runtime.sharding.group import ShardedGroup


@dataclass(frozen=True)
class ReductionSettings:
    """How gradients are reduced."""

    reduce_bucket_size: int = 500_000_000  # elements per collective
    communication_data_type: torch.dtype | None = None  # what travels; None is the gradients' dtype
    # per-parameter override of it (`torch_autocast.lower_precision_safe_modules`)
    comm_dtype_of: Callable[[nn.Parameter], torch.dtype | None] | None = None
    overlap_comm: bool = False  # communicate beside backward
    contiguous_gradients: bool = True  # reuse bucket buffers instead of allocating one per bucket
    # reduce each slice onto its owner; otherwise all-reduce and keep the own slice
    reduce_scatter: bool = True
    # count a parameter without gradient as zero; otherwise raise, naming it
    ignore_unused_parameters: bool = True
    # sum micro-batches of all ranks in one order, whichever ranks there are (`canonical`)
    canonical: bool = False

    def travels_in(self, param: nn.Parameter) -> torch.dtype:
        """The dtype that this parameter's gradient travels in, where it is not summed before."""
        override = self.comm_dtype_of(param) if self.comm_dtype_of is not None else None
        return override or self.communication_data_type or param.dtype


def refused_gradients(names: Sequence[str]) -> str:
    """Return the error text for gradients that a script has assigned and nothing reads."""
    listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return (
        f"param.grad of {listed} was assigned after the gradients had been reduced, and the step "
        "would not use it. Change a reduced gradient by deepspeed.utils.safe_set_full_grad, clip "
        "by the key gradient_clipping, and let gradients that the script computes itself "
        "(torch.autograd.grad) come from a loss: engine.backward(loss)"
    )


def nobody() -> None:
    """Nobody wants to hear of a backward."""


@dataclass(eq=False)
class GradientContext:
    """What all parts of one optimizer know of its gradients."""

    tracker: AccumulationTracker  # who knows what is the boundary
    reduce_rule: ReduceRule  # who knows by what gradients are scaled
    device: torch.device
    # ranks that hold the same dense parameters and average their gradients
    dp_process_group: dist.Group
    # by `param.group_name`, the ranks that hold the same experts
    expert_data_parallel_group: Mapping[str, dist.Group]
    param_names: Mapping[nn.Parameter, str]  # name of each parameter, in model order
    frozen: Sequence[nn.Parameter] = ()  # the optimizer's parameters that are not trained
    # called by the first hook of a backward that nobody announced
    backward_started: Callable[[], None] = nobody
    observer: GradientObserver = UNOBSERVED  # hears what happens to gradients
    # whether a step leaves parameters as they are that no rank has had a gradient for
    skips_unused: bool = False
    # parameters that the next step leaves as they are
    idle: IdleParameters = field(default_factory=IdleParameters)
    # what a plain loss.backward() has left undivided; the engine sets it
    accumulation_divisor: float = 1.0

    def name_of(self, param: nn.Parameter) -> str:
        return self.param_names.get(param, "?")

    def replicas(self, expert_group: str | None) -> dist.Group:
        """Return who averages gradients: of dense parameters (None), or experts of this group."""
        if expert_group is None:
            return self.dp_process_group
        if expert_group not in self.expert_data_parallel_group:
            raise ValueError(
                f"experts of group {expert_group!r}: expert_data_parallel_group knows "
                f"{sorted(self.expert_data_parallel_group)}; make the groups first "
                "(deepspeed.moe.layer.MoE.set_deepspeed_parallelism, or deepspeed.initialize does)"
            )
        return self.expert_data_parallel_group[expert_group]


class GradientReduction:
    """Sums micro-batches and averages over ranks; `groups` are empty without masters."""

    def __init__(self, context: GradientContext, groups: Sequence[ShardedGroup] = ()) -> None:
        self.context = context
        self.groups = groups
        self.accumulator: LocalAccumulator | None = None

    # In the order of a step

    def backward_prologue(self) -> None:
        """Prepare for the first gradient of a backward."""

    def backward_epilogue(self) -> None:
        """Accumulate, before any reduction, what is not accumulated yet."""

    def reduce_gradients(self) -> None:
        """Reduce what this micro-batch has to reduce; every rank issues the same collectives."""
        raise NotImplementedError

    def exit_backward(self) -> None:
        """Forget the state of this backward."""

    def finish_gradients(self) -> None:
        """Return when all reductions are complete."""

    def clear(self) -> None:
        raise NotImplementedError

    def destroy(self) -> None:
        """Remove hooks and let go of buffers."""

    # What others ask

    @property
    def reduces_now(self) -> bool:
        """Whether the micro-batch at hand is one that reduces: the boundary, and at ZeRO-2 each."""
        return self.context.tracker.is_boundary and not self.context.tracker.in_no_sync

    @property
    def has_reduced_gradients(self) -> bool:
        """Whether something was reduced, and can be read, since all gradients were forgotten."""
        raise NotImplementedError

    @property
    def holds_gradients(self) -> bool:
        """Whether reduced gradients lie elsewhere than in `param.grad`."""
        return True

    @property
    def works_during_backward(self) -> bool:
        """Whether something is done with gradients, from hooks, before backward is over."""
        return False

    @property
    def step_divisor(self) -> float:
        """The part of `accumulation_divisor` that is left to be divided by at the step.

        Gradients that live in `param.grad` are divided here: their buffer is averaged again by a
        second backward at the boundary, and a division per average would count twice.
        """
        return 1.0

    def unread_gradients(self) -> list[nn.Parameter]:
        """Return the parameters with a `.grad` that no backward has put there: averaged ones lie
        elsewhere when gradients are finished.
        """
        with torch._C.DisableTorchFunctionSubclass():
            if all(param.grad is None for group in self.groups for param in group.params):
                return []
            return [
                param
                for group in self.groups
                # What has no elements is in no bucket.
                for param, numel in zip(group.params, group.table.numels, strict=True)
                if numel and param.grad is not None
            ]

    def local_sum(self, param: torch.Tensor) -> torch.Tensor | None:
        """Where this rank's sum for `param` lies, if there is one."""
        return param.grad if self.accumulator is None else self.accumulator.sum_of(param)

    def make_gradient(self, param: torch.Tensor) -> torch.Tensor:
        param.grad = torch.zeros_like(param)
        return param.grad

    def hold(self, params: Iterable[nn.Parameter]) -> None:
        """Reduce the gradients of `params` only in `reduce_gradients`: they are not complete when
        their hooks fire. Called on all data-parallel ranks alike, before training.
        """

    def sums_in(self, param: nn.Parameter) -> torch.dtype:
        """The narrowest dtype that a sum of this parameter's gradients passes through."""
        local = param.dtype if self.accumulator is None else self.accumulator.flats[0].dtype
        return max(local, self._travels_in(param, local), key=lambda dtype: torch.finfo(dtype).eps)

    def _travels_in(self, param: nn.Parameter, local: torch.dtype) -> torch.dtype:
        """Return the dtype of this gradient during reduction; `local` is that of its sum here."""
        raise NotImplementedError

    def named_memory(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, group in enumerate(self.groups):
            names = [self.context.name_of(param) for param in group.params]
            yield from group.named_memory(index, names)
            grads = ((name, param.grad) for name, param in zip(names, group.params, strict=True))
            yield from ((f"gradient of {name}", grad) for name, grad in grads if grad is not None)

    # The accumulation window in checkpoints

    @property
    def _sums(self) -> list[torch.Tensor]:
        return [] if self.accumulator is None else self.accumulator.flats

    @property
    def _owns_sums(self) -> bool:
        """Whether the sums of this window are in what this rank owns of each group."""
        return False

    def _marks(self) -> dict[str, bool]:
        """Flags that say how far the gradients of a window are, by the names of files."""
        return {}

    def _set_marks(self, marks: Mapping[str, bool]) -> None:
        """Go on where these flags say."""

    def layout(self) -> str:
        """How gradients lie in this rank's buffers: equal where they lie alike."""
        if not self.groups:
            return ""
        sums = [flat.dtype for flat in self._sums]
        groups = [(group.table, group.shard_rank, group.grad_dtype) for group in self.groups]
        return f"{groups} {sums}"

    def window_state(self) -> dict[str, Any]:
        """Return what was summed since the last step beside `param.grad`: the tensors."""
        if not self.groups:
            return {}
        owned = [group.grad for group in self.groups] if self._owns_sums else []
        return {"marks": self._marks(), "sums": self._sums, "owned": owned}

    @torch.no_grad()
    def load_window_state(self, saved: Mapping[str, Any]) -> None:
        """Go on where `window_state` of an equal run was; all gradients were forgotten."""
        if not self.groups:
            return
        self._set_marks(saved["marks"])
        for flat, value in zip(self._sums, saved["sums"], strict=True):
            flat.copy_(value)
        for group, grad in zip(self.groups if saved["owned"] else [], saved["owned"], strict=True):
            group.grad.copy_(grad)

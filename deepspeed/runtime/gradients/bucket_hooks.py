"""Who is in which bucket, the hooks that see gradients arrive, and what has left already."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.comm.watch import lone_waits
from deepspeed.runtime.gradients.readiness import (
    BucketIndex,
    LateGradientError,
    ReadinessTracker,
    SlotIndex,
)
from deepspeed.runtime.gradients.reduction import GradientContext


class BucketHooks:
    """Hooks of the reductions that send buckets while backward goes on. A slot is a parameter in
    its bucket; `arrived`, the body of the hook, is given the parameter and its slot `i`.
    """

    readiness: ReadinessTracker

    def __init__(self, context: GradientContext, arrived: Callable[..., None]) -> None:
        self._context = context
        self._arrived = arrived
        self.slots: list[tuple[BucketIndex, nn.Parameter]] = []
        self.held: frozenset[nn.Parameter] = frozenset()
        self.reducing = False
        self._handles: list[Any] = []

    def plan(
        self,
        buckets: Sequence[Sequence[nn.Parameter]],
        tracker: type[ReadinessTracker] = ReadinessTracker,
    ) -> None:
        self.slots = [(index, param) for index, params in enumerate(buckets) for param in params]
        self.readiness = tracker([index for index, _ in self.slots], len(buckets))
        self.readiness.held = frozenset(
            slot for slot, (_, param) in enumerate(self.slots) if param in self.held
        )

    def hold(self, params: Iterable[nn.Parameter], is_busy: bool = False) -> None:
        """Have the gradients of `params` count as incomplete until backward is over; `plan` and
        `add` come next. Not in the middle of a window, whose gradients were counted with other
        buckets.
        """
        if is_busy or any(param.grad is not None for _, param in self.slots):
            raise RuntimeError(
                "hold(params) in the middle of an accumulation window: call it before training or "
                "after zero_grad()"
            )
        self.held = self.held.union(params)
        self.remove()

    def add(self) -> None:
        for slot, (_, param) in enumerate(self.slots):
            hook = partial(self._arrived, i=slot)
            self._handles.append(param.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]  # torch's is untyped

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @property
    def are_set(self) -> bool:
        return bool(self._handles)

    def names(self) -> list[str]:
        return [self._context.name_of(param) for _, param in self.slots]

    def mark(self, slot: SlotIndex) -> range:
        """Count a gradient; returns the buckets that are complete with it, in order."""
        return self.readiness.mark(slot) if self.reducing else range(0)

    def end(self) -> None:
        self.reducing = False
        self.readiness.reset()

    def late(self) -> list[BucketIndex]:
        """Return the buckets to send again when all are sent, because gradients arrived after that.

        Whether a bucket is sent again must be the same on all ranks, so ranks agree first. A model
        whose parameters fire once needs no agreement, and pays none after its first backward.
        """
        readiness = self.readiness
        if readiness.learned and not readiness.fires_repeatedly:
            if readiness.late:
                names = self.names()
                late_names = ", ".join(names[slot] for slot in sorted(readiness.late))
                raise LateGradientError(
                    f"{late_names}: another gradient arrived after the bucket had been reduced, "
                    "which did not happen in the first backward. For models whose graph varies so, "
                    "use stage 0 or 1 with zero_optimization.overlap_comm false, or run the first "
                    "backward with the fullest graph"
                )
            return []
        late = [int(slot in readiness.late) for slot in range(len(self.slots))]
        told = [readiness.fired, late]
        agreed = torch.tensor(told, dtype=torch.int32, device=self._context.device)
        with lone_waits.watch.waiting(lambda: "which gradients arrive late"):
            dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=self._context.dp_process_group)
        fired, late = agreed.tolist()
        readiness.learn(fired, late)
        return sorted({readiness.bucket_of[slot] for slot, is_late in enumerate(late) if is_late})


def refuse_unused(unused: Sequence[str], context: GradientContext) -> None:
    """Raise on all ranks if any has parameters without a gradient; all have sent equal buckets."""
    group = context.dp_process_group
    most = torch.tensor(len(unused), device=context.device)
    with lone_waits.watch.waiting(lambda: "what ranks say of parameters without a gradient"):
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    if not most.item():
        return
    told: list[list[str]] = [[] for _ in range(dist.get_world_size(group=group))]
    dist.all_gather_object(told, list(unused), group=group)
    found = "; ".join(
        f"{', '.join(names)} on rank {dist.get_global_rank(group, rank)}"
        for rank, names in enumerate(told)
        if names
    )
    raise RuntimeError(
        f"no gradient reached {found}; zero_optimization.ignore_unused_parameters is false. Set it "
        "to true to count them as zero, or let every trainable parameter take part in the loss"
    )


class StaticSumGuard:
    """Compares each gradient that arrives with the sum that it is about to be added to."""

    def __init__(self, params: Iterable[tuple[nn.Parameter, str]]) -> None:
        self.has_compared = False
        self._handles: list[Any] = [
            param.register_hook(self._hook(param, name))  # type: ignore[no-untyped-call]  # torch's
            for param, name in params
        ]

    def _hook(self, param: nn.Parameter, name: str) -> Callable[[torch.Tensor], None]:
        def arrives(grad: torch.Tensor) -> None:
            total = param.grad
            if total is None:
                return
            self.has_compared = True
            if grad.numel() and grad.data_ptr() == total.data_ptr():
                raise RuntimeError(
                    f"zero_optimization.stage: 1 sums the micro-batches of {name} in its gradient, "
                    "which lies in static memory (a CUDA graph's): this micro-batch has "
                    "overwritten the sum. Use stage 2, or data_types.grad_accum_dtype, which sums "
                    "elsewhere"
                )

        return arrives

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

"""Who is in which bucket, the hooks that see gradients arrive, and what has left in this backward:
`BucketHooks`, a part of the reductions that send buckets while backward goes on.
"""

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
    """See module. A slot is a parameter in its bucket.

    Args:
        context: Of the gradients.
        arrived: Body of the hook: the parameter, and its slot `i`.

    Attributes:
        slots: Bucket and parameter of each slot.
        held: Parameters whose gradients are complete after all hooks have fired.
        reducing: Whether the buckets of the backward at hand leave.
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
        """Count gradients by these buckets from now on."""
        self.slots = [(index, param) for index, params in enumerate(buckets) for param in params]
        self.readiness = tracker([index for index, _ in self.slots], len(buckets))
        self.readiness.held = frozenset(
            slot for slot, (_, param) in enumerate(self.slots) if param in self.held
        )

    def hold(self, params: Iterable[nn.Parameter], is_busy: bool = False) -> None:
        """Have the gradients of `params` count as incomplete until backward is over; `plan` and
        `add` come next.

        Raises:
            RuntimeError: In the middle of an accumulation window, whose gradients were counted with
                other buckets.
        """
        if is_busy or any(param.grad is not None for _, param in self.slots):
            raise RuntimeError(
                "hold(params) in the middle of an accumulation window: call it before training or "
                "after zero_grad()"
            )
        self.held = self.held.union(params)
        self.remove()

    def add(self) -> None:
        """Set a hook on every parameter."""
        for slot, (_, param) in enumerate(self.slots):
            hook = partial(self._arrived, i=slot)
            self._handles.append(param.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]  # torch's is untyped

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @property
    def are_set(self) -> bool:
        """Whether there are hooks."""
        return bool(self._handles)

    def names(self) -> list[str]:
        """The parameter's name of each slot."""
        return [self._context.name_of(param) for _, param in self.slots]

    def mark(self, slot: SlotIndex) -> range:
        """Count a gradient; returns the buckets that are complete with it, in order."""
        return self.readiness.mark(slot) if self.reducing else range(0)

    def end(self) -> None:
        """Forget the backward at hand."""
        self.reducing = False
        self.readiness.reset()

    def late(self) -> list[BucketIndex]:
        """The buckets to send again at the end of a backward whose buckets are all sent, because
        gradients arrived after that; the same ones on all ranks that send them.

        Whether a bucket is sent again must be the same on all ranks, so ranks agree first. A model
        whose parameters fire once needs no agreement, and pays none after its first backward.

        Raises:
            LateGradientError: A parameter has fired more often than in the first backward.
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

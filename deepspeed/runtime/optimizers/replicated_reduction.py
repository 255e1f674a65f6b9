"""When and how flat gradients that every rank keeps whole are averaged: stage 0, and the fp16
optimizers without ZeRO.

On the host, and without `overlap_comm`, all at once when the boundary's backward is over. Otherwise
bucket by bucket from hooks while backward goes on, planned and counted as ZeRO's buckets are. A
bucket is a range of a flat buffer, where the gradients lie already, so nothing is copied together.

[Note: gradients of a bucket on its way]
While a bucket is reduced its parameters have no `.grad`: what autograd would add to it, should a
parameter fire again, would be lost or counted on one rank only. It arrives apart and is sent with
the bucket again when backward is over: the buffer holds the mean of what was sent by then, and
mean(mean(x) + y) = mean(x) + mean(y). Afterwards `.grad` is the view of the buffer again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.accelerator import Stream
from deepspeed.runtime.gradients.buckets import fill_buckets, plan_buckets
from deepspeed.runtime.gradients.late import buckets_to_send_again
from deepspeed.runtime.gradients.readiness import ReadinessTracker
from deepspeed.runtime.gradients.replicated import (
    FlatGradients,
    Flight,
    all_reduce_flat,
    finish_all_reduce,
    start_all_reduce,
)
from deepspeed.runtime.optimizers.step_sequence import StepSequence
from deepspeed.runtime.sharding.fragments import FragmentTable
from deepspeed.runtime.streams import SideStream


class ReplicatedReduction:
    """See module.

    Args:
        owner: Whose gradients; knows the boundary, the rule, the observer.
        gradients: Its flat buffers.
        replicas: For each, the ranks that hold the same parameters.
        bucket_numel: Elements per collective.
        communication_data_type: What travels; None is the gradients' dtype.
        overlap: Send buckets while backward goes on, on devices with streams.
        param_names: Name of each parameter, in model order.
        backward_started: Called by the first hook of a backward that nobody announced.
    """

    def __init__(
        self,
        owner: StepSequence,
        gradients: Sequence[FlatGradients],
        replicas: Sequence[dist.Group],
        *,
        bucket_numel: int,
        communication_data_type: torch.dtype | None,
        overlap: bool = False,
        param_names: Mapping[nn.Parameter, str] | None = None,
        backward_started: Callable[[], None] | None = None,
    ) -> None:
        self._owner = owner
        self._gradients = list(gradients)
        self._replicas = list(replicas)
        self._bucket_numel = bucket_numel
        self._dtype = communication_data_type
        self._names = dict(param_names or {})
        self._backward_started = backward_started
        self._reducing = False
        self._in_flight: deque[Flight] = deque()
        self._held: frozenset[nn.Parameter] = frozenset()
        self._handles: list[Any] = []
        streams = SideStream(overlap)
        # The host computes with the cores that would communicate, and gathers gradients in one
        # go more cheaply than bucket by bucket.
        self._streams = streams if overlap and streams.has_streams else None
        self._plan()

    # Buckets

    def _plan(self) -> None:
        """Plan buckets; those with held parameters are sent last."""
        if self._streams is None:
            return
        known = {param: position for position, param in enumerate(self._names)}
        order = [
            [
                -1 if param in self._held else known.get(param, len(known) + index)
                for index, param in enumerate(gradients.params)
            ]
            for gradients in self._gradients
        ]
        tables = [
            FragmentTable.build([param.numel() for param in gradients.params], 1, 1)
            for gradients in self._gradients
        ]
        buckets = [
            fill_buckets(table.numels, positions, self._bucket_numel)
            for table, positions in zip(tables, order, strict=True)
        ]
        self._plans = plan_buckets(tables, buckets, [0] * len(tables), order)
        self._slots = [
            (bucket, self._gradients[plan.group].params[index])
            for bucket, plan in enumerate(self._plans)
            for index in plan.params
        ]
        self._readiness = ReadinessTracker([bucket for bucket, _ in self._slots], len(self._plans))
        self._readiness.held = frozenset(
            slot for slot, (_, param) in enumerate(self._slots) if param in self._held
        )
        self._producers: list[set[Stream]] = [set() for _ in self._plans]
        if len(self._plans) > 1:
            for slot, (_, param) in enumerate(self._slots):
                handle = param.register_post_accumulate_grad_hook(self._make_hook(slot))
                self._handles.append(handle)

    def hold(self, params: Iterable[nn.Parameter]) -> None:
        """See `StepSequence.hold`.

        Raises:
            RuntimeError: In the middle of an accumulation window.
        """
        if self._streams is None:
            return
        if any(param.grad is not None for _, param in self._slots):
            raise RuntimeError(
                "hold(params) in the middle of an accumulation window: call it before training or "
                "after zero_grad()"
            )
        self._held = self._held.union(params)
        self._remove_hooks()
        self._plan()

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # Backward

    def _make_hook(self, slot: int) -> Callable[[torch.Tensor], None]:
        def on_gradient(param: torch.Tensor) -> None:
            if self._backward_started is not None:
                self._backward_started()
            if self._reducing:
                self._arrived(slot)

        return on_gradient

    def _arrived(self, slot: int) -> None:
        if self._streams is not None:
            # [fix 2] The stream current here, inside the hook, is the one that produced this
            # gradient and on which it was copied into the buffer.
            self._producers[self._slots[slot][0]].add(self._streams.current_stream())
        for bucket in self._readiness.mark(slot):
            self._send(bucket)

    @property
    def works_during_backward(self) -> bool:
        """See `StepSequence.works_during_backward`."""
        return bool(self._handles) or any(gradients.has_hooks for gradients in self._gradients)

    def backward_prologue(self) -> None:
        """Before the first gradient of a backward."""
        self._finish()  # of a backward that raised
        for gradients in self._gradients:
            gradients.take_over()
        self._reducing = self._owner.reduces_now

    def exit_backward(self) -> None:
        """After the reduction: forget the state of this backward."""
        self._reducing = False
        if self._streams is not None:
            self._readiness.reset()

    def reduce(self) -> None:
        """Average all gradients that are not averaged yet; the current stream has them when this
        returns.
        """
        if not self._handles or self._streams is None:
            for gradients in self._gradients:
                gradients.collect()
            flats = [gradients.flat for gradients in self._gradients]
            rule = self._owner.reduce_rule
            all_reduce_flat(flats, self._bucket_numel, rule, self._replicas, self._dtype)
            return
        for bucket in self._readiness.remaining():
            # Of a bucket that is not complete, some gradients may be left from earlier backwards,
            # and the absent ones are zeroed here.
            self._producers[bucket].add(self._streams.current_stream())
            self._send(bucket)
        names = [self._names.get(param, "?") for _, param in self._slots]
        owner = self._owner
        again = buckets_to_send_again(self._readiness, names, owner.device, owner.dp_process_group)
        if again:
            self._send_again(again)
        self._finish()
        for gradients in self._gradients:
            gradients.collect()  # what has no elements is in no bucket

    def _send(self, bucket: int) -> None:
        """Start the all-reduce of a bucket after everything that has written to it."""
        streams, plan = self._streams, self._plans[bucket]
        assert streams is not None, f"bucket {bucket} without overlap"
        gradients = self._gradients[plan.group]
        gradients.collect_some(plan.params)
        streams.wait_for(self._producers[bucket])
        with streams.issue():
            for segment in plan.segments:
                part = gradients.flat[segment.shard_start : segment.shard_start + segment.numel]
                rule, replicas = self._owner.reduce_rule, self._replicas[plan.group]
                self._in_flight.append(start_all_reduce(part, rule, replicas, self._dtype))
            while len(self._in_flight) > 1:  # one is finished while the next travels
                finish_all_reduce(self._in_flight.popleft())
        self._producers[bucket].clear()
        gradients.detach(plan.params)
        self._owner.observer.sent(gradients.params[index] for index in plan.params)

    @torch.no_grad()
    def _send_again(self, buckets: Sequence[int]) -> None:
        """What has arrived apart joins the means; see [Note: gradients of a bucket on its way]."""
        streams = self._streams
        assert streams is not None, f"buckets {list(buckets)} without overlap"
        late = {param: param.grad for _, param in self._slots if param.grad is not None}
        self._finish()
        for bucket in buckets:
            plan = self._plans[bucket]
            gradients = self._gradients[plan.group]
            for index in plan.params:
                if gradients.params[index] in late:
                    gradients.views[index].add_(late[gradients.params[index]])
            self._producers[bucket].add(streams.current_stream())
            self._send(bucket)
        # Only now may `late` go: its memory belongs to the streams that made it.
        self._finish()

    def _finish(self) -> None:
        """Complete what is on its way; `.grad` are the views again."""
        if self._streams is None:
            return
        if self._in_flight:
            with self._streams.issue():
                while self._in_flight:
                    finish_all_reduce(self._in_flight.popleft())
            self._streams.join()
        for gradients in self._gradients:
            gradients.attach()

    # Clearing

    def clear(self) -> None:
        """Forget all gradients."""
        self._finish()
        for gradients in self._gradients:
            gradients.forget()

    def destroy(self) -> None:
        """Remove the hooks, wait for outstanding work, let go of the buffers."""
        self._finish()
        self._remove_hooks()
        if self._streams is not None:
            self._streams.destroy()
        for gradients in self._gradients:
            gradients.destroy()
        self._gradients = []

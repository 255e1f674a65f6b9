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
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.accelerator import Stream
from deepspeed.runtime.gradients.bucket_hooks import BucketHooks
from deepspeed.runtime.gradients.buckets import fill_buckets, plan_buckets
from deepspeed.runtime.gradients.reduction import (
    GradientContext,
    GradientReduction,
    ReductionSettings,
    refused_gradients,
)
from deepspeed.runtime.gradients.replicated import (
    FlatGradients,
    Flight,
    all_reduce_flat,
    finish_all_reduce,
    start_all_reduce,
)
from deepspeed.runtime.sharding.fragments import FragmentTable
from deepspeed.runtime.sharding.group import ShardedGroup
from deepspeed.runtime.streams import SideStream


class Replicated(GradientReduction):
    """Averages flat gradients, each over its `replicas`; see module."""

    def __init__(
        self,
        context: GradientContext,
        gradients: Sequence[FlatGradients],
        replicas: Sequence[dist.Group],
        settings: ReductionSettings,
        groups: Sequence[ShardedGroup] = (),
    ) -> None:
        super().__init__(context, groups)
        self.gradients = list(gradients)
        self._replicas = list(replicas)
        self.settings = settings
        self._in_flight: deque[Flight] = deque()
        self._has_contributions = False  # whether this rank has reduced a gradient of its own
        self._hooks = BucketHooks(context, self._arrived)
        streams = SideStream(settings.overlap_comm)
        # The host computes with the cores that would communicate, and gathers gradients in one
        # go more cheaply than bucket by bucket.
        self._streams = streams if settings.overlap_comm and streams.has_streams else None
        self._plan()

    # Buckets

    def _plan(self) -> None:
        """Plan buckets; those with held parameters are sent last."""
        if self._streams is None:
            return
        known = {param: position for position, param in enumerate(self.context.param_names)}
        order = [
            [
                -1 if param in self._hooks.held else known.get(param, len(known) + index)
                for index, param in enumerate(gradients.params)
            ]
            for gradients in self.gradients
        ]
        sizes = [[param.numel() for param in gradients.params] for gradients in self.gradients]
        tables = [FragmentTable.build(numels, 1, 1) for numels in sizes]
        bucket_size = self.settings.reduce_bucket_size
        ordered = zip(tables, order, strict=True)
        buckets = [fill_buckets(table.numels, places, bucket_size) for table, places in ordered]
        self._plans = plan_buckets(tables, buckets, [0] * len(tables), order)
        self._hooks.plan(
            [[self.gradients[plan.group].params[i] for i in plan.params] for plan in self._plans]
        )
        self._producers: list[set[Stream]] = [set() for _ in self._plans]
        if len(self._plans) > 1:
            self._hooks.add()

    def hold(self, params: Iterable[nn.Parameter]) -> None:
        if self._streams is not None:
            self._hooks.hold(params)
            self._plan()

    # Backward

    def _arrived(self, param: torch.Tensor, i: int) -> None:
        self.context.backward_started()
        if not self._hooks.reducing:
            return
        if self._streams is not None:
            # [fix 2] The stream current here, inside the hook, is the one that produced this
            # gradient and on which it was copied into the buffer.
            self._producers[self._hooks.slots[i][0]].add(self._streams.current_stream())
        for bucket in self._hooks.mark(i):
            self._send(bucket)

    @property
    def works_during_backward(self) -> bool:
        return self._hooks.are_set or any(gradients.has_hooks for gradients in self.gradients)

    def backward_prologue(self) -> None:
        self._finish()  # of a backward that raised
        for gradients in self.gradients:
            gradients.take_over()
        self._hooks.reducing = self.reduces_now

    def exit_backward(self) -> None:
        self._hooks.reducing = False
        if self._streams is not None:
            self._hooks.end()

    def reduce_gradients(self) -> None:
        """Average, at the boundary, all gradients not averaged yet; the current stream has them."""
        if not self.reduces_now:
            return
        self._has_contributions |= self._has_gradients()
        if not self._hooks.are_set or self._streams is None:
            for gradients in self.gradients:
                gradients.collect()
            flats = [gradients.flat for gradients in self.gradients]
            size, dtype = self.settings.reduce_bucket_size, self.settings.communication_data_type
            all_reduce_flat(flats, size, self.context.reduce_rule, self._replicas, dtype)
            return
        for bucket in self._hooks.readiness.remaining():
            # Of a bucket that is not complete, some gradients may be left from earlier backwards,
            # and the absent ones are zeroed here.
            self._producers[bucket].add(self._streams.current_stream())
            self._send(bucket)
        again = self._hooks.late()
        if again:
            self._send_again(again)
        self._finish()
        for gradients in self.gradients:
            gradients.collect()  # what has no elements is in no bucket

    def _has_gradients(self) -> bool:
        return any(param.grad is not None for flat in self.gradients for param in flat.params)

    def finish_gradients(self) -> None:
        """Let the averages be what a script has made of them in `param.grad`."""
        self._take_edits()

    def _take_edits(self) -> None:
        if not self._has_contributions and self._has_gradients():
            self._refuse_own_gradients()
        for gradients in self.gradients:
            self.context.idle.drop(gradients.take_edits())

    def _refuse_own_gradients(self) -> None:
        """Refuse gradients that no backward of this rank has made, after the averaging: each rank
        would step by its own.
        """
        names = [
            self.context.name_of(param)
            for gradients in self.gradients
            for view, param in zip(gradients.views, gradients.params, strict=True)
            if param.grad is not None and param.grad is not view
        ]
        if names:
            raise RuntimeError(refused_gradients(names))

    def _send(self, bucket: int) -> None:
        """Start the all-reduce of a bucket after everything that has written to it."""
        streams, plan = self._streams, self._plans[bucket]
        assert streams is not None, f"bucket {bucket} without overlap"
        gradients = self.gradients[plan.group]
        gradients.collect_some(plan.params)
        streams.wait_for(self._producers[bucket])
        with streams.issue():
            rule, dtype = self.context.reduce_rule, self.settings.communication_data_type
            for segment in plan.segments:
                part = gradients.flat[segment.shard_start : segment.shard_start + segment.numel]
                flight = start_all_reduce(part, rule, self._replicas[plan.group], dtype)
                self._in_flight.append(flight)
            while len(self._in_flight) > 1:  # one is finished while the next travels
                finish_all_reduce(self._in_flight.popleft())
        self._producers[bucket].clear()
        gradients.detach(plan.params)
        self.context.observer.sent(gradients.params[index] for index in plan.params)

    @torch.no_grad()
    def _send_again(self, buckets: Sequence[int]) -> None:
        """Let late gradients join the means; see [Note: gradients of a bucket on its way]."""
        streams = self._streams
        assert streams is not None, f"buckets {list(buckets)} without overlap"
        late = {param: param.grad for _, param in self._hooks.slots if param.grad is not None}
        self._finish()
        for bucket in buckets:
            plan = self._plans[bucket]
            gradients = self.gradients[plan.group]
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
        for gradients in self.gradients:
            gradients.attach()

    # What others ask

    @property
    def has_reduced_gradients(self) -> bool:
        return True

    @property
    def holds_gradients(self) -> bool:
        return False

    @property
    def step_divisor(self) -> float:
        return self.context.accumulation_divisor

    def _travels_in(self, param: nn.Parameter, local: torch.dtype) -> torch.dtype:
        return self.settings.communication_data_type or local

    def load_window_state(self, saved: Mapping[str, Any]) -> None:
        super().load_window_state(saved)
        for gradients in self.gradients:
            gradients.collect_present()

    # Clearing

    def unread_gradients(self) -> list[nn.Parameter]:
        """Return none: what is put in the place of a gradient is taken in."""
        return []

    def clear(self) -> None:
        self._finish()
        self._has_contributions = False
        for gradients in self.gradients:
            gradients.forget()

    def destroy(self) -> None:
        self._finish()
        self._hooks.remove()
        if self._streams is not None:
            self._streams.destroy()
        for gradients in self.gradients:
            gradients.destroy()
        self.gradients = []

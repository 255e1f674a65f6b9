"""ZeRO stages 1 and 2: optimizer state (1) and gradients (2) sharded over the data-parallel ranks.

Both are one path. Gradients stay in `param.grad` until their bucket is sent; a bucket is copied
together, reduced onto the owners of its elements and added into the owned gradient shard. Stage 1
sends at the accumulation boundary, stage 2 in every micro-batch and as soon as a bucket is
complete. With several optimizer instances (`zero_optimizer.py`) a bucket goes on to the owners of
the same shard in the others, in stage 2 in each micro-batch: the owned gradient is then complete
after every backward. To cross once per step use stage 1, or `engine.no_sync()` for all but the
last.

Buckets are static and sent in one order on all ranks (`gradients/buckets.py`); a gradient that a
rank does not have counts as zeros. Every rank owns an equal part of each, so reducing it is one
even reduce-scatter. The fixes of `docs/fixes/` that live here are marked [fix N] at their lines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed._lazy import lazy_attributes
from deepspeed.accelerator import Stream
from deepspeed.comm.parallel_map import OptimizerInstances
from deepspeed.comm.shard_ops import PendingShards, reduce_to_owners
from deepspeed.comm.watch import lone_waits
from deepspeed.runtime.gradients.bucket_buffers import BucketBuffer, BucketBuffers
from deepspeed.runtime.gradients.bucket_hooks import BucketHooks, StaticSumGuard, refuse_unused
from deepspeed.runtime.gradients.buckets import BucketPlan, plan_buckets
from deepspeed.runtime.gradients.canonical import CanonicalSums
from deepspeed.runtime.gradients.local_accumulator import LocalAccumulator
from deepspeed.runtime.gradients.norm import reduce_squared_norm
from deepspeed.runtime.gradients.readiness import LateGradientError, ReadinessTracker
from deepspeed.runtime.gradients.reduce_rule import ReduceFactors
from deepspeed.runtime.gradients.reduction import (
    GradientContext,
    GradientReduction,
    ReductionSettings,
)
from deepspeed.runtime.gradients.sink import DeviceSink, HostSink, Sums
from deepspeed.runtime.optimizers.group_layout import SHARD_ALIGNMENT
from deepspeed.runtime.optimizers.master_weights import MasterWeights
from deepspeed.runtime.optimizers.settings import ShardSettings, StepSettings
from deepspeed.runtime.optimizers.step_sequence import forwarded
from deepspeed.runtime.sharding.group import ShardedGroup
from deepspeed.runtime.streams import SideStream
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.runtime.zero.movable_states import MovableStates
from deepspeed.runtime.zero.sharded_state import ScaledShardFiles
from deepspeed.runtime.zero.zero_optimizer import BucketLayout, ZeROOptimizer, instances_of

# Buckets on their way at once: one is reduced while the next is filled.
MAX_IN_FLIGHT = 2

# Upstream's users look for the estimators here.
_ESTIMATES = "deepspeed.runtime.zero.estimates.stages_1_and_2"
_KINDS = ("", "_all_cold", "_all_live")
__getattr__ = lazy_attributes(
    __name__, {f"estimate_zero2_model_states_mem_needs{kind}": _ESTIMATES for kind in _KINDS}
)


@dataclass
class Reduction:
    """A bucket on its way."""

    index: int
    pending: PendingShards  # the operation that is running
    factors: ReduceFactors  # what its gradients are scaled by
    buffer: BucketBuffer
    is_last: bool  # whether it was sent for the last time before the step
    is_between: bool = False  # whether its all-reduce between instances has begun


@dataclass
class IPGBucket:
    """What has joined one bucket since it was last sent (IPG: independent parameter gradients)."""

    buffer: list[BucketBuffer] = field(default_factory=list)  # payload buffers in use
    params: list[nn.Parameter] = field(default_factory=list)  # parameters of the bucket
    # gradients being copied; referenced until the copy is done
    grads: list[torch.Tensor] = field(default_factory=list)
    elements: int = 0  # elements on their way, absent gradients as zeros
    index: int = 0
    # streams that the gradients were produced on
    copy_streams: set[Stream] = field(default_factory=set)

    def clear(self) -> None:
        """Forget the contributions. The streams too [fix 1]: a stale one would order the next
        reduction after unrelated work.
        """
        self.buffer.clear()
        self.grads.clear()
        self.elements = 0
        self.copy_streams.clear()


class Bucketed(GradientReduction):
    """Reduces gradients bucket by bucket onto the owners of their elements, and adds them to those
    that `masters` own; `layout` says which parameters share one, unless a derived class knows.
    """

    def __init__(
        self,
        context: GradientContext,
        masters: MasterWeights,
        settings: ReductionSettings,
        instances: OptimizerInstances,
        partition_grads: bool = True,
        layout: BucketLayout | None = None,
        local_accumulation_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(context, masters.groups)
        self.settings = settings
        self.instances = instances
        self.partition_gradients = partition_grads
        self.side_stream = SideStream(settings.overlap_comm)
        offload = masters.settings.offload
        sums = CanonicalSums(self._num_leaves) if settings.canonical else Sums()
        early = masters.early
        host = HostSink(sums, offload.buffer_count, early) if offload is not None else None
        self.sink = host or DeviceSink(sums)
        self.buffers = BucketBuffers(context.device, settings.contiguous_gradients)
        self._in_flight: deque[Reduction] = deque()
        self._layout = layout
        self.hooks = BucketHooks(context, self.reduce_ready_partitions_and_remove_grads)
        self._static_sums: StaticSumGuard | None = None
        if local_accumulation_dtype is not None and not partition_grads:
            self.accumulator = LocalAccumulator(masters.groups, local_accumulation_dtype)

    def _num_leaves(self) -> float:
        return self.context.reduce_rule.world * self.context.accumulation_divisor

    def start(self) -> None:
        self._make_buckets()
        self.create_gradient_handling_hooks()
        sums_in_place = not self.partition_gradients and self.accumulator is None
        if self.side_stream.has_streams and sums_in_place:
            named = ((param, self.context.name_of(param)) for _, param in self.hooks.slots)
            self._static_sums = StaticSumGuard(named)

    # Buckets

    def _travels_in(self, param: nn.Parameter, local: torch.dtype) -> torch.dtype:
        return self.settings.travels_in(param)

    def _make_buckets(self) -> None:
        """Plan buckets; those with held parameters are sent last, whatever hooks fire before."""
        # Buckets are sent in one order. A parameter whose gradient is complete after all others
        # counts as registered before them.
        layout, held = self._layout, self.hooks.held
        assert layout is not None, "who has no layout plans otherwise"
        order = []
        for group in self.groups:
            places = zip(group.params, layout.positions(group.params), strict=True)
            order.append([-1 if param in held else place for param, place in places])
        self.plans = plan_buckets(
            [group.table for group in self.groups],
            [layout.buckets(group.params) for group in self.groups],
            [group.shard_rank for group in self.groups],
            order,
            [[self.settings.travels_in(param) for param in group.params] for group in self.groups],
        )
        self._use_buckets(
            [[self.groups[plan.group].params[i] for i in plan.params] for plan in self.plans]
        )

    def _use_buckets(
        self,
        buckets: Sequence[list[nn.Parameter]],
        tracker: type[ReadinessTracker] = ReadinessTracker,
    ) -> None:
        self.ipg_buckets = [IPGBucket(params=own, index=index) for index, own in enumerate(buckets)]
        self.hooks.plan(buckets, tracker)
        self.buffers.plan(self.plans)

    def hold(self, params: Iterable[nn.Parameter]) -> None:
        self.hooks.hold(params, is_busy=bool(self._in_flight) or not self.sink.is_empty)
        self._make_buckets()
        self.create_gradient_handling_hooks()

    # Backward

    def create_gradient_handling_hooks(self) -> None:
        """Hook gradients if buckets are sent while backward goes on. Local accumulation needs the
        whole micro-batch first, so it reduces at the end of backward.
        """
        launches_early = (
            self.partition_gradients or self.settings.overlap_comm
        ) and self.accumulator is None
        if launches_early and len(self.plans) > 1:
            self.hooks.add()

    @property
    def works_during_backward(self) -> bool:
        return self.hooks.are_set

    @property
    def reduces_now(self) -> bool:
        tracker = self.context.tracker
        return (self.partition_gradients or tracker.is_boundary) and not tracker.in_no_sync

    def backward_prologue(self) -> None:
        """Decide once per backward whether hooks reduce."""
        self.hooks.reducing = self.reduces_now

    def reduce_ready_partitions_and_remove_grads(self, param: torch.Tensor, i: int) -> None:
        """Body of the gradient hook of slot `i`."""
        self.context.backward_started()
        if self.side_stream.has_streams:
            # [fix 2] The stream current here, inside the hook, is the one that produced this
            # gradient: autograd runs the hook on the stream of the accumulation node, which need
            # not be the default stream nor the one the optimizer was built on.
            bucket = self.ipg_buckets[self.hooks.slots[i][0]]
            bucket.copy_streams.add(self.side_stream.current_stream())
        # Streams are recorded in every micro-batch: the memory of a sum is that of the first.
        for index in self.hooks.mark(i):
            if not self._sends_whole:
                self.reduce_independent_p_g_buckets_and_remove_grads(index)

    @property
    def _sends_whole(self) -> bool:
        """Whether nothing is sent before backward is over: a leaf of the canonical sum is sent
        once, with what arrives late in it.
        """
        return self.settings.canonical and self.hooks.readiness.may_be_late

    def backward_epilogue(self) -> None:
        """Let local accumulation take this micro-batch in before anything is reduced."""
        if self.accumulator is not None:
            self.accumulator.absorb(1.0 / self.context.accumulation_divisor)

    def reduce_gradients(self) -> None:
        """Send every bucket that this micro-batch has to send and has not sent yet."""
        if not self.reduces_now:
            return
        if self._static_sums is not None and self._static_sums.has_compared:
            # A module whose gradients are static is so from its first backward on.
            self._static_sums.remove()
            self._static_sums = None
        unused = [] if self.settings.ignore_unused_parameters else self._unused_names()
        left, sends_whole = self.hooks.readiness.remaining(), self._sends_whole
        for index in range(len(self.plans)) if sends_whole else left:
            self._send_incomplete(index)
        if not self.settings.ignore_unused_parameters:
            refuse_unused(unused, self.context)
        for index in self.hooks.late() if self.hooks.are_set else ():
            if not sends_whole:
                self._send_late(index)
        self._clear_accumulator()
        # Whatever is called before the step (reading a gradient on one rank, say) then finds all
        # collectives issued already.
        self._reduce_between_instances(0)
        if not self.settings.overlap_comm:
            self._finish_in_flight(0)

    def _send_late(self, index: int) -> None:
        if self.settings.canonical:
            names = ", ".join(map(self.context.name_of, self.ipg_buckets[index].params))
            raise LateGradientError(
                f"reproducibility.world_size_invariant: true with {names}, of which a gradient "
                "arrived after they had been sent: use stage 2, or checkpoints with "
                "use_reentrant=False"
            )
        self.reduce_independent_p_g_buckets_and_remove_grads(index)

    def _send_incomplete(self, index: int) -> None:
        """Send bucket `index`, of whose gradients some may be absent or left from earlier backwards
        (no_sync), whose streams autograd has joined to the one current here.
        """
        streams = self.ipg_buckets[index].copy_streams
        if streams:
            streams.add(self.side_stream.current_stream())
        self.reduce_independent_p_g_buckets_and_remove_grads(index)

    def _clear_accumulator(self) -> None:
        if self.accumulator is not None:
            # The reduction stream copies out of the accumulator; the stream current here was its
            # producer, and waits for the copies already.
            self.accumulator.clear()

    def exit_backward(self) -> None:
        self.hooks.end()

    def _unused_names(self) -> list[str]:
        """Return the parameters without a gradient on this rank. One that was sent from its hook is
        gone by now, but its firing was counted.
        """
        fired = self.hooks.readiness.fired
        return [
            self.context.name_of(param)
            for slot, (_, param) in enumerate(self.hooks.slots)
            if not fired[slot] and self.local_sum(param) is None
        ]

    # Reduction

    def reduce_independent_p_g_buckets_and_remove_grads(self, index: int) -> None:
        """Send bucket `index`: copy gradients together, reduce onto owners, add into the shard."""
        self._finish_in_flight(MAX_IN_FLIGHT - 1)
        bucket = self.ipg_buckets[index]
        grads = [self.local_sum(param) for param in bucket.params]
        bucket.grads = [grad for grad in grads if grad is not None]
        bucket.elements = self.plans[index].numel
        self.average_tensor(index, grads)
        self.context.observer.sent(bucket.params)
        for param in bucket.params:
            param.grad = None
        bucket.clear()

    @torch.no_grad()
    def average_tensor(self, index: int, grads: list[torch.Tensor | None]) -> None:
        """Copy gradients (None where there is none) into bucket `index` and start its reduction, on
        the reduction stream if there is one.
        """
        plan, bucket = self.plans[index], self.ipg_buckets[index]
        # [fix 1] The gradients of one bucket come from as many streams as their hooks ran on.
        # Reading them is safe only after the work of *all* of these streams; the one current now is
        # right only if no hook recorded any.
        self.side_stream.wait_for(bucket.copy_streams or {self.side_stream.current_stream()})
        producers = bucket.copy_streams or {self.side_stream.current_stream()}
        with self.side_stream.issue():
            buffer = self.buffers.take(plan)
            bucket.buffer = [buffer]
            payload = self._fill_buffer(buffer, index, grads)
            # That was the last use of the gradients. Their producers wait for it, so they can be
            # dropped as soon as this is issued, and memory that the next micro-batch writes again
            # (a graph's) is not written before. See [Note: lifetimes across streams].
            self.side_stream.release(producers)
            if plan.used < plan.numel:
                # What the buffer held before would be summed into the shards' padding, which the
                # norm takes in.
                buffer.tensor[plan.used : plan.numel].zero_()
            undivided = self.context.accumulation_divisor if self.accumulator is None else 1.0
            factors = self.context.reduce_rule.factors(undivided, buffer.tensor.dtype)
            if factors.pre != 1.0:
                payload.mul_(factors.pre)
            is_last = self.context.tracker.is_boundary
            pending = self._start_reduction(plan, payload)
            self._in_flight.append(Reduction(index, pending, factors, buffer, is_last))
            if self.settings.overlap_comm:
                # All ranks issue inside(0), inside(1), between(0), inside(2), between(1), ...: a
                # rank only ever waits for what comes earlier in this order, so the two groups'
                # collectives cannot wait for each other in a circle.
                self._reduce_between_instances(1)
            else:
                self._finish_in_flight(0)
        self.side_stream.join_unless_overlapped()

    def _fill_buffer(
        self, buffer: BucketBuffer, index: int, grads: list[torch.Tensor | None]
    ) -> torch.Tensor:
        """Copy the gradients of bucket `index` together; returns the payload."""
        plan = self.plans[index]
        self._fill(buffer.views(index, self.ipg_buckets[index].params, plan.starts), grads)
        return buffer.tensor[: plan.numel]

    @staticmethod
    def _fill(views: list[torch.Tensor], grads: list[torch.Tensor | None]) -> None:
        present = [(view, own) for view, own in zip(views, grads, strict=True) if own is not None]
        if present:
            torch._foreach_copy_([view for view, _ in present], [grad for _, grad in present])
        absent = [view for view, grad in zip(views, grads, strict=True) if grad is None]
        if absent:
            torch._foreach_zero_(absent)

    def _start_reduction(self, plan: BucketPlan, payload: torch.Tensor) -> PendingShards:
        group = self.groups[plan.group]
        if self.settings.reduce_scatter or self.settings.canonical:
            apart = self.settings.canonical
            return reduce_to_owners(payload, group.process_group, async_op=True, apart=apart)
        works = []
        if group.num_shards > 1:
            works.append(dist.all_reduce(payload, group=group.process_group, async_op=True))
        return PendingShards(works, [payload[self._own_part(plan, group)]], keep=payload)

    def _own_part(self, plan: BucketPlan, group: ShardedGroup) -> slice:
        return slice(plan.own_start, plan.own_start + plan.own_numel)

    def _reduce_between_instances(self, limit: int) -> None:
        """Begin the all-reduce between instances of the oldest buckets, until `limit` are left."""
        if self.instances.across is None:
            return
        inside = [reduction for reduction in self._in_flight if not reduction.is_between]
        with self.side_stream.issue():
            for reduction in inside[: max(0, len(inside) - limit)]:
                with self._waiting(reduction):
                    if self.settings.canonical:
                        reduction.pending.gather_over(self.instances.across)
                    else:
                        reduction.pending.sum_over(self.instances.across)
                reduction.is_between = True

    def _finish_in_flight(self, limit: int) -> None:
        """Complete reductions, oldest first, until at most `limit` are on their way.

        With streams it is the reduction stream that waits for a reduction and adds its piece. That
        of the bucket before stands behind the copy of the last one, so the copy of the next waits
        for it, whose buffer it takes, and not for the last.
        """
        self._reduce_between_instances(limit)
        while len(self._in_flight) > limit:
            with self.side_stream.issue():
                self._finish(self._in_flight.popleft())

    def _waiting(self, reduction: Reduction) -> AbstractContextManager[None]:
        """Other ranks have to join it, in the words of `lone_waits`."""
        params = self.ipg_buckets[reduction.index].params
        return lone_waits.watch.waiting(
            lambda: (
                f"the gradients of {self.context.name_of(params[0])}"
                + (f" and {len(params) - 1} more parameters" if len(params) > 1 else "")
            )
        )

    def _finish(self, reduction: Reduction) -> None:
        with self._waiting(reduction):
            pieces = reduction.pending.wait()
        read = self._take_in(reduction, pieces)
        self.buffers.give_back(reduction.buffer, read)

    def _take_in(self, reduction: Reduction, pieces: list[torch.Tensor]) -> Any:
        """Add what was reduced into the owned gradient; returns the sink's event."""
        plan = self.plans[reduction.index]
        group = self.groups[plan.group]
        how = (reduction.factors.post, reduction.is_last)
        return self.sink.add(reduction.index, group, plan.segments, pieces, *how)

    def named_memory(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name also bucket buffers, and gradients on their way into one."""
        used = [(reduction.index, reduction.buffer) for reduction in self._in_flight]
        used += [(bucket.index, buffer) for bucket in self.ipg_buckets for buffer in bucket.buffer]
        for index, buffer in used:
            names = [self.context.name_of(param) for param in self.ipg_buckets[index].params]
            for name, view in self._named_views(buffer, index, names):
                yield f"ipg bucket {index} ({name})", view
        yield from (("ipg bucket buffer", buffer.tensor) for buffer in self.buffers.free)
        yield from super().named_memory()

    def _named_views(
        self, buffer: BucketBuffer, index: int, names: list[str]
    ) -> Iterable[tuple[str, torch.Tensor]]:
        params, starts = self.ipg_buckets[index].params, self.plans[index].starts
        views = buffer.views(index, params, starts)
        return zip(names, views, strict=True)

    def finish_gradients(self) -> None:
        self._finish_in_flight(0)
        self.side_stream.join()
        self.sink.finish()

    @property
    def has_reduced_gradients(self) -> bool:
        return not self.sink.is_empty

    # Clearing and state

    def clear(self) -> None:
        """Forget gradients; `param.grad` is only a way station here."""
        self._finish_in_flight(0)
        for bucket in self.ipg_buckets:
            for param in bucket.params:
                param.grad = None
            bucket.clear()
        self._clear_accumulator()
        self.sink.clear()

    @property
    def _owns_sums(self) -> bool:
        return not self.sink.is_empty

    def layout(self) -> str:
        """Tell buckets too: what was reduced is known by bucket."""
        return f"{super().layout()} {[plan.params for plan in self.plans]}"

    def window_state(self) -> dict[str, Any]:
        self._finish_in_flight(0)
        self.side_stream.join()
        self.sink.settle()
        trees = self.sink.sums.state([group.grad for group in self.groups])
        return {**super().window_state(), "written": sorted(self.sink.written), "trees": trees}

    def load_window_state(self, saved: Mapping[str, Any]) -> None:
        super().load_window_state(saved)
        self.sink.written.update(saved["written"])
        with torch.no_grad():
            self.sink.sums.load_state([group.grad for group in self.groups], saved.get("trees", ()))

    def let_buffers_go(self) -> None:
        self.buffers.free = []

    def destroy(self) -> None:
        self.hooks.remove()
        if self._static_sums is not None:
            self._static_sums.remove()
        self._finish_in_flight(0)
        self.side_stream.destroy()
        self.buffers.free = []


class ZeroMasters(MasterWeights):
    """Masters of which every rank has a shard, on the device or the host."""

    def get_grad_norm_direct(self, group_index: int) -> torch.Tensor:
        """Sum the squares of the owned gradients of one group on the device: fp32, shape `[1]`."""
        return self._squared_norm(group_index, self.device)

    def complete_grad_norm_calculation_for_cpu_offload(self, group_index: int) -> torch.Tensor:
        """Sum them on the host, where they lie, and move one scalar to the model's device."""
        return self._squared_norm(group_index, torch.device("cpu")).to(self.device)

    def scaled_global_norm(self) -> torch.Tensor:
        squares = self._squares.zeros(self.num_norm_groups, self.device)
        for group_index, group in enumerate(self.groups):
            local = (
                self.complete_grad_norm_calculation_for_cpu_offload
                if group.offload
                else self.get_grad_norm_direct
            )
            squares[self._param_group_of(group_index)] += local(group_index).squeeze()
        # [fix 3] One reduction after all groups, of a tensor as long on every rank: ranks may own
        # different numbers of groups (pipeline stages do), and a collective per group would then
        # never match. fp32 whatever the model's dtype.
        return self._norm_of(reduce_squared_norm(squares, self.norm_group))


class BucketNames:
    """What upstream's optimizers of stages 1 to 3 tell of their parts."""

    def __dir__(self) -> list[str]:
        """Leave out `average_tensor`: upstream's suite looks for it here, and replaces it by one
        that walks upstream's own bucket of gradients.
        """
        return [name for name in super().__dir__() if name != "average_tensor"]

    average_tensor = forwarded("reduction", Bucketed.average_tensor)
    reduce_independent_p_g_buckets_and_remove_grads = forwarded(
        "reduction", Bucketed.reduce_independent_p_g_buckets_and_remove_grads
    )
    reduce_ready_partitions_and_remove_grads = forwarded(
        "reduction", Bucketed.reduce_ready_partitions_and_remove_grads
    )
    ipg_buckets: list[IPGBucket] = forwarded("reduction")
    get_grad_norm_direct = forwarded("masters", ZeroMasters.get_grad_norm_direct)
    complete_grad_norm_calculation_for_cpu_offload = forwarded(
        "masters", ZeroMasters.complete_grad_norm_calculation_for_cpu_offload
    )
    offload_states = forwarded("movable", MovableStates.offload_states)
    reload_states = forwarded("movable", MovableStates.reload_states)


class DeepSpeedZeroOptimizer(BucketNames, ZeROOptimizer):
    """ZeRO-1 (`partition_grads=False`) and ZeRO-2 (`partition_grads=True`).

    Args:
        init_optimizer: torch optimizer over the model's parameters.
        param_names: Name of each parameter, in model order.
        steps, shards, reduction: Settings.
        partition_grads: Stage 2.
        local_accumulation_dtype: Sum micro-batches in this dtype before reduction (stage 1 only).
    """

    reduction: Bucketed
    masters: ZeroMasters
    movable: MovableStates

    def __init__(
        self,
        init_optimizer: torch.optim.Optimizer,
        param_names: Mapping[nn.Parameter, str],
        steps: StepSettings,
        shards: ShardSettings,
        reduction: ReductionSettings,
        partition_grads: bool = True,
        local_accumulation_dtype: torch.dtype | None = None,
    ) -> None:
        context, outcomes = steps.context(init_optimizer, param_names), steps.outcomes()
        steps, instances = instances_of(context, steps, shards)
        layout = BucketLayout(context, shards, reduction, instances.inside)
        masters = ZeroMasters(init_optimizer, context, steps, layout)
        made = (context, masters, reduction, instances)
        # The canonical sum is one of micro-batches, whatever the stage.
        each = partition_grads or reduction.canonical
        bucketed = Bucketed(*made, each, layout, local_accumulation_dtype)
        bucketed.start()
        stage = ZeroStageEnum.gradients if partition_grads else ZeroStageEnum.optimizer_states
        files = ScaledShardFiles(masters, instances.across, outcomes, stage)
        movable = MovableStates(masters, bucketed)
        super().__init__(init_optimizer, context, bucketed, masters, files, outcomes, movable)

    create_gradient_handling_hooks = forwarded("reduction", Bucketed.create_gradient_handling_hooks)
    plans: list[BucketPlan] = forwarded("reduction")
    nccl_start_alignment_factor: int = SHARD_ALIGNMENT
    partition_gradients: bool = forwarded("reduction")

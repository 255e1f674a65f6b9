"""ZeRO stages 1 and 2: optimizer state (1) and gradients (2) sharded over the data-parallel ranks.

Both stages are one path. Gradients stay in `param.grad` until their bucket is sent; a bucket is
copied together, reduced onto the owners of its elements and added into the owned gradient shard.
Stage 1 sends at the accumulation boundary, stage 2 in every micro-batch and as soon as a bucket is
complete, so that whole gradients never pile up.

With several optimizer instances (`zero_optimizer.py`) a bucket that is reduced inside the instance
goes on to the owners of the same shard in the other instances. Both belong to every reduction of a
bucket, in stage 2 to that of each micro-batch: the owned gradient is then complete after every
backward, one on the host need not come back, and no more crosses instances than with one instance.
To cross once per step use stage 1, or `engine.no_sync()` for all micro-batches but the last.

Buckets are static and sent in one order on all ranks (`gradients/buckets.py`); a gradient that a
rank does not have counts as zeros. Each bucket is a section of its group's layout, of which every
rank owns an equal part: reducing it is one even reduce-scatter however many ranks there are. The
fixes of `docs/fixes/` that live here are marked [fix N] at their lines.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed._lazy import lazy_attributes
from deepspeed.accelerator import Stream
from deepspeed.checkpoint.constants import LOSS_SCALER, ZERO_STAGE
from deepspeed.comm.shard_ops import PendingShards, reduce_to_owners
from deepspeed.comm.watch import lone_waits
from deepspeed.runtime.fp16.loss_scaler import LossScalerBase
from deepspeed.runtime.gradients.buckets import BucketPlan, fill_buckets, plan_buckets
from deepspeed.runtime.gradients.late import buckets_to_send_again
from deepspeed.runtime.gradients.local_accumulator import LocalAccumulator
from deepspeed.runtime.gradients.norm import reduce_squared_norm
from deepspeed.runtime.gradients.readiness import ReadinessTracker
from deepspeed.runtime.gradients.reduce_rule import ReduceFactors
from deepspeed.runtime.gradients.sequence_parts import has_parts
from deepspeed.runtime.gradients.sink import DeviceSink, HostSink
from deepspeed.runtime.gradients.static_sums import StaticSumGuard
from deepspeed.runtime.streams import SideStream
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.runtime.zero.movable_states import MovableStates
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.sharded_state import load_sharded_state, sharded_state_dict

# Buckets on their way at once: one is reduced while the next is filled.
MAX_IN_FLIGHT = 2

# Upstream's users look for the estimators here.
_ESTIMATES = "deepspeed.runtime.zero.estimates.stages_1_and_2"
_KINDS = ("", "_all_cold", "_all_live")
__getattr__ = lazy_attributes(
    __name__,
    {f"estimate_zero2_model_states_mem_needs{kind}": _ESTIMATES for kind in _KINDS},
)


class BucketBuffer:
    """Payload memory of a bucket, with cached views per plan (making 800 views costs more than
    copying 800 small gradients).
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.tensor = torch.empty(numel, dtype=dtype, device=device)
        # Event after which it may be filled again, if that is not in stream order anyway.
        self.last_read: Any = None
        self._views: dict[int, list[torch.Tensor]] = {}

    def views(self, bucket: IPGBucket, starts: tuple[int, ...]) -> list[torch.Tensor]:
        """Where each parameter of the bucket lies, in its shape."""
        if bucket.index not in self._views:
            self._views[bucket.index] = [
                self.tensor[start : start + param.numel()].view(param.shape)
                for param, start in zip(bucket.params, starts, strict=True)
            ]
        return self._views[bucket.index]


@dataclass
class Reduction:
    """A bucket on its way.

    Attributes:
        index: Which plan.
        pending: The operation that is running.
        factors: What its gradients are scaled by.
        buffer: Its payload.
        is_between: Whether its all-reduce between instances has begun.
    """

    index: int
    pending: PendingShards
    factors: ReduceFactors
    buffer: BucketBuffer
    is_between: bool = False


@dataclass
class IPGBucket:
    """What has joined one bucket since it was last sent (IPG: independent parameter gradients).

    Attributes:
        buffer: Payload buffers in use.
        params: Parameters of the bucket.
        grads: Gradients being copied; referenced until the copy is done.
        elements: Elements on their way, absent gradients as zeros.
        index: Which plan.
        copy_streams: Streams that the gradients were produced on.
    """

    buffer: list[BucketBuffer] = field(default_factory=list)
    params: list[nn.Parameter] = field(default_factory=list)
    grads: list[torch.Tensor] = field(default_factory=list)
    elements: int = 0
    index: int = 0
    copy_streams: set[Stream] = field(default_factory=set)

    def clear(self) -> None:
        """Forget the contributions. The streams too [fix 1]: a stale one would order the next
        reduction after unrelated work.
        """
        self.buffer.clear()
        self.grads.clear()
        self.elements = 0
        self.copy_streams.clear()


class DeepSpeedZeroOptimizer(MovableStates):
    """ZeRO-1 (`partition_grads=False`) and ZeRO-2 (`partition_grads=True`).

    Args:
        init_optimizer: torch optimizer over the model's parameters.
        param_names: Name of each parameter, in model order.
        contiguous_gradients: Reuse bucket buffers instead of allocating one per bucket.
        reduce_bucket_size: Elements per bucket.
        reduce_scatter: Reduce each slice onto its owner; otherwise all-reduce and keep the own
            slice.
        overlap_comm: Communicate beside backward.
        ignore_unused_parameters: Count a parameter without gradient as zero; otherwise raise,
            naming it.
        partition_grads: Stage 2.
        communication_data_type: What travels; None is the model's dtype.
        comm_dtype_of: Per-parameter override of it (`torch_autocast.lower_precision_safe_modules`).
        local_accumulation_dtype: Sum micro-batches in this dtype before reduction (stage 1 only).
        backward_started: Called by the first hook of a backward that nobody announced.
        kwargs: See `ZeROOptimizer`.
    """

    def __init__(
        self,
        init_optimizer: torch.optim.Optimizer,
        param_names: Mapping[nn.Parameter, str],
        *,
        contiguous_gradients: bool = True,
        reduce_bucket_size: int = 500_000_000,
        reduce_scatter: bool = True,
        overlap_comm: bool = False,
        ignore_unused_parameters: bool = True,
        partition_grads: bool = True,
        communication_data_type: torch.dtype | None = None,
        comm_dtype_of: Callable[[nn.Parameter], torch.dtype | None] | None = None,
        local_accumulation_dtype: torch.dtype | None = None,
        backward_started: Callable[[], None] | None = None,
        **kwargs: Any,
    ) -> None:
        # The layout of the groups follows from these, so they come first.
        self.reduce_bucket_size = reduce_bucket_size
        self.communication_data_type = communication_data_type
        self._comm_dtype_of = comm_dtype_of
        super().__init__(init_optimizer, param_names, **kwargs)
        self.partition_gradients = partition_grads
        self.contiguous_gradients = contiguous_gradients
        self.reduce_scatter = reduce_scatter
        self.overlap_comm = overlap_comm
        self.ignore_unused_parameters = ignore_unused_parameters
        self._backward_started = backward_started
        self.side_stream = SideStream(overlap_comm)
        self.sink = (
            HostSink(self.offload.buffer_count) if self.offload is not None else DeviceSink()
        )
        self._in_flight: deque[Reduction] = deque()
        self._make_buckets()
        self.accumulator = None
        if local_accumulation_dtype is not None and not partition_grads:
            self.accumulator = LocalAccumulator(self.groups, local_accumulation_dtype)
        self._hook_handles: list[Any] = []
        self._reducing = False
        self._static_sums: StaticSumGuard | None = None
        if self.side_stream.has_streams and not partition_grads and self.accumulator is None:
            named = ((param, self.param_names.get(param, "?")) for _, param in self._slots)
            self._static_sums = StaticSumGuard(named)
        self.create_gradient_handling_hooks()

    def __dir__(self) -> list[str]:
        """Without `average_tensor`: upstream's suite looks for it here, and replaces it by one that
        walks upstream's own bucket of gradients.
        """
        return [name for name in super().__dir__() if name != "average_tensor"]

    # Buckets

    def get_param_comm_dtype(self, param: nn.Parameter) -> torch.dtype:
        """The dtype that this parameter's gradient travels in."""
        override = self._comm_dtype_of(param) if self._comm_dtype_of is not None else None
        return override or self.communication_data_type or param.dtype

    def _travels_in(self, param: nn.Parameter, local: torch.dtype) -> torch.dtype:
        """See base class."""
        return self.get_param_comm_dtype(param)

    def _fill_buckets(
        self, params: Sequence[nn.Parameter], positions: Sequence[int]
    ) -> list[tuple[int, ...]]:
        """The parameters of each bucket of a group, the one that is complete first at the front."""
        # Those that are complete after all others have buckets of their own: no other waits.
        kinds = [(self.get_param_comm_dtype(param), has_parts(param)) for param in params]
        numels = [param.numel() for param in params]
        return fill_buckets(numels, positions, self.reduce_bucket_size, kinds)

    def _sections(
        self, params: Sequence[nn.Parameter], positions: Sequence[int], num_shards: int
    ) -> Sequence[Sequence[int]] | None:
        """See base class: a section per bucket, in the order of forward. Who owns everything has it
        as files do.
        """
        return self._fill_buckets(params, positions)[::-1] if num_shards > 1 else None

    def _make_buckets(self, held: frozenset[nn.Parameter] = frozenset()) -> None:
        """Plan buckets; those with `held` parameters are sent last, whatever hooks fire before."""
        # Buckets are sent in one order. A parameter whose gradient is complete after all others
        # counts as registered before them.
        order = [
            [
                -1 if param in held else position
                for param, position in zip(group.params, positions, strict=True)
            ]
            for group, positions in zip(self.groups, self.registration, strict=True)
        ]
        self.plans = plan_buckets(
            [group.table for group in self.groups],
            [
                self._fill_buckets(group.params, positions)
                for group, positions in zip(self.groups, self.registration, strict=True)
            ],
            [group.shard_rank for group in self.groups],
            order,
            [[self.get_param_comm_dtype(param) for param in group.params] for group in self.groups],
        )
        self.ipg_buckets = [
            IPGBucket(params=[self.groups[plan.group].params[i] for i in plan.params], index=index)
            for index, plan in enumerate(self.plans)
        ]
        self._slots = [
            (index, param)
            for index, bucket in enumerate(self.ipg_buckets)
            for param in bucket.params
        ]
        self.readiness = ReadinessTracker([index for index, _ in self._slots], len(self.plans))
        self._free_buffers: list[BucketBuffer] = []
        self.readiness.held = frozenset(
            slot for slot, (_, param) in enumerate(self._slots) if param in held
        )

    def hold(self, params: Iterable[nn.Parameter]) -> None:
        """See base class.

        Raises:
            RuntimeError: In the middle of an accumulation window, whose gradients were counted with
                other buckets.
        """
        if (
            self._in_flight
            or not self.sink.is_empty
            or any(param.grad is not None for _, param in self._slots)
        ):
            raise RuntimeError(
                "hold(params) in the middle of an accumulation window: call it before training or "
                "after zero_grad()"
            )
        already = {
            param for slot, (_, param) in enumerate(self._slots) if slot in self.readiness.held
        }
        for handle in self._hook_handles:
            handle.remove()
        self._hook_handles = []
        self._make_buckets(frozenset(already.union(params)))
        self.create_gradient_handling_hooks()

    # Backward

    def create_gradient_handling_hooks(self) -> None:
        """Hooks send buckets while backward goes on; without a bucket to send before its end there
        is nothing to hook.

        Local accumulation needs the whole micro-batch first, so it reduces at the end of backward.
        """
        launches_early = (
            self.partition_gradients or self.overlap_comm
        ) and self.accumulator is None
        if not launches_early or len(self.plans) < 2:
            return
        for slot, (_, param) in enumerate(self._slots):
            self._hook_handles.append(
                param.register_post_accumulate_grad_hook(self._make_hook(slot))
            )

    @property
    def works_during_backward(self) -> bool:
        """See base class."""
        return bool(self._hook_handles)

    def _make_hook(self, slot: int) -> Callable[[torch.Tensor], None]:
        def on_gradient(param: torch.Tensor) -> None:
            self.reduce_ready_partitions_and_remove_grads(param, slot)

        return on_gradient

    @property
    def reduces_now(self) -> bool:
        """See base class."""
        return (
            self.partition_gradients or self.tracker.is_boundary
        ) and not self.tracker.in_no_sync

    def backward_prologue(self) -> None:
        """See base class: decides once per backward whether hooks reduce."""
        super().backward_prologue()
        self._reducing = self.reduces_now

    def reduce_ready_partitions_and_remove_grads(self, param: torch.Tensor, i: int) -> None:
        """Body of the gradient hook of slot `i`."""
        if self._backward_started is not None:
            self._backward_started()
        if self.side_stream.has_streams:
            # [fix 2] The stream current here, inside the hook, is the one that produced this
            # gradient: autograd runs the hook on the stream of the accumulation node, which need
            # not be the default stream nor the one the optimizer was built on.
            self.ipg_buckets[self._slots[i][0]].copy_streams.add(self.side_stream.current_stream())
        # Streams are recorded in every micro-batch: the memory of a sum is that of the first.
        if not self._reducing:
            return
        for index in self.readiness.mark(i):
            self.reduce_independent_p_g_buckets_and_remove_grads(index)

    def backward_epilogue(self) -> None:
        """See base class: local accumulation takes this micro-batch in before anything is
        reduced.
        """
        if self.accumulator is not None:
            self.accumulator.absorb(1.0 / self.accumulation_divisor)

    def reduce_gradients(self) -> None:
        """Send every bucket that this micro-batch has to send and has not sent yet."""
        if not self.reduces_now:
            return
        if self._static_sums is not None and self._static_sums.has_compared:
            # A module whose gradients are static is so from its first backward on.
            self._static_sums.remove()
            self._static_sums = None
        unused = [] if self.ignore_unused_parameters else self._unused_names()
        for index in self.readiness.remaining():
            self._send_incomplete(index)
        if not self.ignore_unused_parameters:
            self._refuse_unused(unused)
        if self._hook_handles:
            self._send_late_gradients()
        self._clear_accumulator()
        # Whatever is called before the step (reading a gradient on one rank, say) then finds all
        # collectives issued already.
        self._reduce_between_instances(0)
        if not self.overlap_comm:
            self._finish_in_flight(0)

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
        """See base class."""
        self._reducing = False
        self.readiness.reset()

    def _unused_names(self) -> list[str]:
        """Parameters without a gradient on this rank. One that was sent from its hook is gone by
        now, but its firing was counted.
        """
        silent = (
            p
            for slot, (_, p) in enumerate(self._slots)
            if not self.readiness.fired[slot] and self._local_sum(p) is None
        )
        return [self.param_names.get(param, "?") for param in silent]

    def _refuse_unused(self, unused: list[str]) -> None:
        """All ranks call it when they have sent the same buckets.

        Raises:
            RuntimeError: On all ranks, if any has parameters without a gradient.
        """
        group = self.dp_process_group
        most = torch.tensor(len(unused), device=self.device)
        with lone_waits.watch.waiting(lambda: "what ranks say of parameters without a gradient"):
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        if not most.item():
            return
        told: list[list[str]] = [[] for _ in range(dist.get_world_size(group=group))]
        dist.all_gather_object(told, unused, group=group)
        found = "; ".join(
            f"{', '.join(names)} on rank {dist.get_global_rank(group, rank)}"
            for rank, names in enumerate(told)
            if names
        )
        raise RuntimeError(
            f"no gradient reached {found}; zero_optimization.ignore_unused_parameters is false. "
            "Set it to true to count them as zero, or let every trainable parameter take part in "
            "the loss"
        )

    def _send_late_gradients(self) -> None:
        """Gradients that arrived after their bucket was sent: see `gradients.late`."""
        names = [self.param_names.get(param, "?") for _, param in self._slots]
        for index in buckets_to_send_again(
            self.readiness, names, self.device, self.dp_process_group
        ):
            self.reduce_independent_p_g_buckets_and_remove_grads(index)

    # Reduction

    def reduce_independent_p_g_buckets_and_remove_grads(self, index: int) -> None:
        """Send bucket `index`: copy its gradients together, reduce onto the owners, add into the
        owned shard.
        """
        self._finish_in_flight(MAX_IN_FLIGHT - 1)
        bucket = self.ipg_buckets[index]
        grads = [self._local_sum(param) for param in bucket.params]
        bucket.grads = [grad for grad in grads if grad is not None]
        bucket.elements = self.plans[index].numel
        self.average_tensor(index, grads)
        self.observer.sent(bucket.params)
        for param in bucket.params:
            param.grad = None
        bucket.clear()

    @torch.no_grad()
    def average_tensor(self, index: int, grads: list[torch.Tensor | None]) -> None:
        """Copy gradients into the bucket and start its reduction, on the reduction stream if there
        is one.

        Args:
            index: Bucket.
            grads: Gradient of each of its parameters, None where there is none.
        """
        plan, bucket = self.plans[index], self.ipg_buckets[index]
        # [fix 1] The gradients of one bucket come from as many streams as their hooks ran on.
        # Reading them is safe only after the work of *all* of these streams; the one current now is
        # right only if no hook recorded any.
        self.side_stream.wait_for(bucket.copy_streams or {self.side_stream.current_stream()})
        producers = bucket.copy_streams or {self.side_stream.current_stream()}
        with self.side_stream.issue():
            buffer = self._acquire_buffer(plan)
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
            undivided = self.accumulation_divisor if self.accumulator is None else 1.0
            factors = self.reduce_rule.factors(undivided, buffer.tensor.dtype)
            if factors.pre != 1.0:
                payload.mul_(factors.pre)
            self._in_flight.append(
                Reduction(index, self._start_reduction(plan, payload), factors, buffer)
            )
            if self.overlap_comm:
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
        self._fill(buffer.views(self.ipg_buckets[index], plan.starts), grads)
        return buffer.tensor[: plan.numel]

    @staticmethod
    def _fill(views: list[torch.Tensor], grads: list[torch.Tensor | None]) -> None:
        present = [
            (view, grad) for view, grad in zip(views, grads, strict=True) if grad is not None
        ]
        if present:
            torch._foreach_copy_([view for view, _ in present], [grad for _, grad in present])
        absent = [view for view, grad in zip(views, grads, strict=True) if grad is None]
        if absent:
            torch._foreach_zero_(absent)

    def _start_reduction(self, plan: BucketPlan, payload: torch.Tensor) -> PendingShards:
        group = self.groups[plan.group]
        if self.reduce_scatter:
            return reduce_to_owners(payload, group.process_group, async_op=True)
        owned = payload[plan.own_start : plan.own_start + plan.own_numel]
        works = (
            []
            if group.num_shards == 1
            else [dist.all_reduce(payload, group=group.process_group, async_op=True)]
        )
        return PendingShards(works, [owned], keep=payload)

    def _reduce_between_instances(self, limit: int) -> None:
        """Begin the all-reduce between instances of the oldest buckets, until at most `limit` are
        without it.
        """
        if self.instances.across is None:
            return
        inside = [reduction for reduction in self._in_flight if not reduction.is_between]
        with self.side_stream.issue():
            for reduction in inside[: max(0, len(inside) - limit)]:
                with self._waiting(reduction):
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
                f"the gradients of {self.param_names.get(params[0], '?')}"
                + (f" and {len(params) - 1} more parameters" if len(params) > 1 else "")
            )
        )

    def _finish(self, reduction: Reduction) -> None:
        with self._waiting(reduction):
            pieces = reduction.pending.wait()
        read = self._take_in(reduction, pieces)
        if self.contiguous_gradients:
            reduction.buffer.last_read = read
            self._free_buffers.append(reduction.buffer)

    def _take_in(self, reduction: Reduction, pieces: list[torch.Tensor]) -> Any:
        """Add what was reduced into the owned gradient; returns the sink's event."""
        plan = self.plans[reduction.index]
        group = self.groups[plan.group]
        return self.sink.add(reduction.index, group, plan.segments, pieces, reduction.factors.post)

    def _acquire_buffer(self, plan: BucketPlan) -> BucketBuffer:
        dtype = plan.kind
        for position, buffer in enumerate(self._free_buffers):
            if buffer.tensor.dtype == dtype and buffer.tensor.numel() >= plan.numel:
                if buffer.last_read is not None:
                    # Its owned part may still be on its way to the host, on another stream.
                    self.side_stream.current_stream().wait_event(buffer.last_read)
                return self._free_buffers.pop(position)
        numel = plan.numel
        if self.contiguous_gradients:
            numel = max(other.numel for other in self.plans if other.kind == dtype)
        return BucketBuffer(numel, dtype, self.device)

    def named_memory(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See base class; also bucket buffers, and gradients on their way into one."""
        used = [(reduction.index, reduction.buffer) for reduction in self._in_flight]
        used += [(bucket.index, buffer) for bucket in self.ipg_buckets for buffer in bucket.buffer]
        for index, buffer in used:
            names = [self.param_names.get(param, "?") for param in self.ipg_buckets[index].params]
            yield from (
                (f"ipg bucket {index} ({name})", view)
                for name, view in self._named_views(buffer, index, names)
            )
        yield from (("ipg bucket buffer", buffer.tensor) for buffer in self._free_buffers)
        yield from super().named_memory()

    def _named_views(
        self, buffer: BucketBuffer, index: int, names: list[str]
    ) -> Iterable[tuple[str, torch.Tensor]]:
        """Where the gradients of bucket `index` lie."""
        views = buffer.views(self.ipg_buckets[index], self.plans[index].starts)
        return zip(names, views, strict=True)

    def finish_gradients(self) -> None:
        """See base class."""
        self._finish_in_flight(0)
        self.side_stream.join()
        self.sink.finish()

    # Norm

    def get_grad_norm_direct(self, group_index: int) -> torch.Tensor:
        """Squared norm of the owned gradients of one group on the device: fp32, shape `[1]`, no
        communication.
        """
        return self._squared_norm(group_index, self.device)

    def complete_grad_norm_calculation_for_cpu_offload(self, group_index: int) -> torch.Tensor:
        """The same where gradients lie on the host: summed there, moved to the model's device as
        one scalar.
        """
        return self._squared_norm(group_index, torch.device("cpu")).to(self.device)

    def scaled_global_norm(self) -> torch.Tensor:
        """See base class."""
        squares = torch.zeros(self.num_norm_groups, dtype=torch.float32, device=self.device)
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

    # Moving state off the device

    def _leave(self, kinds: Iterable[OffloadStateTypeEnum]) -> None:
        """See base class."""
        if OffloadStateTypeEnum.contiguous_grad_buffer in kinds:
            self._free_buffers = []
        if OffloadStateTypeEnum.lp_grads in kinds and not self.has_reduced_gradients:
            for group in self.groups:
                group.drop_grad()
        if OffloadStateTypeEnum.lp_params in kinds:
            self._settle_parameters()

    # Clearing and state

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget every gradient, reduced or not. `param.grad` becomes None either way: it is only a
        way station here.
        """
        self._finish_in_flight(0)
        for bucket in self.ipg_buckets:
            for param in bucket.params:
                param.grad = None
            bucket.clear()
        self._clear_accumulator()
        self.sink.clear()
        super().zero_grad(set_to_none)

    @property
    def has_reduced_gradients(self) -> bool:
        """See `ZeROOptimizer`."""
        return not self.sink.is_empty

    @property
    def _owns_sums(self) -> bool:
        return not self.sink.is_empty

    def gradient_layout(self) -> str:
        """See base class; what was reduced is known by bucket."""
        return f"{super().gradient_layout()} {[plan.params for plan in self.plans]}"

    def window_state(self) -> dict[str, Any]:
        """See base class."""
        self.finish_gradients()
        return {**super().window_state(), "written": sorted(self.sink.written)}

    def load_window_state(self, saved: Mapping[str, Any]) -> None:
        """See base class."""
        super().load_window_state(saved)
        self.sink.written.update(saved["written"])

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the state, in upstream's layout.

        Collective: files have shards cut otherwise than memory, so all data-parallel ranks call it
        (with one bucket per group nothing has to be exchanged).
        """
        state = {
            LOSS_SCALER: self.loss_scaler,
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            ZERO_STAGE: ZeroStageEnum.gradients
            if self.partition_gradients
            else ZeroStageEnum.optimizer_states,
        }
        return {**state, **sharded_state_dict(self, elastic=self.elastic_checkpoint)}

    def load_state_dict(
        self,
        state_dict: dict[str, Any],
        load_optimizer_states: bool = True,
        load_from_fp32_weights: bool = True,
    ) -> None:
        """See base class; the loss scaler too. Collective, as `state_dict` is."""
        load_sharded_state(self, state_dict, load_optimizer_states, load_from_fp32_weights)
        self.loss_scaler = state_dict[LOSS_SCALER]
        self.overflow = bool(state_dict["overflow"])

    def fits(self, saved: Mapping[str, Any]) -> bool:
        """See base class; `BF16_Optimizer`'s files have no loss scaler."""
        return LOSS_SCALER in saved and super().fits(saved)

    def rebuilt_state(
        self, base: dict[str, Any], masters: Sequence[torch.Tensor], scaler: Mapping[str, Any]
    ) -> dict[str, Any]:
        """See base class."""
        state = super().rebuilt_state(base, masters, scaler)
        return {LOSS_SCALER: self._scaler_after(scaler), "overflow": False, **state}

    def _scaler_after(self, scaler: Mapping[str, Any]) -> LossScalerBase:
        """A loss scaler like this one where the saved one was."""
        own = copy.copy(self.loss_scaler)
        own.go_on_from(scaler)
        return own

    def destroy(self) -> None:
        """See base class."""
        for handle in self._hook_handles:
            handle.remove()
        self._hook_handles = []
        if self._static_sums is not None:
            self._static_sums.remove()
        self._finish_in_flight(0)
        self.side_stream.destroy()
        self._free_buffers = []
        super().destroy()

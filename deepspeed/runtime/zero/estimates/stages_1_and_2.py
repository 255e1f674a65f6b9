"""What ZeRO-1 and ZeRO-2 allocate for parameters, gradients and optimizer state, known before.

`plan_model_states` lays out the fragment table and bucket plans of the optimizer and follows a
training step through them; activations are not in it. Upstream's functions
(`estimate_zero2_model_states_mem_needs*`) read it for 16-bit training with Adam.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from deepspeed.comm.watch.operation_log import print_rank_0
from deepspeed.runtime.gradients.buckets import BucketPlan, fill_buckets, plan_buckets
from deepspeed.runtime.gradients.sink import HOST_CHUNK
from deepspeed.runtime.optimizers.group_layout import SHARD_ALIGNMENT
from deepspeed.runtime.sharding.fragments import FragmentTable
from deepspeed.runtime.streams import MAX_KEPT
from deepspeed.runtime.zero.estimates.kept_state import (
    FP32_BYTES,
    FP32_STATE,
    Config,
    KeptState,
    staged,
)
from deepspeed.runtime.zero.stage_1_and_2 import MAX_IN_FLIGHT
from deepspeed.runtime.zero.zero_optimizer import in_memory

GB = 2**30
ADAM_MOMENTS = 2
# The configuration's defaults (`zero_optimization`).
BUCKET_NUMEL = 500_000_000


@dataclass(frozen=True)
class _Settings:
    """What the course of a backward depends on; see `plan_model_states`."""

    stage: int
    model_bytes: int
    overlap_comm: bool
    accumulates: bool
    on_host: bool
    num_ranks: int
    offload: bool


@dataclass(frozen=True)
class ModelStates:
    """Bytes on one rank.

    Attributes:
        params: The flat model-precision buffer.
        masters: Those of the owned shard; 0 where the parameters are their own.
        grads: Gradient of the owned shard, reduced.
        moments: Optimizer state of the owned shard.
        frozen: Parameters that are not trained.
        buffers: Bucket buffers, which stay from step to step.
        reduction: Most that gradients, and what is received, take beside them during a backward.
        building: Most at construction beside the flat buffer: the model's parameters, which move
            there.
        host: What offload has in host memory; with it masters, grads and moments are not on the
            device.
        disk: What it has in files.
    """

    params: int
    masters: int
    grads: int
    moments: int
    frozen: int
    buffers: int
    reduction: int
    building: int
    host: int
    disk: int

    @property
    def step(self) -> int:
        """Peak of a step on the device."""
        sharded = 0 if self.host else self.masters + self.grads + self.moments
        return self.params + self.frozen + self.buffers + sharded + self.reduction

    @property
    def device(self) -> int:
        """Peak on the device: the larger of construction and a step."""
        return max(self.params + self.frozen + self.building, self.step)


def plan_model_states(
    numels: Sequence[int],
    num_ranks: int,
    *,
    stage: int = 2,
    model_bytes: int = 2,
    offload: bool = False,
    moments: int = ADAM_MOMENTS,
    frozen_numel: int = 0,
    reduce_bucket_size: int = BUCKET_NUMEL,
    overlap_comm: bool = False,
    gradient_accumulation_steps: int = 1,
    on_host: bool = False,
    kept: KeptState = FP32_STATE,
) -> ModelStates:
    """Plan one rank of stage 1 or 2, the same for all. Updated parameters are gathered in place.

    Args:
        numels: Elements of each trainable parameter, in model order; they form one optimizer group.
        num_ranks: Ranks that share the state: the data-parallel ranks of an optimizer instance.
        model_bytes: Bytes of a model parameter and of its gradient, 2 or 4.
        moments: Numbers that the optimizer keeps per parameter (Adam: 2, momentum: 1).
        frozen_numel: Elements of parameters that are not trained.
        kept: In how many bytes, and where on the host.
        on_host: Whether the model trains on the CPU, whose backend (gloo) exchanges slices
            pairwise.
    """
    if stage not in (1, 2):
        raise ValueError(
            f"plan_model_states(stage={stage}): this plan is ZeRO-1's and ZeRO-2's; use 1 or 2, or "
            "estimates.replicated.plan_whole_gradients for stage 0"
        )
    model_order = range(len(numels))
    buckets = fill_buckets(numels, model_order, reduce_bucket_size)
    sections = buckets[::-1] if num_ranks > 1 else None
    is_one_piece = len(buckets) < 2 or num_ranks == 1
    file_table = FragmentTable.build(numels, num_ranks, SHARD_ALIGNMENT)
    table = in_memory(file_table, sections or ())
    plans = plan_buckets([table], [buckets], [0], [model_order])
    sums = gradient_accumulation_steps > 1
    settings = _Settings(stage, model_bytes, overlap_comm, sums, on_host, num_ranks, offload)
    # Model and masters in one precision on one device share their memory, if the shard is one piece
    # of the flat buffer.
    aliased = model_bytes == kept.master and not offload and is_one_piece
    shard = table.shard_numel
    largest = 0 if on_host else max((plan.own_numel for plan in plans), default=0)
    buffers = staged(largest, 0 if on_host else shard, model_bytes)
    params = table.padded_numel * model_bytes
    return ModelStates(
        params=params,
        masters=0 if aliased else kept.master * shard,
        grads=kept.grad * shard,
        moments=moments * kept.moment * shard,
        frozen=frozen_numel * model_bytes,
        buffers=model_bytes * _buffers_numel(plans, settings),
        reduction=_reduction_bytes(table, plans, settings),
        building=table.numel * model_bytes,
        host=kept.host(shard, moments) + buffers if offload else 0,
        disk=kept.disk(shard, moments) if offload else 0,
    )


def _buffers_numel(plans: Sequence[BucketPlan], settings: _Settings) -> int:
    """Count elements of all bucket buffers, each made to fit the largest bucket."""
    # The last bucket of a micro-batch is on its way when the next one sends its first.
    sent = len(plans) * (2 if settings.stage == 2 and settings.accumulates else 1)
    return min(MAX_IN_FLIGHT if settings.overlap_comm else 1, sent) * max(
        (plan.numel for plan in plans), default=0
    )


class _Backward:
    """One rank's backward, in bytes beside the bucket buffers: it follows the optimizer step by
    step, and counts the elements of gradients that are there (`live`) and the most bytes so far.
    """

    def __init__(self, settings: _Settings) -> None:
        self._settings = settings
        self._in_flight: deque[BucketPlan] = deque()
        # Pieces that are being copied to the host; see `gradients.sink.HostSink`.
        self._leaving: deque[BucketPlan] = deque(maxlen=MAX_KEPT)
        self.live = 0
        self.peak = 0

    def note(self, extra: int = 0) -> None:
        received = sum(map(self._received_bytes, (*self._in_flight, *self._leaving)))
        self.peak = max(self.peak, self._settings.model_bytes * self.live + received + extra)

    def send(self, plan: BucketPlan) -> None:
        """Reduce a bucket; its gradients are dropped when it was copied together."""
        self.land(MAX_IN_FLIGHT - 1)
        self._in_flight.append(plan)
        self.note()
        if not self._settings.overlap_comm:
            self.land(0)
        self.live -= plan.used

    def land(self, limit: int) -> None:
        """Add what was received, oldest first; see `gradients.sink`. The host widens it first."""
        while len(self._in_flight) > limit:
            settings, plan = self._settings, self._in_flight[0]
            converts = settings.on_host and settings.model_bytes != FP32_BYTES
            widened = max((min(segment.numel, HOST_CHUNK) for segment in plan.segments), default=0)
            self.note(FP32_BYTES * widened * settings.num_ranks if converts else 0)
            self._in_flight.popleft()
            if settings.offload and not settings.on_host:
                self._leaving.append(plan)

    def _received_bytes(self, plan: BucketPlan) -> int:
        """Count what this rank's slice of a bucket is received into (`comm.shard_ops`)."""
        settings, others = self._settings, self._settings.num_ranks - 1
        if settings.on_host:
            return settings.model_bytes * others * plan.own_numel
        received = plan.own_numel if others else 0
        return settings.model_bytes * received


def _reduction_bytes(table: FragmentTable, plans: Sequence[BucketPlan], settings: _Settings) -> int:
    """Find the most bytes beside the bucket buffers at one time of a step's backwards.

    Stage 1 keeps the gradients of earlier micro-batches, to which a new one is added as soon as it
    is there, and reduces the sums in the last backward. Stage 2 reduces in each, and what the first
    has on its way lands in the second.
    """
    backward = _Backward(settings)
    if settings.stage == 1 and settings.accumulates:
        backward.live = table.numel
        backward.note(settings.model_bytes * max(table.numels, default=0))
    for _ in range(2 if settings.stage == 2 and settings.accumulates else 1):
        _run_backward(backward, table, plans, settings)
    backward.land(0)
    return backward.peak


def _run_backward(
    backward: _Backward, table: FragmentTable, plans: Sequence[BucketPlan], settings: _Settings
) -> None:
    """Let gradients appear in reverse model order, and send a bucket when it and all before it are
    complete; the first finds all gradients if no bucket is sent before the end of backward.
    """
    early = (settings.stage == 2 or settings.overlap_comm) and len(plans) > 1
    arrive = not (settings.stage == 1 and settings.accumulates)
    bucket_of = {param: index for index, plan in enumerate(plans) for param in plan.params}
    missing = [set(plan.params) for plan in plans]
    following = 0
    if arrive and not early:
        backward.live += table.numel
        backward.note()
    for param in reversed(range(len(table.numels))):
        if param not in bucket_of:
            continue  # without elements
        if arrive and early:
            backward.live += table.numels[param]
            backward.note()
        missing[bucket_of[param]].discard(param)
        while following < len(plans) and not missing[following]:
            backward.send(plans[following])
            following += 1


# Upstream's names


@dataclass(frozen=True)
class Nodes:
    """Where a model trains, and the margin on the host's number."""

    gpus: int
    count: int
    host_factor: float

    @property
    def num_ranks(self) -> int:
        return self.gpus * self.count

    def host(self, per_rank: int) -> int:
        return int(per_rank * self.gpus * self.host_factor)


class Needs(NamedTuple):
    """Bytes: on the host of a node, on a device, in files of a node."""

    host: int
    device: int
    disk: int


def _needs(
    numels: Sequence[int], frozen: int, nodes: Nodes, offload: bool, kept: KeptState
) -> Needs:
    states = plan_model_states(
        numels, nodes.num_ranks, offload=offload, frozen_numel=frozen, kept=kept
    )
    # Every process of a node builds the whole model in fp32 on the host first; that is gone when
    # the state has been made.
    building = FP32_BYTES * (sum(numels) + frozen)
    host = nodes.host(max(building, states.host))
    return Needs(host, states.device, nodes.gpus * states.disk)


def _unknown_shapes(total_params: int) -> list[int]:
    full, rest = divmod(total_params, BUCKET_NUMEL)
    return [BUCKET_NUMEL] * full + ([rest] if rest else [])


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
    *,
    config: Config | None = None,
) -> tuple[int, int]:
    """Estimate memory of a model trained in 16 bits by Adam with ZeRO-2.

    Args:
        cpu_offload: Whether the optimizer's state is on the host.
        additional_buffer_factor: Margin on the host's number.
        config: A configuration, of which is read in how many bits state is kept, whether
            `offload_optimizer.device` is "nvme", and `speculative_update`.

    Returns:
        Bytes on the host of one node, with the margin, and bytes on each device at its peak,
            without activations.
    """
    nodes = Nodes(num_gpus_per_node, num_nodes, additional_buffer_factor)
    needs = _needs(_unknown_shapes(total_params), 0, nodes, cpu_offload, KeptState.of(config))
    return needs[:2]


def print_needs(model: str, nodes: Nodes, rows: Iterable[tuple[Needs, str]]) -> None:
    """Print upstream's table on rank 0: bytes on a node's host and on each device, and options with
    the bytes of their files.
    """

    def plural(count: int, what: str) -> str:
        return f"{count} {what}" if count == 1 else f"{count} {what}s"

    lines = [
        "Estimated memory needed for params, optim states and gradients for a:",
        f"HW: Setup with {plural(nodes.count, 'node')}, {plural(nodes.gpus, 'GPU')} per node.",
        f"SW: Model with {model}.",
        "  per CPU  |  per GPU |   Options",
    ]
    for (host, device, disk), options in rows:
        in_files = f", in files {disk / GB:.2f}GB" if disk else ""
        lines.append(f"{host / GB:8.2f}GB | {device / GB:6.2f}GB | {options}{in_files}")
    print_rank_0("\n".join(lines))


def _print_table(numels: Sequence[int], frozen: int, nodes: Nodes, config: Config | None) -> None:
    kept, rows = KeptState.of(config), []
    for device in ("nvme", "cpu", "none"):
        there = kept._replace(in_files=device == "nvme")
        needs = _needs(numels, frozen, nodes, device != "none", there)
        rows.append((needs, f"offload_optimizer={device}"))
    model = f"{(sum(numels) + frozen) / 1e6:.0f}M total params"
    print_needs(model, nodes, rows)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
    *,
    config: Config | None = None,
) -> None:
    """Print the estimates of every place of the optimizer's state, for a model of which only the
    size is known; of `config` is read in how many bits state is kept, and `speculative_update`.
    """
    nodes = Nodes(num_gpus_per_node, num_nodes, additional_buffer_factor)
    _print_table(_unknown_shapes(total_params), 0, nodes, config)


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
    *,
    config: Config | None = None,
) -> None:
    """Print the same for a model at hand; parameters that need no gradient have no state."""
    params = list(model.parameters())
    numels = [param.numel() for param in params if param.requires_grad]
    frozen = sum(param.numel() for param in params if not param.requires_grad)
    nodes = Nodes(num_gpus_per_node, num_nodes, additional_buffer_factor)
    _print_table(numels, frozen, nodes, config)

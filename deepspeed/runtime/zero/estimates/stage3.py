"""What stage 3 holds on each rank: the formula of docs/zero3.md for a model's units, and upstream's
functions (`estimate_zero3_model_states_mem_needs*`), for 16-bit training with Adam.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from deepspeed.runtime.sharding.publisher import UPDATE_NUMEL
from deepspeed.runtime.zero.estimates.stages_1_and_2 import (
    ADAM_MOMENTS,
    FP32_BYTES,
    Nodes,
    print_needs,
)
from deepspeed.runtime.zero.gathering.units import (
    GatherSettings,
    choose_persistent,
    fuse,
    plan_units,
)
from deepspeed.utils.tensor_fragment import logical_shape
from deepspeed.utils.z3_leaf_module import z3_leaf_module

MODEL_BYTES = 2
# Whether `offload_param` and `offload_optimizer` are on, in the rows of upstream's table.
OFFLOADS = ((True, True), (False, True), (False, False))


@dataclass(frozen=True)
class ModelShape:
    """Elements that are trained, of the largest `unit`, and that stay whole."""

    trained: int
    unit: int
    persistent: int = 0
    frozen: int = 0

    @classmethod
    def of(cls, model: nn.Module, settings: GatherSettings) -> ModelShape:
        """Measure a model, sharded or not."""

        def numel_of(param: nn.Parameter) -> int:
            return logical_shape(param).numel()

        plans = plan_units(model, z3_leaf_module)
        params = [param for plan in plans for param in plan.own]
        persistent = choose_persistent(
            params, numel_of, settings.param_persistence, settings.model_persistence
        )
        rest = {
            plan: sum(numel_of(param) for param in plan.own if param not in persistent)
            for plan in plans
        }
        fused = fuse(plans, rest.__getitem__, settings.fusion)
        return cls(
            trained=sum(numel_of(param) for param in params if param.requires_grad),
            unit=max((sum(rest[plan] for plan in together) for together in fused), default=0),
            persistent=sum(map(numel_of, persistent)),
            frozen=sum(numel_of(param) for param in params if not param.requires_grad),
        )


@dataclass(frozen=True)
class ShardedStates:
    """Bytes on one rank: a step's peak on the device without activations, and the host's."""

    device: int
    host: int


def plan_sharded_parameters(
    shape: ModelShape,
    num_ranks: int,
    settings: GatherSettings | None = None,
    *,
    model_bytes: int = MODEL_BYTES,
    offload_ratio: float = 0.0,
    moments: int = ADAM_MOMENTS,
    secondary_ranks: int = 1,
) -> ShardedStates:
    """Plan one rank: the sum of the table of docs/zero3.md.

    Args:
        num_ranks: Ranks that share the model; those of one group with `mics_shard_size`.
        settings: When parameters are whole, and whether shards are on the host; None: the defaults.
        model_bytes: Bytes of a parameter of the model, 2 or 4.
        offload_ratio: How much of the optimizer is on the host (`offload_optimizer`).
        moments: fp32 numbers that the optimizer keeps per parameter.
        secondary_ranks: Ranks that keep copies of gathered shards (`zero_hpz_partition_size`).
    """
    settings = settings or GatherSettings()
    own = -(-shape.trained // num_ranks)
    shards = model_bytes * (own + -(-shape.frozen // num_ranks))
    has_masters = model_bytes != FP32_BYTES or settings.loads
    on_host = round(offload_ratio * FP32_BYTES * (2 + moments) * own)
    on_device = round((1.0 - offload_ratio) * FP32_BYTES * (has_masters + 1 + moments) * own)
    sharded = shape.trained + shape.frozen - shape.persistent
    whole = shape.persistent + min(shape.unit + settings.beside(shape.unit), sharded) + shape.unit
    copies = -(-sharded // secondary_ranks) if 1 < secondary_ranks < num_ranks else 0
    # Gradients of a unit, their rows in two reductions, and what comes of these.
    gradients = model_bytes * (3 * shape.unit + -(-2 * shape.unit // num_ranks))
    if offload_ratio:
        gradients += model_bytes * -(-2 * shape.unit // num_ranks)
    elif settings.loads and model_bytes != FP32_BYTES:
        # Rounded shards on their way to the host; two reductions keep their memory.
        rounded = model_bytes * min(own, UPDATE_NUMEL)
        gradients = max(gradients, model_bytes * 2 * shape.unit + rounded)
    device, host = (0, shards) if settings.loads else (shards, 0)
    device += on_device + model_bytes * (whole + copies) + gradients
    return ShardedStates(device=device, host=host + on_host)


# Upstream's names


def _needs(
    shape: ModelShape, nodes: Nodes, offloads: tuple[bool, bool], zero_init: bool
) -> tuple[int, int]:
    settings, ratio = GatherSettings(loads=offloads[0]), float(offloads[1])
    states = plan_sharded_parameters(shape, nodes.num_ranks, settings, offload_ratio=ratio)
    # Without zero.Init every process of a node builds the whole model in fp32 on the host first;
    # that is gone when the state has been made.
    built = shape.unit if zero_init else shape.trained + shape.frozen
    return nodes.host(max(FP32_BYTES * built, states.host)), states.device


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Estimate memory of a model trained in 16 bits by Adam with ZeRO-3.

    Args:
        largest_layer_params: Parameters of the largest unit.
        cpu_offload_params: Whether shards of parameters are on the host; only with `cpu_offload`.
        zero_init: Whether the model is built under `zero.Init`.
        additional_buffer_factor: Margin on the host's number.

    Returns:
        Bytes on the host of one node, with the margin; bytes on each device at its peak, without
            activations; of these, 16-bit parameters and gradients of the largest unit.
    """
    shape = ModelShape(total_params, largest_layer_params)
    offloads = (cpu_offload and cpu_offload_params, cpu_offload)
    nodes = Nodes(num_gpus_per_node, num_nodes, additional_buffer_factor)
    host, device = _needs(shape, nodes, offloads, zero_init)
    return host, device, 2 * MODEL_BYTES * largest_layer_params


def _print_table(shape: ModelShape, nodes: Nodes) -> None:
    rows: Sequence[tuple[int, int, str]] = [
        (
            *_needs(shape, nodes, offloads, zero_init),
            "offload_param={}, offload_optimizer={}, zero_init={}".format(
                *("cpu" if offload else "none" for offload in offloads), int(zero_init)
            ),
        )
        for offloads in OFFLOADS
        for zero_init in (True, False)
    ]
    model = (
        f"{(shape.trained + shape.frozen) / 1e6:.0f}M total params, "
        f"{shape.unit / 1e6:.0f}M largest layer params"
    )
    print_needs(model, nodes, rows)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the estimates of all options, for a model of which only the sizes are known."""
    shape = ModelShape(total_params, largest_layer_params)
    _print_table(shape, Nodes(num_gpus_per_node, num_nodes, additional_buffer_factor))


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the same for a model at hand, with its units, what persists and what is frozen."""
    shape = ModelShape.of(model, GatherSettings())
    _print_table(shape, Nodes(num_gpus_per_node, num_nodes, additional_buffer_factor))

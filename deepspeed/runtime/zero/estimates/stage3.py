"""What stage 3 holds on each rank: the formula of docs/zero3.md for a model's units, and upstream's
functions (`estimate_zero3_model_states_mem_needs*`), for 16-bit training with Adam.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from deepspeed.ops.aio.handle import AsyncIOHandle
from deepspeed.runtime.config_models.zero import DeepSpeedZeroOffloadParamConfig
from deepspeed.runtime.sharding.publisher import UPDATE_NUMEL
from deepspeed.runtime.zero.estimates.kept_state import (
    FP32_BYTES,
    FP32_STATE,
    Config,
    KeptState,
    staged,
)
from deepspeed.runtime.zero.estimates.stages_1_and_2 import ADAM_MOMENTS, Needs, Nodes, print_needs
from deepspeed.runtime.zero.gathering.shard_files import ReadSettings
from deepspeed.runtime.zero.gathering.units import (
    GatherSettings,
    choose_persistent,
    fuse,
    plan_units,
)
from deepspeed.utils.tensor_fragment import logical_shape
from deepspeed.utils.z3_leaf_module import z3_leaf_module

MODEL_BYTES = 2
# Devices of `offload_param` and `offload_optimizer` in the rows of upstream's table.
OFFLOADS = (("nvme", "nvme"), ("cpu", "cpu"), ("none", "nvme"), ("none", "cpu"), ("none", "none"))
_DEFAULTS = DeepSpeedZeroOffloadParamConfig()
# Nothing is read through these.
READS = ReadSettings(AsyncIOHandle, _DEFAULTS.buffer_count, _DEFAULTS.buffer_size, True, 0)


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
    """Bytes on one rank: a step's peak on the device without activations; host and disk."""

    device: int
    host: int
    disk: int


def plan_sharded_parameters(
    shape: ModelShape,
    num_ranks: int,
    settings: GatherSettings | None = None,
    *,
    model_bytes: int = MODEL_BYTES,
    offload_ratio: float = 0.0,
    moments: int = ADAM_MOMENTS,
    secondary_ranks: int = 1,
    kept: KeptState = FP32_STATE,
) -> ShardedStates:
    """Plan one rank: the sum of the table of docs/zero3.md.

    Args:
        num_ranks: Ranks that share the model; those of one group with `mics_shard_size`.
        settings: When parameters are whole, and whether shards are on the host or in files; None:
            the defaults.
        model_bytes: Bytes of a parameter of the model, 2 or 4.
        offload_ratio: How much of the optimizer is on the host (`offload_optimizer`).
        moments: Numbers that the optimizer keeps per parameter.
        secondary_ranks: Ranks that keep copies of gathered shards (`zero_hpz_partition_size`).
        kept: In how many bytes the optimizer's state is kept, and where on the host.
    """
    settings = settings or GatherSettings()
    own = -(-shape.trained // num_ranks)
    shards = model_bytes * (own + -(-shape.frozen // num_ranks))
    has_masters = model_bytes != kept.master or settings.loads
    offloaded = round(offload_ratio * own)
    each = has_masters * kept.master + kept.grad + moments * kept.moment
    on_device = (own - offloaded) * each
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
    device = on_device + model_bytes * (whole + copies) + gradients
    host, disk = kept.host(offloaded, moments), kept.disk(offloaded, moments)
    row, sent = -(-shape.unit // num_ranks), offloaded  # weights, to the device or to files
    if settings.reads is not None:
        disk, sent = disk + shards, own
        part = min(settings.reads.buffer_numel, row)
        host += model_bytes * settings.reads.buffer_count * part
    elif settings.loads:
        host, sent = host + shards, 0
    else:
        device += shards
    host += staged(row if offloaded else 0, sent, model_bytes)
    return ShardedStates(device, host, disk)


# Upstream's names


def _needs(
    shape: ModelShape, nodes: Nodes, offloads: tuple[bool, bool], zero_init: bool, kept: KeptState
) -> Needs:
    reads = READS if offloads[0] and kept.params_in_files else None
    settings, ratio = GatherSettings(loads=offloads[0], reads=reads), float(offloads[1])
    states = plan_sharded_parameters(
        shape, nodes.num_ranks, settings, offload_ratio=ratio, kept=kept
    )
    # Without zero.Init every process of a node builds the whole model in fp32 on the host first;
    # that is gone when the state has been made.
    built = shape.unit if zero_init else shape.trained + shape.frozen
    host = nodes.host(max(FP32_BYTES * built, states.host))
    return Needs(host, states.device, nodes.gpus * states.disk)


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
    *,
    config: Config | None = None,
) -> tuple[int, int, int]:
    """Estimate memory of a model trained in 16 bits by Adam with ZeRO-3.

    Args:
        largest_layer_params: Parameters of the largest unit.
        cpu_offload_params: Whether shards of parameters are on the host; only with `cpu_offload`.
        zero_init: Whether the model is built under `zero.Init`.
        additional_buffer_factor: Margin on the host's number.
        config: A configuration, of which is read in how many bits state is kept, whether a `device`
            of offload is "nvme", and `speculative_update`.

    Returns:
        Bytes on the host of one node, with the margin; bytes on each device at its peak, without
            activations; of these, 16-bit parameters and gradients of the largest unit.
    """
    shape = ModelShape(total_params, largest_layer_params)
    offloads = (cpu_offload and cpu_offload_params, cpu_offload)
    nodes = Nodes(num_gpus_per_node, num_nodes, additional_buffer_factor)
    host, device, _ = _needs(shape, nodes, offloads, zero_init, KeptState.of(config))
    return host, device, 2 * MODEL_BYTES * largest_layer_params


def _print_table(shape: ModelShape, nodes: Nodes, config: Config | None) -> None:
    kept, rows = KeptState.of(config), []
    for params, optimizer in OFFLOADS:
        there = kept._replace(in_files=optimizer == "nvme", params_in_files=params == "nvme")
        offloads = params != "none", optimizer != "none"
        for zero_init in (True, False):
            needs = _needs(shape, nodes, offloads, zero_init, there)
            text = f"offload_param={params}, offload_optimizer={optimizer}"
            rows.append((needs, f"{text}, zero_init={int(zero_init)}"))
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
    *,
    config: Config | None = None,
) -> None:
    """Print the estimates of all options, for a model of which only the sizes are known; of
    `config` is read in how many bits state is kept, and `speculative_update`.
    """
    shape = ModelShape(total_params, largest_layer_params)
    _print_table(shape, Nodes(num_gpus_per_node, num_nodes, additional_buffer_factor), config)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
    *,
    config: Config | None = None,
) -> None:
    """Print the same for a model at hand, with its units, what persists and what is frozen."""
    shape = ModelShape.of(model, GatherSettings())
    _print_table(shape, Nodes(num_gpus_per_node, num_nodes, additional_buffer_factor), config)

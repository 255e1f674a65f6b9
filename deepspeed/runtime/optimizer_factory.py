"""Builds the engine's optimizer: the torch optimizer that the configuration names, and around it
the class that `wrap_optimizer` chooses by stage, model dtype and accumulation dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.ops.host_optimizer import HostOptimizer
from deepspeed.ops.whole_parameters import WholeParameterOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.config_models.arguments import read_argument, read_arguments
from deepspeed.runtime.config_utils import DeepSpeedConfigError, parse_dtype
from deepspeed.runtime.constants import MUON_OPTIMIZER
from deepspeed.runtime.engine_parts.model_setup import model_dtype
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler, LossScalerBase
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.gradients.accumulation import AccumulationTracker
from deepspeed.runtime.gradients.reduce_rule import ReduceRule
from deepspeed.runtime.gradients.reduction import ReductionSettings
from deepspeed.runtime.optimizers.group_layout import SHARD_ALIGNMENT
from deepspeed.runtime.optimizers.on_shards import (
    BY_OWNERS,
    ELEMENTWISE,
    check_spread_experts,
    is_elementwise,
    on_shards,
)
from deepspeed.runtime.optimizers.replicated_optimizer import ReplicatedOptimizer
from deepspeed.runtime.optimizers.settings import ShardSettings, StepSettings
from deepspeed.runtime.optimizers.step_sequence import StepSequence
from deepspeed.runtime.sharding.group import expert_group_of
from deepspeed.runtime.sharding.low_precision import LowPrecision, low_precision_key
from deepspeed.runtime.sharding.model_ranks import ModelRanks
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.runtime.zero.utils import ZeRORuntimeException
from deepspeed.runtime.zero.zero_optimizer import ZeROOptimizer

if TYPE_CHECKING:
    from deepspeed.ops.state_files import StateFiles
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

# Written for flat buffers; all else keeps a master per parameter without ZeRO, as upstream's files.
FLAT_WITHOUT_ZERO = ("FusedAdam", "DeepSpeedCPUAdam", "FusedLion", "DeepSpeedCPULion")

PARAMS = "optimizer.params"  # of the configuration


@dataclass(frozen=True)
class WrapContext:
    """What a wrapper needs to know of the engine."""

    config: DeepSpeedConfig
    param_names: Mapping[nn.Parameter, str]  # name of each parameter, in model order
    tracker: AccumulationTracker
    ranks: ModelRanks  # which ranks hold which parameters
    num_norm_groups: int  # length of the norm's tensor, the same on all ranks that sum it
    model_dtype: torch.dtype
    device: torch.device
    model: nn.Module  # the modules that run
    # tells the engine that a backward began which nobody announced
    backward_started: Callable[[], None]
    comm_dtype_of: Callable[[nn.Parameter], torch.dtype | None] | None = None
    # gathers the model's parameters (stage 3)
    parameter_offload: DeepSpeedZeRoOffload | None = None


def is_zero_supported_optimizer(optimizer: object) -> bool:
    """Whether ZeRO takes it without `zero_allow_untested_optimizer`."""
    return type(optimizer).__name__ in ELEMENTWISE


# The torch optimizer


def check_needs_no_optimizer(config: DeepSpeedConfig) -> None:
    """Refuse stages 1 and 2 without an optimizer: there is nothing to shard."""
    if config.zero_optimization_stage in (1, 2):
        raise DeepSpeedConfigError(
            f"zero stage {int(config.zero_optimization_stage)} requires an optimizer: give "
            "initialize(optimizer=...) or the key 'optimizer' in the configuration, or use stage 0 "
            "or 3 to evaluate"
        )


def parameters_to_train(
    module: nn.Module, given: Iterable[Any] | None, ranks: ModelRanks
) -> list[Any]:
    """Return what the optimizer is made of: the groups given, or one of the parameters given or,
    with None, of those that require a gradient; experts apart.
    """
    if given is None:
        parameters: list[Any] = [param for param in module.parameters() if param.requires_grad]
    else:
        parameters = list(given)
    if ranks.experts and not any(isinstance(group, dict) for group in parameters):
        # optional: only a model with experts needs it
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        return split_params_into_different_moe_groups_for_optimizer({"params": parameters})
    # A pipeline stage without trainable parameters has an optimizer too, which torch makes of a
    # group but not of nothing.
    return parameters or [{"params": []}]


def make_basic_optimizer(
    config: DeepSpeedConfig, client: Any, parameters: Iterable[Any], module: nn.Module
) -> torch.optim.Optimizer:
    """Return the client's optimizer, what its callable makes, or the configuration's.

    Raises:
        DeepSpeedConfigError: The configuration's cannot be made.
        ZeRORuntimeException: The client's is not for the host, where `offload_optimizer` keeps the
            state (`zero_force_ds_cpu_optimizer`).
    """
    if isinstance(client, torch.optim.Optimizer) or hasattr(client, "param_groups"):
        name = type(client).__name__
        forced = config.tree.zero_force_ds_cpu_optimizer
        if _offloads(config) and forced and not name.startswith("DeepSpeedCPU"):
            raise ZeRORuntimeException(
                f"zero_optimization.offload_optimizer with the client optimizer {name}: give "
                "deepspeed.ops.adam.DeepSpeedCPUAdam (or Adagrad, Lion), or set "
                '"zero_force_ds_cpu_optimizer": false'
            )
        basic: torch.optim.Optimizer = client
        return basic
    if callable(client):
        made: torch.optim.Optimizer = client(parameters)
        return made
    return build_basic_optimizer(config, parameters, module)


def separate_experts(basic: torch.optim.Optimizer, config: DeepSpeedConfig) -> None:
    """Take experts out of the client's optimizer groups that have other parameters too, in place:
    flat buffers are reduced over the ranks that hold all of their parameters.

    torch's optimizers keep state by parameter, so they do not notice. A schedule that was made
    before does, with a rate per group: whoever lays out such groups refuses them.
    """
    is_flat = int(config.tree.zero_optimization.stage) > 0 or model_dtype(config) != torch.float32
    scheduled = any("initial_lr" in group for group in basic.param_groups)
    if not is_flat or scheduled or not isinstance(basic, torch.optim.Optimizer):
        return
    # optional: only a model with experts needs it
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    basic.param_groups[:] = [
        part
        for group in basic.param_groups
        for part in (
            split_params_into_different_moe_groups_for_optimizer(group)
            if len({expert_group_of(param) for param in group["params"]}) > 1
            else [group]
        )
    ]


def build_basic_optimizer(
    config: DeepSpeedConfig, parameters: Iterable[Any], module: nn.Module
) -> torch.optim.Optimizer:
    """Build the optimizer of the configuration's `optimizer` block over parameters of `module`."""
    block = config.tree.optimizer
    if block is None:
        raise DeepSpeedConfigError(
            "no optimizer: give initialize(optimizer=...) or the key 'optimizer' in the "
            "configuration"
        )
    params = dict(block.params)
    # One kernel wherever masters lie: torch's fused ones round the end of a slice differently. The
    # copies of a weight that pipeline stages share lie elsewhere on each stage, and would part.
    is_tied = bool(getattr(module, "tied_layers", dict)())
    on_host = _is_on_host() and (config.tree.reproducibility.world_size_invariant or is_tied)
    factory = _optimizer_class(block.type, params, _offloads(config) or on_host)
    arguments = read_arguments(factory, params, PARAMS)
    if block.type.lower() == MUON_OPTIMIZER:
        # startup: only what is named is needed
        from deepspeed.runtime.optimizers.muon_groups import muon_groups

        parameters = muon_groups(module, parameters, config.tree)
    try:
        return factory(parameters, **arguments)
    except (TypeError, ValueError) as error:
        raise DeepSpeedConfigError(
            f"optimizer.type {block.type!r} with {PARAMS} {arguments}: {error}"
        ) from error


def _is_on_host() -> bool:
    return get_accelerator().resolves_data_dependency()


def _offloads(config: DeepSpeedConfig) -> bool:
    offload = config.tree.zero_optimization.offload_optimizer
    return (
        offload is not None
        and offload.device.value != "none"
        and offload.ratio > 0.0
        and config.tree.zero_optimization.stage > 0
    )


def _optimizer_class(
    name: str, params: dict[str, Any], offload: bool
) -> Callable[..., torch.optim.Optimizer]:
    key = name.lower()
    if key in ("adam", "adamw", "fusedadam"):
        return _adam_class(key, params, offload)
    own = _own_optimizers(offload)
    if key in own:
        return own[key]
    for known, cls in vars(torch.optim).items():
        is_class = isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)
        if is_class and known.lower() == key:
            return cls
    raise DeepSpeedConfigError(
        f"optimizer.type: {name!r} is unknown; use Adam, AdamW, "
        f"{', '.join(sorted(n.title() for n in own))} or a class of torch.optim"
    )


def _own_optimizers(offload: bool) -> dict[str, Callable[..., torch.optim.Optimizer]]:
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad  # startup: only what is named is needed
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
    from deepspeed.ops.muon import MuonWithAuxAdam

    return {
        "adagrad": DeepSpeedCPUAdagrad if offload else torch.optim.Adagrad,
        "lamb": FusedLamb,
        "lion": DeepSpeedCPULion if offload else FusedLion,
        "muon": MuonWithAuxAdam,
    }


def _adam_class(
    key: str, params: dict[str, Any], offload: bool
) -> Callable[..., torch.optim.Optimizer]:
    """Choose as upstream does: "Adam" means AdamW unless `adam_w_mode` is false; `torch_adam` asks
    for torch's default kernel.
    """
    from deepspeed.ops.adam import (  # startup: only what is named is needed
        DeepSpeedCPUAdam,
        FusedAdam,
    )

    def switch(name: str, default: bool) -> bool:
        on: bool = read_argument(params.pop(name, default), bool, f"{PARAMS}.{name}")
        return on

    adam_w_mode = switch("adam_w_mode", True) or key == "adamw"
    if switch("torch_adam", False):
        for argument in ("bias_correction", "set_grad_none"):
            if not switch(argument, True):
                raise DeepSpeedConfigError(
                    f"optimizer.params.{argument}: false is not supported with torch_adam; remove "
                    "one of them"
                )
        return torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    if offload:
        params.pop("set_grad_none", None)
        params["adamw_mode"] = adam_w_mode
        return DeepSpeedCPUAdam
    # Honoured anyway: FusedAdam steps fp32 here (parameters or masters), and so are moments.
    params.pop("fp32_optimizer_states", None)
    params["adam_w_mode"] = adam_w_mode
    return FusedAdam


# The wrapper


def wrap_optimizer(basic: torch.optim.Optimizer, context: WrapContext) -> StepSequence:
    """Make the step sequence around `basic`; what is not supported raises DeepSpeedConfigError."""
    tree = context.config.tree
    stage = int(tree.zero_optimization.stage)
    accumulation = parse_dtype(tree.data_types.grad_accum_dtype) or None
    model_dtype = context.model_dtype
    if accumulation == model_dtype and not (stage >= 2 and model_dtype != torch.float32):
        accumulation = None
    _check_accumulation(stage, model_dtype, accumulation)
    # startup: a model on which nobody steps needs no Muon
    from deepspeed.runtime.optimizers.muon_groups import check_whole_parameters

    elementwise = is_elementwise(basic)
    by_owners = type(basic).__name__ in BY_OWNERS
    check_whole_parameters(basic, elementwise, by_owners, context.param_names, context.ranks)
    check_spread_experts(basic, context.param_names)
    # So does the canonical sum: owners are who sum.
    shards_state = stage > 0 or tree.reproducibility.world_size_invariant
    if tree.reproducibility.world_size_invariant:
        _check_canonical(basic, context, accumulation)
    if shards_state:
        zero = tree.zero_optimization
        if zero.save_muon_momentum_buffer_in_memory and _offloads(context.config):
            raise DeepSpeedConfigError(
                "zero_optimization.save_muon_momentum_buffer_in_memory: true with "
                "offload_optimizer, which keeps all optimizer state on the host: remove one of them"
            )
        basic = on_shards(basic, tree, context.param_names, context.ranks)
        _check_partial_offload(basic, context.config)
        _check_files(basic, context.config)
        _check_speculation(basic, context, accumulation)
    if stage not in (1, 2) and tree.zero_optimization.overlap_param_gather:
        raise DeepSpeedConfigError(
            f"zero_optimization.overlap_param_gather: true at stage {stage}, which gathers no "
            "parameters after a step; use stage 1 or 2, or false"
        )
    refuses_unused = not tree.zero_optimization.ignore_unused_parameters
    if stage < 2 and accumulation is not None and refuses_unused:
        raise DeepSpeedConfigError(
            "zero_optimization.ignore_unused_parameters: false with data_types.grad_accum_dtype at "
            "stage 0 or 1 is not supported: the accumulator does not tell an unused parameter from "
            "a zero gradient; use true, or stage 2"
        )
    if refuses_unused and tree.zero_optimization.skip_unused_parameters:
        raise DeepSpeedConfigError(
            "zero_optimization.skip_unused_parameters: true with ignore_unused_parameters: false, "
            "which refuses unused parameters: remove one of them"
        )
    # BF16_Optimizer shards masters at stage 0 too, not for whole-parameter optimizers.
    is_bf16_summed = model_dtype == torch.bfloat16 and accumulation == torch.float32
    _check_low_precision(basic, context.config, elementwise)
    if shards_state or (is_bf16_summed and elementwise):
        return _sharded(basic, context, stage, accumulation)
    names, steps = context.param_names, _steps(context, is_sharded=False)
    reduction = _reduction(context)
    # Without a precision block nobody asked for masters.
    if not (tree.fp16.enabled or tree.bf16.enabled):
        if accumulation is not None:
            raise DeepSpeedConfigError(
                f"data_types.grad_accum_dtype: {accumulation} with {model_dtype} parameters, "
                f"{type(basic).__name__} and no precision block at stage 0 is not supported; "
                'enable "bf16" or "fp16", or leave it out'
            )
        return ReplicatedOptimizer(basic, names, steps, reduction)
    cls = FP16_Optimizer if type(basic).__name__ in FLAT_WITHOUT_ZERO else FP16_UnfusedOptimizer
    return cls(basic, names, steps, reduction, accumulation)


def _check_accumulation(
    stage: int, model_dtype: torch.dtype, accumulation: torch.dtype | None
) -> None:
    supported = (None, torch.float32, model_dtype) if stage >= 2 else (None, torch.float32)
    if accumulation not in supported:
        raise DeepSpeedConfigError(
            f"data_types.grad_accum_dtype: {accumulation} with a {model_dtype} model at ZeRO stage "
            f"{stage} is not supported; use fp32, or leave it out to accumulate in the model's "
            "dtype"
        )


def _check_low_precision(
    basic: torch.optim.Optimizer, config: DeepSpeedConfig, elementwise: bool
) -> None:
    """Refuse what masters in a short type do not go with."""
    tree, key = config.tree, low_precision_key(config.tree)
    if key is None:
        for name in ("bf16_optimizer_states", "stochastic_rounding"):
            if tree.bf16.enabled and getattr(tree.bf16, name):
                raise DeepSpeedConfigError(
                    f"bf16.{name}: true without bf16.bf16_master_weights_and_grads, whose updates "
                    "it is about: set both, or leave it out"
                )
        return
    zero, offload = tree.zero_optimization, tree.zero_optimization.offload_optimizer
    name = type(basic).__name__
    problems = {
        f"zero_optimization.stage: {int(zero.stage)}, which has no masters apart: use stage 1, 2 "
        "or 3": zero.stage < 1,
        f"{name}, which does not update every element by itself: use Adam, AdamW, Adagrad, Lion or "
        "SGD": not elementwise,
        "data_types.grad_accum_dtype: fp32, which is another type for gradients: leave it out": (
            parse_dtype(tree.data_types.grad_accum_dtype) == torch.float32
        ),
        "reproducibility.world_size_invariant: true, whose sums are fp32: leave one of them out": (
            tree.reproducibility.world_size_invariant
        ),
        "zero_optimization.offload_optimizer.ratio below 1.0, where device and host round apart: "
        "use 1.0": _offloads(config) and offload is not None and offload.ratio < 1.0,
        'zero_optimization.offload_optimizer.device: "nvme" and bf16.stochastic_rounding, which '
        'files are not updated with: use "cpu"': (
            _lies_in_files(config) and tree.bf16.enabled and tree.bf16.stochastic_rounding
        ),
    }
    for problem, is_there in problems.items():
        if is_there:
            raise DeepSpeedConfigError(f"{key}: true with {problem}")


def _check_canonical(
    basic: torch.optim.Optimizer, context: WrapContext, accumulation: torch.dtype | None
) -> None:
    """Refuse what depends on the number of ranks, or rounds where the canonical sum does not."""
    tree, ranks = context.config.tree, context.ranks
    fused = [group for group in basic.param_groups if group.get("fused")]
    given = {
        "gradient_allreduce_op": tree.gradient_allreduce_op != "mean",
        "prescale_gradients": tree.prescale_gradients,
        "gradient_predivide_factor": tree.gradient_predivide_factor != 1.0,
        "communication_data_type": tree.communication_data_type is not None,
        "torch_autocast.enabled": context.comm_dtype_of is not None,
        "data_types.grad_accum_dtype": accumulation not in (None, torch.float32),
        "managed_gradient_accumulation": not tree.managed_gradient_accumulation,
        "tensor_parallel, sequence_parallel_size, or experts over ranks": (
            ranks.tensor_group is not None or ranks.experts or ranks.parallel_map.sequence.size > 1
        ),
        f"{type(basic).__name__}(fused=True) on the host": bool(fused) and _is_on_host(),
    }
    for key, is_given in given.items():
        if is_given:
            raise DeepSpeedConfigError(
                f"reproducibility.world_size_invariant: true with {key}, which makes results "
                "depend on the number of ranks: leave one of them out"
            )


def _check_partial_offload(basic: torch.optim.Optimizer, config: DeepSpeedConfig) -> None:
    offload = config.tree.zero_optimization.offload_optimizer
    if offload is None or not _offloads(config) or offload.ratio == 1.0:
        return
    # startup: few runs offload a part
    from deepspeed.runtime.zero.units.partial_offload import has_device_optimizer

    name = type(basic).__name__
    if isinstance(basic, WholeParameterOptimizer) or not has_device_optimizer(basic):
        raise DeepSpeedConfigError(
            f"zero_optimization.offload_optimizer.ratio: {offload.ratio} with {name}, which does "
            "not update one part on the host and another on the device: use 1.0, or Adam, AdamW or "
            "Lion"
        )


def _lies_in_files(config: DeepSpeedConfig) -> bool:
    device = config.tree.zero_optimization.offload_optimizer_device
    return _offloads(config) and device.value == "nvme"


def _check_files(basic: torch.optim.Optimizer, config: DeepSpeedConfig) -> None:
    if _lies_in_files(config) and not isinstance(basic, HostOptimizer):
        raise DeepSpeedConfigError(
            f'zero_optimization.offload_optimizer.device: "nvme" with {type(basic).__name__}, '
            'whose state is not updated piece by piece: use "cpu", or DeepSpeedCPUAdam, '
            "DeepSpeedCPUAdagrad or DeepSpeedCPULion, which Adam, AdamW, Adagrad and Lion become"
        )


def _check_speculation(
    basic: torch.optim.Optimizer, context: WrapContext, accumulation: torch.dtype | None
) -> None:
    tree = context.config.tree
    offload = tree.zero_optimization.offload_optimizer
    if offload is None or not offload.speculative_update:
        return
    is_bf16_summed = context.model_dtype == torch.bfloat16 and accumulation == torch.float32
    problems = {
        'zero_optimization.offload_optimizer.device: "none" or ratio: 0.0, which leave nothing to '
        'the host: use "cpu" and more than 0.0, or leave it out': not _offloads(context.config),
        f"{type(basic).__name__}, whose state is not updated piece by piece: use Adam, AdamW, "
        "Adagrad or Lion": not isinstance(basic, HostOptimizer),
        "data_types.grad_accum_dtype: fp32 at stage 1, which has no gradient on the host before "
        "the step: use stage 2, or leave it out": (
            is_bf16_summed and tree.zero_optimization.stage < 2
        ),
        "bf16.stochastic_rounding: true, which updates all of a master at once: leave one of them "
        "out": tree.bf16.enabled and tree.bf16.stochastic_rounding,
        "reproducibility.world_size_invariant: true, which sums gradients in the step: leave one "
        "of them out": tree.reproducibility.world_size_invariant,
    }
    for problem, is_there in problems.items():
        if is_there:
            raise DeepSpeedConfigError(
                f"zero_optimization.offload_optimizer.speculative_update: true with {problem}"
            )


def _state_files(config: DeepSpeedConfig) -> StateFiles | None:
    offload = config.tree.zero_optimization.offload_optimizer
    if offload is None or not _lies_in_files(config):
        return None
    # startup: few runs keep state in files
    from deepspeed.ops.state_files import StateFiles

    return StateFiles.configured(offload.nvme_path, config.tree.aio)


def _steps(context: WrapContext, is_sharded: bool) -> StepSettings:
    tree, ranks = context.config.tree, context.ranks
    given = "gradient_predivide_factor" in tree.model_fields_set
    # Where a rank has its gradients whole, nobody sums what no other rank has parts of.
    counts_all = ranks.is_whole and not is_sharded
    return StepSettings(
        clip_grad=tree.gradient_clipping,
        tracker=context.tracker,
        reduce_rule=ReduceRule(
            world=ranks.num_replicas,
            prescale=tree.prescale_gradients,
            predivide_factor=tree.gradient_predivide_factor if given else None,
            sum_op=tree.gradient_allreduce_op == "sum",
            divides=not tree.reproducibility.world_size_invariant,
        ),
        loss_scaler=build_loss_scaler(context.config),
        exact_norm=tree.reproducibility.world_size_invariant,
        check_grad_overflow=(
            tree.bf16.check_grad_overflow if context.model_dtype == torch.bfloat16 else True
        ),
        dp_process_group=ranks.replicas,
        expert_data_parallel_group=ranks.experts,
        norm_group=None if counts_all else ranks.norm_group,
        counts_in_norm=(
            None if counts_all else ranks.counts_shard if is_sharded else ranks.counts_replica
        ),
        num_norm_groups=context.num_norm_groups,
        device=context.device,
        allow_empty=ranks.has_parts,
        skips_unused=tree.zero_optimization.skip_unused_parameters,
        backward_started=context.backward_started,
    )


def build_loss_scaler(config: DeepSpeedConfig) -> LossScalerBase:
    """The loss scaler of the `fp16` block; static 1 without fp16."""
    fp16 = config.tree.fp16
    if not fp16.enabled:
        return LossScaler(scale=1.0)
    if fp16.loss_scale:
        return LossScaler(scale=fp16.loss_scale)
    return DynamicLossScaler(**fp16.dynamic_loss_scale_args())


def _reduction(context: WrapContext) -> ReductionSettings:
    zero = context.config.tree.zero_optimization
    return ReductionSettings(
        reduce_bucket_size=zero.reduce_bucket_size,
        communication_data_type=context.config.communication_data_type,
        comm_dtype_of=context.comm_dtype_of,
        overlap_comm=bool(zero.overlap_comm),
        contiguous_gradients=zero.contiguous_gradients,
        reduce_scatter=zero.reduce_scatter,
        ignore_unused_parameters=zero.ignore_unused_parameters,
        canonical=context.config.tree.reproducibility.world_size_invariant,
    )


def _allgather_bucket_size(context: WrapContext) -> int:
    """Return the elements of one gather, which are whole multiples of what shards are made of."""
    zero = context.config.tree.zero_optimization
    size = zero.allgather_bucket_size
    if size % SHARD_ALIGNMENT and context.parameter_offload is None:
        raise DeepSpeedConfigError(
            f"zero_optimization.allgather_bucket_size: {size} with zero_optimization.stage: "
            f"{int(zero.stage)}, whose shards are multiples of {SHARD_ALIGNMENT} elements "
            f"(nccl_start_alignment_factor): use {size - size % SHARD_ALIGNMENT}"
        )
    return size


def _shards(context: WrapContext, accumulation: torch.dtype | None) -> ShardSettings:
    tree = context.config.tree
    zero, low_precision = tree.zero_optimization, LowPrecision.of(tree)
    short = None if low_precision is None else context.model_dtype
    return ShardSettings(
        instances=context.ranks.parallel_map.optimizer_instances(zero.num_optimizer_instances),
        master_dtype=short or torch.float32,
        low_precision=low_precision,
        grad_dtype=accumulation or short or torch.float32,
        offload=zero.offload_optimizer if _offloads(context.config) else None,
        files=_state_files(context.config),
        round_robin=zero.round_robin_gradients and context.parameter_offload is None,
        allgather_bucket_size=_allgather_bucket_size(context),
        allgather_partitions=zero.allgather_partitions,
        gather_beside=context.model if zero.overlap_param_gather else None,
        elastic_checkpoint=zero.elastic_checkpoint,
    )


def _sharded(
    basic: torch.optim.Optimizer, context: WrapContext, stage: int, accumulation: torch.dtype | None
) -> ZeROOptimizer:
    shards, reduction = _shards(context, accumulation), _reduction(context)
    names, steps = context.param_names, _steps(context, is_sharded=True)
    is_summed_here = stage < 2 and not reduction.canonical
    if context.model_dtype == torch.bfloat16 and accumulation == torch.float32 and is_summed_here:
        immediate = context.config.tree.bf16.immediate_grad_update
        return BF16_Optimizer(basic, names, steps, shards, reduction, immediate)
    if context.parameter_offload is not None:
        # startup: only stage 3 needs it
        from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

        offload = context.parameter_offload
        return DeepSpeedZeroOptimizer_Stage3(basic, names, steps, shards, reduction, offload)
    # Stage 1 sums micro-batches before the reduction, stage 2 after it, in the owned shard.
    local = accumulation if stage == 1 and is_summed_here else None
    return DeepSpeedZeroOptimizer(basic, names, steps, shards, reduction, stage == 2, local)

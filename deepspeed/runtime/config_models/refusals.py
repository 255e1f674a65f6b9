"""What this release does not honour, as data: refused values, and keys without effect.

When a feature arrives, its rows are deleted here and nothing else changes. ``reader`` has checked
types before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from pydantic import BaseModel

from deepspeed.runtime.config_models.training import TrainingConfig
from deepspeed.runtime.config_utils import DeepSpeedConfigError
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum


class Refusal(NamedTuple):
    """A value that is refused: where, when, and what to do instead."""

    path: str
    when: Callable[[Any], bool]
    remedy: str


class Inert(NamedTuple):
    """Keys that change nothing while ``without`` is not used; set to another value they are named
    in one warning.
    """

    path: str
    without: str


LATER = "comes in a later release"
LATER_MANY = "come in a later release"
OUT = "is out of scope"
ONEBIT = ("onebitadam", "onebitlamb", "zerooneadam")
MUP = ("muadam", "muadamw", "musgd")
STAGE3_KEYS = (
    "sub_group_size",
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "model_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
    "gather_16bit_weights_on_model_save",
    "module_granularity_threshold",
    "use_all_reduce_for_fetch_params",
    "allgather_sequential",
    "mics_hierarchical_params_gather",
    "memory_efficient_linear",
    "pipeline_loading_checkpoint",
    "override_module_apply",
    "log_trace_cache_warnings",
    "enable_sanity_checks",
    "save_muon_momentum_buffer_in_memory",
    "leaf_module",
)


def _on(value: Any) -> bool:
    return bool(value)


def _given(value: Any) -> bool:
    return value is not None


def _above_one(value: Any) -> bool:
    return value is not None and value > 1


def _enabled_somewhere(value: Any) -> bool:
    """Whether a free-form block switches anything on."""
    if not isinstance(value, dict):
        return False
    return any(
        _enabled_somewhere(v) or (isinstance(v, bool) and v and key == "enabled")
        for key, v in value.items()
    )


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "zero_optimization.stage",
        lambda v: v == ZeroStageEnum.weights,
        f"ZeRO-3 {LATER}; use stage 0, 1 or 2",
    ),
    Refusal(
        "zero_optimization.offload_param.device",
        lambda v: v not in (None, OffloadDeviceEnum.none),
        f'parameter offload needs ZeRO-3, which {LATER}; use "none"',
    ),
    Refusal(
        "zero_optimization.offload_optimizer.device",
        lambda v: v == OffloadDeviceEnum.nvme,
        f'NVMe offload {LATER}; use "cpu"',
    ),
    Refusal(
        "zero_optimization.offload_optimizer.super_offload", _on, f"SuperOffload {LATER}; use false"
    ),
    Refusal(
        "zero_optimization.offload_optimizer.ratio",
        lambda v: v not in (None, 1.0),
        f"partial offload {LATER}; use 1.0",
    ),
    Refusal("zero_optimization.zenflow", _given, f"ZenFlow {LATER}; remove the block"),
    Refusal(
        "zero_optimization.legacy_stage1", _on, "there is one implementation of stage 1; use false"
    ),
    Refusal(
        "zero_optimization.zero_hpz_partition_size",
        _above_one,
        f"hpZ needs ZeRO-3, which {LATER}; use 1",
    ),
    Refusal(
        "zero_optimization.zero_quantized_weights",
        _on,
        f"it needs ZeRO-3, which {LATER}; use false",
    ),
    Refusal(
        "zero_optimization.zero_quantized_nontrainable_weights",
        _on,
        f"it needs ZeRO-3, which {LATER}; use false",
    ),
    Refusal(
        "zero_optimization.zero_quantized_gradients",
        _on,
        f"it needs ZeRO-3, which {LATER}; use false",
    ),
    Refusal(
        "zero_optimization.zeropp_loco_param",
        _given,
        f"it needs quantized gradients, which {LATER_MANY}; remove the key",
    ),
    Refusal(
        "zero_optimization.mics_shard_size",
        lambda v: v > 0,
        f"MiCS needs ZeRO-3, which {LATER}; use -1",
    ),
    Refusal(
        "optimizer.type",
        lambda v: str(v).lower() in ONEBIT,
        f'1-bit optimizers {LATER_MANY}; use "Adam" or "Lamb"',
    ),
    Refusal(
        "optimizer.type",
        lambda v: str(v).lower() in MUP,
        'pass the muP optimizer of package "mup" as optimizer=',
    ),
    Refusal("optimizer.legacy_fusion", _on, "there is one fused optimizer; use false"),
    Refusal(
        "optimizer.params.max_grad_norm",
        _on,
        'it is no optimizer parameter; set "gradient_clipping"',
    ),
    Refusal(
        "fp16.fp16_master_weights_and_grads", _on, f"fp16 master weights {LATER_MANY}; use false"
    ),
    Refusal(
        "bf16.bf16_master_weights_and_grads", _on, f"bf16 master weights {LATER_MANY}; use false"
    ),
    Refusal("bf16.bf16_optimizer_states", _on, f"bf16 optimizer state {LATER}; use false"),
    Refusal("data_types.param_dtype", _given, f'it {LATER}; enable "fp16" or "bf16" instead'),
    Refusal("data_types.buffer_dtype", _given, f'it {LATER}; enable "fp16" or "bf16" instead'),
    Refusal(
        "amp.enabled", _on, 'Apex AMP is not supported; use "fp16", "bf16" or "torch_autocast"'
    ),
    Refusal(
        "msamp.enabled", _on, 'MS-AMP is not supported; use "fp16", "bf16" or "torch_autocast"'
    ),
    Refusal(
        "sparse_gradients", _on, f"sparse gradients {LATER_MANY}; use false and dense embeddings"
    ),
    Refusal(
        "disable_allgather",
        _on,
        'use false; "zero_optimization.allgather_partitions": false broadcasts',
    ),
    Refusal("graph_harvesting", _on, f"it {LATER}; use false"),
    Refusal("data_efficiency.enabled", _on, f"data efficiency {LATER}; use false"),
    Refusal("curriculum_learning.enabled", _on, f"curriculum learning {LATER}; use false"),
    Refusal(
        "checkpoint.writer.type",
        lambda v: v == "MOCK",
        'it writes nothing that could be loaded; use "torch", "fast" or "dcp"',
    ),
    Refusal(
        "checkpoint.writer.data_parallel",
        _given,
        "every rank writes files of its own, and ranks of a pipeline stage share its layers by "
        "checkpoint.parallel_write; remove the key",
    ),
    Refusal("checkpoint.writer.io_multiplier", _above_one, "a byte is written once; use 1"),
    Refusal("nebula.enabled", _on, "Nebula is not supported; use false and save to a file system"),
    Refusal(
        "datastates_ckpt.enabled",
        _on,
        "DataStates is not supported; use false and save to a file system",
    ),
    Refusal(
        "pipeline.partition",
        lambda v: v != "best",
        "give it to PipelineModule(partition_method=...), which splits the layers",
    ),
    Refusal(
        "pipeline.seed_layers",
        _on,
        "give it to PipelineModule(seed_layers=True), which builds the layers",
    ),
    Refusal("tensor_parallel.autotp_size", _above_one, f"tensor parallelism {LATER}; use 0 or 1"),
    Refusal(
        "tensor_parallel.tensor_parallel.tp_size", _above_one, f"tensor parallelism {LATER}; use 1"
    ),
    Refusal("expert_parallel.enabled", _on, f"expert parallelism {LATER}; use false"),
    Refusal(
        "compile.deepcompile",
        _on,
        f"DeepCompile {LATER}; use false, and engine.compile() for torch.compile",
    ),
    Refusal("hybrid_engine.enabled", _on, f"inference {OUT}; use false"),
    Refusal("autotuning.enabled", _on, f"autotuning {OUT}; use false"),
    Refusal("progressive_layer_drop.enabled", _on, f"it {LATER}; use false"),
    Refusal("eigenvalue.enabled", _on, f"quantized training {OUT}; use false"),
    Refusal("quantize_training.enabled", _on, f"quantized training {OUT}; use false"),
    Refusal("compression_training", _enabled_somewhere, f"compression {OUT}; remove the block"),
    Refusal("weight_quantization", _on, f"weight quantization {OUT}; remove the block"),
    Refusal("sparse_attention", _on, f"sparse attention {OUT}; remove the block"),
)

INERT: tuple[Inert, ...] = (
    *(Inert(f"zero_optimization.{key}", "ZeRO stage 3") for key in STAGE3_KEYS),
    Inert("zero_optimization.use_multi_rank_bucket_allreduce", "several collectives per bucket"),
    Inert("zero_optimization.offload_optimizer.nvme_path", "NVMe offload"),
    Inert("zero_optimization.offload_optimizer.pipeline_read", "NVMe offload"),
    Inert("zero_optimization.offload_optimizer.pipeline_write", "NVMe offload"),
    Inert("zero_optimization.offload_optimizer.fast_init", "NVMe offload"),
    Inert("zero_optimization.offload_optimizer.cpuadam_cores_perc", "SuperOffload"),
    Inert("elasticity.min_time", "a resource scheduler that reads it"),
    Inert("inference", "the inference engine"),
)


def value_at(tree: BaseModel, path: str) -> Any:
    """Return the value at a dotted path of field names, or None below a block that is absent."""
    value: Any = tree
    for name in path.split("."):
        if value is None:
            return None
        value = value.get(name) if isinstance(value, dict) else getattr(value, name)
    return value


def refusals_of(tree: TrainingConfig) -> Iterator[str]:
    """Yield one line per refused value: key, value, remedy."""
    for refusal in REFUSALS:
        value = value_at(tree, refusal.path)
        if value is not None and refusal.when(value):
            shown = getattr(value, "value", value)
            yield f"{refusal.path}: {shown!r} is not supported: {refusal.remedy}"


def inert_keys_of(tree: TrainingConfig) -> Iterator[str]:
    """Yield ``key=value (has no effect without ...)`` for each key that was changed from its
    default in vain.
    """
    for inert in INERT:
        block_path, _, name = inert.path.rpartition(".")
        block = value_at(tree, block_path) if block_path else tree
        if block is None or name not in block.model_fields_set:
            continue
        value = getattr(block, name)
        if value != type(block).model_fields[name].get_default(call_default_factory=True):
            yield f"{inert.path}={value!r} (has no effect without {inert.without})"
    offload = tree.zero_optimization.offload_optimizer
    if (
        offload
        and offload.device != OffloadDeviceEnum.none
        and tree.zero_optimization.stage == ZeroStageEnum.disabled
    ):
        yield (
            f"zero_optimization.offload_optimizer.device={offload.device.value!r} "
            "(has no effect at stage 0)"
        )


def refuse_unsupported(tree: TrainingConfig) -> None:
    """Raise for everything in the configuration that this release does not honour.

    Raises:
        DeepSpeedConfigError: one line per refused value.
    """
    lines = list(refusals_of(tree))
    if lines:
        raise DeepSpeedConfigError("\n".join(lines))

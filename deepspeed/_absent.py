"""What this release does not have, and what to say when a script asks for it."""

from __future__ import annotations

import re
from typing import NamedTuple

from deepspeed._absent_internals import CONVERSION, HELPERS, MODULE_NAMES, OPTIMIZER_METHODS

OUT_OF_SCOPE = (
    "InferenceEngine",
    "DeepSpeedInferenceConfig",
    "init_inference",
    "default_inference_config",
    "DeepSpeedHybridEngine",
    "DeepSpeedTransformerLayer",
    "DeepSpeedTransformerConfig",
    "replace_transformer_layer",
    "revert_transformer_layer",
    "inference",
    "compression",
    "autotuning",
)


class Absence(NamedTuple):
    """Names of upstream's that are absent for one reason.

    Attributes:
        where: Regular expression of the package, or of the class as `module.Class`.
        names: Regular expression of the names.
        why: Why, and what to use instead.
    """

    where: str
    names: str
    why: str


_CONFIG = r"deepspeed\.runtime\.(config|constants)"
_ZERO = r"deepspeed\.runtime\.(zero\.(stage_1_and_2|stage3|partition_parameters)|bf16_optimizer)"
_OPTIMIZERS = (
    r"deepspeed\.runtime\.(zero\.(stage_1_and_2|stage3|zero_optimizer)"
    r"|bf16_optimizer|fp16\.(un)?fused_optimizer|base_optimizer)\.\w+"
)
_ENGINE = r"deepspeed\.runtime\.engine\.DeepSpeedEngine"
_INTERNAL = "it is a part of upstream's implementation, which this package does not share"

ABSENCES: tuple[Absence, ...] = (
    # Packages
    Absence(
        "deepspeed", "linear", "low-rank and quantized layers are not in this release; use peft"
    ),
    Absence(
        "deepspeed",
        "io",
        "files are written by deepspeed.checkpoint.file_writer; choose one by checkpoint.writer",
    ),
    Absence(
        "deepspeed",
        "set_autotp_mode|load_ds_config|(merge|record)_tp_model_init\\w+",
        "deepspeed.tp_model_init cuts a model, and its engine knows",
    ),
    Absence(
        "deepspeed",
        "set_optimizer_flags",
        "mark parameters yourself: param.use_muon = True or False",
    ),
    # Constants and getters of raw configurations
    Absence(
        r"deepspeed\..*",
        r"[A-Z0-9_]+_FORMAT",
        "it is a text for upstream's errors; docs/config-reference.md has every key",
    ),
    Absence(
        _CONFIG,
        r"(ACTIVATION_QUANT|WEIGHT_QUANT|CHANNEL_PRUN|HEAD_PRUN|ROW_PRUN|SPARSE_PRUN|LAYER_RED"
        r"|TECHNIQUE_|DIFFERENT_GROUPS|KEEP_NUMBER|MODULE_NAME|OTHER_MODULE|TEACHER|SHARED_PARAM"
        r")\w*",
        "compression is out of scope",
    ),
    Absence(_CONFIG, r"(SPARSE_|get_sparse_(?!grad))\w+", "sparse attention is out of scope"),
    Absence(
        _CONFIG,
        r"(CURRICULUM|DATA_|DYNAMIC_BATCHING|RANDOM_LTD)\w*",
        "read deepspeed.runtime.config.DeepSpeedConfig(config).tree; random layer-token drop and "
        "batches by their tokens come in a later release",
    ),
    Absence(
        _CONFIG,
        r"(PLD|EIGENVALUE|get_eigenvalue|get_pld)\w*",
        "progressive layer drop and quantized training are not in this release",
    ),
    Absence(
        _CONFIG,
        r"get_(amp|checkpoint|data_types|expert|hybrid_engine|lower_precision|optimizer_gradient"
        r"|pipeline|sparse_gradients)\w+|HybridEngineConfig|\w*(PARALLEL_WRITE|MODEL_PARALLEL_SIZE|NUM_GPUS_PER_NODE"
        r"|NON_ELASTIC|LEGACY_FUSION|OVERFLOW|CHECK_OVERFLOW|DDP_BFLOAT16)\w*",
        "read deepspeed.runtime.config.DeepSpeedConfig(config).tree",
    ),
    Absence(
        r"deepspeed\.nebula\.config",
        r"DLTS_\w+|NEBULA_EXPORT_ENVS",
        "Nebula is not supported; save to a file system",
    ),
    Absence(
        r"deepspeed\.checkpoint(\.constants)?",
        r"(AUTOEP|AUTOTP|DS_AUTOTP|EP_|EXPERT_PARAMETER|FOLDING)\w*",
        "files describe slices by universal_checkpoint_info and experts by ds_autoep_layers; "
        "see docs/checkpoint-internals.md",
    ),
    # Sequences
    Absence(
        r"deepspeed\.runtime\.sequence_parallel\.parallel_state_sp",
        r"get_model_parallel_\w+",
        "ranks that share sequences hold the whole model; use get_sequence_parallel_group and its "
        "kin",
    ),
    Absence(
        r"deepspeed\.runtime\.sequence_parallel\.ulysses_sp",
        "UlyssesSPFwdLossBwdWithLogits",
        "an engine whose ranks share sequences runs forward and backward as any other; "
        "TiledFusedLogitsLoss computes the loss in tiles",
    ),
    Absence(
        r"deepspeed\.runtime\.sequence_parallel\.ulysses_sp\.UlyssesSPDataLoaderAdapter",
        "refill",
        "iterate over it, it reads on by itself",
    ),
    # ZeRO
    Absence(
        r"deepspeed\.ops\.adam", r"ZenFlow\w+", "ZenFlow comes in a later release; use FusedAdam"
    ),
    Absence(
        r"deepspeed\.utils(\.tensor_fragment)?",
        r"(get|set)_(full_)?hp_\w+|get_full_hp\w+|set_full_hp\w+|map_to_flat_opt_states"
        r"|link_hp_params|lazy_init_hp_params_optimizer_state|tensor_fragment",
        "use deepspeed.utils.safe_get_full_fp32_param and its like, which every stage has",
    ),
    Absence(
        r"deepspeed\.runtime\.zero\.config\.DeepSpeedZeroConfig",
        r"cpu_offload\w*|stage3_gather_fp16_weights_on_model_save",
        "it is an old name, which the reader rewrites: offload_optimizer, offload_param, "
        "gather_16bit_weights_on_model_save",
    ),
    Absence(
        _ZERO + r"|deepspeed\.runtime\.(engine|base_optimizer|zero\.utils|pipe\.engine)"
        r"|deepspeed\.utils\.z3_leaf_module",
        "|".join(sorted(MODULE_NAMES)),
        _INTERNAL,
    ),
    Absence(
        _OPTIMIZERS,
        r"set_lr|get_lr|override_loss_scale",
        "set optimizer.param_groups[i]['lr'], or engine.set_lr; the loss scale is the "
        "configuration's",
    ),
    Absence(
        _OPTIMIZERS,
        r"(offload|reload)_states",
        "the optimizers of ZeRO stages 1 to 3 move state between steps; use one of these",
    ),
    Absence(
        _OPTIMIZERS,
        r"(get|set|update)_\w*(fp32|hp)_\w+|(get|set)_local_\w+",
        "use deepspeed.utils.safe_get_full_fp32_param and its like",
    ),
    Absence(_OPTIMIZERS, "empty_partition_cache", "use engine.empty_partition_cache()"),
    Absence(_OPTIMIZERS, "|".join(sorted(OPTIMIZER_METHODS)), _INTERNAL),
    # The engine
    Absence(
        _ENGINE,
        r"(sparse_all(reduce|_gather)\w*|zero_grad_hooks|clip_fp32_gradients|allreduce_(bucket|and_copy|no_retain)"
        r"|buffered_allreduce_fallback|all_gather_scalar)",
        "gradients are reduced and clipped by engine.backward and engine.step",
    ),
    Absence(
        _ENGINE,
        r"get_(autosp|autotp|deepcompile|deepspeed_compile)_backend|register_compile_pass"
        r"|get_compile_time|compile_zero_optimization_stage|uses_parallelization_pass_only",
        "DeepCompile comes in a later release; use engine.compile()",
    ),
    Absence(
        _ENGINE,
        r"random_ltd_(config|initialize)",
        "random layer-token drop comes in a later release; curriculum_learning lets sequences grow",
    ),
    Absence(
        _ENGINE, r"autotuning_(start|end|metric|model|profile)\w*", "autotuning is out of scope"
    ),
    Absence(_ENGINE, r"quantize_training|swap_tensor_config", "quantized training is out of scope"),
    Absence(
        _ENGINE,
        r"load_moe_state_dict",
        "use engine.load_checkpoint, which loads experts too",
    ),
    Absence(
        r"deepspeed\.runtime\.engine\.\w+",
        "active_timers|print_forward_breakdown|get_wall_clock_timers",
        "use wall_clock_breakdown and engine.timers.summary()",
    ),
    # Files
    Absence(
        r"deepspeed\.checkpoint\.ds_to_universal",
        "|".join(sorted(CONVERSION)),
        "use main(parse_arguments([...])), or the command ds_to_universal",
    ),
    Absence(
        r"deepspeed\.checkpoint(\.reshape_\w+)?",
        r"\w*(reshape_meg|merge_state|meg_2d)\w*",
        "use the command ds_to_universal, which converts for any number of ranks",
    ),
    # Helpers
    Absence(
        r"deepspeed\.runtime\.utils",
        "|".join(sorted(HELPERS)),
        "it is a helper of upstream's own code; torch and deepspeed.utils have what scripts need",
    ),
    Absence(r"deepspeed\.launcher\.runner", "run_autotuning", "autotuning is out of scope"),
    Absence(
        r"deepspeed\.moe\.(sharded_moe|mappings)(\.\w+)?",
        "einsum|symbolic",
        "use torch.einsum; exporting experts as ONNX is not supported",
    ),
    Absence(
        r"deepspeed\.profiling\.flops_profiler\.profiler",
        "wrapFunc",
        "operators are counted as they run, and nothing is patched",
    ),
    Absence(
        r"deepspeed\.checkpoint\.deepspeed_checkpoint\.DeepSpeedCheckpoint",
        r"show_\w+_(map|mapping)",
        "print what get_pp_transformer_map, get_embedding_files and the like return",
    ),
)
"""The first that fits counts."""


def reason(package: str, name: str) -> str | None:
    """Why `package.name` is absent; None if it is not one of the known absences.

    Args:
        package: A module, or a class as `module.Class`.
        name: The attribute.
    """
    if name in OUT_OF_SCOPE:
        return (
            f"{package}.{name}: this project is for training; inference, compression and "
            "autotuning are out of scope"
        )
    if name.startswith("__"):  # Python's own questions
        return None
    for absence in ABSENCES:
        if re.fullmatch(absence.where, package) and re.fullmatch(absence.names, name):
            return f"{package}.{name}: {absence.why}"
    return None

"""What this release does not have, and what to say when a script asks for it."""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

from deepspeed._absent_internals import (
    CONVERSION,
    ENGINE_METHODS,
    HELPERS,
    INTERNAL_MODULES,
    MODULE_NAMES,
    OPTIMIZER_METHODS,
    PIPELINE_METHODS,
)


class Absence(NamedTuple):
    """Names of upstream's that are absent for one reason."""

    where: str  # regular expression of the package, or of the class as `module.Class`
    names: str  # regular expression of the names
    why: str  # and what to use instead


FRAGMENTS = "use deepspeed.utils.safe_get_full_fp32_param and its like, which every stage has"
_CONFIG = r"deepspeed\.runtime\.(config|constants)"
_ZERO = r"deepspeed\.runtime\.(zero\.(stage_1_and_2|stage3|partition_parameters)|bf16_optimizer)"
_OPTIMIZERS = (
    r"deepspeed\.runtime\.(zero\.(stage_1_and_2|stage3|zero_optimizer)"
    r"|bf16_optimizer|fp16\.(un)?fused_optimizer|base_optimizer)\.\w+"
)
_ENGINE = r"deepspeed\.runtime\.engine\.DeepSpeedEngine"
_INTERNAL = (
    "it is a part of upstream's implementation, which this package does not share; "
    "docs/architecture.md says where its work is done"
)
_NVME = 'NVMe offload comes in a later release; use offload_optimizer.device "cpu"'
_CUT = (
    "the tensor_parallel block and deepspeed.tp_model_init cut a model; see docs/tensor-parallel.md"
)
_ZENFLOW = "ZenFlow comes in a later release; use offload_optimizer"
_QUANTIZED = "quantized weights and training are not in this release; use bf16 or fp16"

ABSENCES: tuple[Absence, ...] = (
    # Packages and modules
    Absence(
        "deepspeed",
        r"InferenceEngine|DeepSpeedInferenceConfig|init_inference|default_inference_config"
        r"|DeepSpeedHybridEngine|DeepSpeedTransformer(Layer|Config)|re(place|vert)_transformer_layer"
        r"|inference|compression|autotuning",
        "this project is for training; inference, compression and autotuning are out of scope",
    ),
    Absence(
        "deepspeed", "linear", "low-rank and quantized layers are not in this release; use peft"
    ),
    Absence(
        "deepspeed",
        "io",
        "files are written by deepspeed.checkpoint.file_writer; choose one by checkpoint.writer",
    ),
    Absence("deepspeed", "compile", "DeepCompile comes in a later release; use engine.compile()"),
    Absence("deepspeed", "nvme", _NVME),
    Absence(r"deepspeed\.ops", "gds", _NVME),
    Absence(r"deepspeed\.runtime\.swap_tensor", r"aio_config|\w+_swapper", _NVME),
    Absence("deepspeed", "git_version_info_installed", "read deepspeed.git_version_info"),
    Absence(
        r"deepspeed(\.runtime(\.checkpoint_engine)?)?",
        r"datastates(_checkpoint_engine)?|nebula_checkpoint_engine|model_checkpointing",
        "choose how files are written by checkpoint.writer",
    ),
    Absence(
        r"deepspeed\.module_inject",
        r"auto_ep\w*",
        "the expert_parallel block spreads a model's experts; see docs/moe.md",
    ),
    Absence(
        r"deepspeed\.module_inject",
        r"auto_?tp\w*|fusedqkv_utils|tp_\w+|replace_\w+|inject|load_checkpoint|policy|utils",
        _CUT,
    ),
    Absence(r"deepspeed\.runtime\.tensor_parallel", "init_utils|tp_manager", _CUT),
    Absence(
        r"deepspeed\.(module_inject|ops|runtime)",
        r"module_quantize|(fp_)?quantizer|quantize|weight_quantizer|eigenvalue",
        _QUANTIZED,
    ),
    Absence(
        r"deepspeed\.ops\.(adam|lion)",
        "multi_tensor_apply",
        "use FusedAdam and FusedLion, whose kernels are torch's",
    ),
    Absence(
        r"deepspeed\.ops",
        "random_ltd",
        "random layer-token drop is not in this release; curriculum_learning lets sequences grow",
    ),
    Absence(
        r"deepspeed\.runtime\.data_pipeline\.data_sampling",
        "variable_batch_size_and_lr",
        "a loop makes batches by their tokens; see docs/data.md",
    ),
    Absence(
        r"deepspeed\.runtime\.data_pipeline",
        "config|constants",
        "the data_efficiency block is read into deepspeed.runtime.config.DeepSpeedConfig(config)"
        ".tree; see docs/data.md",
    ),
    Absence(
        r"deepspeed\.runtime\.activation_checkpointing",
        "offload_activations",
        "use activation_checkpointing.cpu_checkpointing",
    ),
    Absence(
        r"deepspeed\.runtime",
        "comm|sparse_tensor",
        "gradients are reduced by deepspeed.comm; sparse and 1-bit ones are not in this release",
    ),
    Absence(
        r"deepspeed\.runtime(\.fp16)?",
        "onebit|compression",
        "1-bit optimizers come in a later release; use Adam or Lamb",
    ),
    Absence(
        r"deepspeed\.runtime",
        r"hybrid_engine\w*|rollout",
        "this project is for training; generate with an inference server, or inside "
        "deepspeed.zero.unwrap_model_for_generation",
    ),
    Absence(
        r"deepspeed\.runtime",
        "domino",
        "tensor parallelism that overlaps half batches is not in this release; "
        "use the tensor_parallel block",
    ),
    Absence(
        r"deepspeed\.runtime",
        "progressive_layer_drop",
        "progressive layer drop is not in this release; drop layers in the model's forward",
    ),
    Absence(
        r"deepspeed\.runtime",
        "superoffload",
        "SuperOffload comes in a later release; use offload_optimizer",
    ),
    Absence(r"deepspeed\.runtime", "zenflow", _ZENFLOW),
    Absence(r"deepspeed\.ops\.adam", r"zenflow\w+", _ZENFLOW),
    Absence(
        r"deepspeed\.sequence",
        r"auto_sp|autosp_\w+|test_autosp",
        "use UlyssesSPAttentionHF of deepspeed.runtime.sequence_parallel.ulysses_sp; "
        "see docs/sequence-parallel.md",
    ),
    # Names of packages
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
        r"(AUTOEP|AUTOTP|DS_AUTOTP|EP_|EXPERT_PARAMETER|FOLDING|autoep_)\w*",
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
        r"|link_hp_params|lazy_init_hp_params_optimizer_state",
        FRAGMENTS,
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
        "load_moe_state_dict|_save_moe_checkpoint",
        "use engine.load_checkpoint and save_checkpoint, which know experts too",
    ),
    Absence(_ENGINE, "|".join(sorted(ENGINE_METHODS)), _INTERNAL),
    Absence(
        r"deepspeed\.runtime\.pipe\.engine\.PipelineEngine",
        "|".join(sorted(PIPELINE_METHODS)),
        _INTERNAL,
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
        r"\w*(reshape_(meg|utils)|merge_state|meg_2d)\w*",
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
    """Why `package.name` is absent; None if it is not one of the known absences."""
    if name.startswith("__"):  # Python's own questions
        return None
    if f"{package}.{name}" in INTERNAL_MODULES:
        return f"{package}.{name}: {_INTERNAL}"
    if not _names_of(package).fullmatch(name):
        return None
    found = next(a for a in absences_of(package) if re.fullmatch(a.names, name))
    return f"{package}.{name}: {found.why}"


@functools.cache
def _names_of(package: str) -> re.Pattern[str]:
    """What all its absences fit, as one pattern."""
    return re.compile("|".join(f"(?:{a.names})" for a in absences_of(package)) or "(?!)")


@functools.cache
def absences_of(package: str) -> tuple[Absence, ...]:
    """What is known to be absent of a module, or of a class as `module.Class`."""
    return tuple(absence for absence in ABSENCES if re.fullmatch(absence.where, package))

"""What this release does not have, and what to say when a script asks for it."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import NamedTuple

from deepspeed._absent_internals import (
    CONVERSION,
    ENGINE_METHODS,
    HELPERS,
    INTERNAL_MODULES,
    MODULE_NAMES,
    OPTIMIZER_METHODS,
    PIPELINE_METHODS,
    SHARDING_METHODS,
)


class Absence(NamedTuple):
    """Names of upstream's that are absent for one reason."""

    where: str  # regular expression of the package, or of the class as `module.Class`
    names: str  # regular expression of the names
    why: str  # and what to use instead


FRAGMENTS = "use deepspeed.utils.safe_get_full_fp32_param and its like, which every stage has"
_INTERNAL = (
    "it is a part of upstream's implementation, which this package does not share; "
    "docs/architecture.md says where its work is done"
)
_SAID = {
    "CONFIG": r"deepspeed\.runtime\.(config|constants)",
    "ZERO": r"deepspeed\.runtime\.(zero\.(stage_1_and_2|stage3|partition_parameters)"
    r"|bf16_optimizer)",
    "OPTIMIZERS": r"deepspeed\.runtime\.(zero\.(stage_1_and_2|stage3|zero_optimizer)"
    r"|bf16_optimizer|fp16\.(un)?fused_optimizer|base_optimizer)\.\w+",
    "ENGINE": r"deepspeed\.runtime\.engine\.DeepSpeedEngine",
    "FRAGMENTS": FRAGMENTS,
    "INTERNAL": _INTERNAL,
    "NVME": 'state lies in files by offload_optimizer.device "nvme"; see docs/offload.md',
    "CUT": "the tensor_parallel block and deepspeed.tp_model_init cut a model; see "
    "docs/tensor-parallel.md",
    "ZENFLOW": "ZenFlow comes in a later release; use offload_optimizer",
    "QUANTIZED": "quantized weights and training are not in this release; use bf16 or fp16",
    **{
        name: "|".join(sorted(names))
        for name, names in {
            "MODULE_NAMES": MODULE_NAMES,
            "OPTIMIZER_METHODS": OPTIMIZER_METHODS,
            "ENGINE_METHODS": ENGINE_METHODS,
            "PIPELINE_METHODS": PIPELINE_METHODS,
            "SHARDING_METHODS": SHARDING_METHODS,
            "CONVERSION": CONVERSION,
            "HELPERS": HELPERS,
        }.items()
    },
}
"""What `@NAME` in the table stands for."""
_TABLE = r"""
# Packages and modules
deepspeed
    InferenceEngine|DeepSpeedInferenceConfig|init_inference|default_inference_config
    |DeepSpeedHybridEngine|DeepSpeedTransformer(Layer|Config)|re(place|vert)_transformer_layer
    |inference|compression|autotuning
        this project is for training; inference, compression and autotuning are out of scope
    linear
        low-rank and quantized layers are not in this release; use peft
    compile
        DeepCompile comes in a later release; use engine.compile()
deepspeed\.io
    \w+_io_buffer|utils
        @INTERNAL
deepspeed\.nvme
    \w+
        use the commands ds_io and ds_nvme_tune; see docs/async-io.md
deepspeed\.ops
    gds
        GPUDirect Storage is not in this release; use deepspeed.ops.aio
deepspeed\.runtime\.swap_tensor
    aio_config|\w+_swapper
        @NVME
deepspeed
    git_version_info_installed
        read deepspeed.git_version_info
deepspeed(\.runtime(\.checkpoint_engine)?)?
    datastates(_checkpoint_engine)?|nebula_checkpoint_engine|model_checkpointing
        choose how files are written by checkpoint.writer
deepspeed\.module_inject
    auto_ep\w*
        the expert_parallel block spreads a model's experts; see docs/moe.md
    auto_?tp\w*|fusedqkv_utils|tp_\w+|replace_\w+|inject|load_checkpoint|policy|utils
        @CUT
deepspeed\.runtime\.tensor_parallel
    init_utils|tp_manager
        @CUT
deepspeed\.(module_inject|ops|runtime)
    module_quantize|(fp_)?quantizer|quantize|weight_quantizer|eigenvalue
        @QUANTIZED
deepspeed\.ops\.(adam|lion)
    multi_tensor_apply
        use FusedAdam and FusedLion, whose kernels are torch's
deepspeed\.ops
    random_ltd
        random layer-token drop is not in this release; curriculum_learning lets sequences grow
deepspeed\.runtime\.data_pipeline\.data_sampling
    variable_batch_size_and_lr
        a loop makes batches by their tokens; see docs/data.md
deepspeed\.runtime\.data_pipeline
    config|constants
        the data_efficiency block is read into
        deepspeed.runtime.config.DeepSpeedConfig(config).tree; see docs/data.md
deepspeed\.runtime\.activation_checkpointing
    offload_activations
        use activation_checkpointing.cpu_checkpointing
deepspeed\.runtime
    comm|sparse_tensor
        gradients are reduced by deepspeed.comm; sparse and 1-bit ones are not in this release
deepspeed\.runtime(\.fp16)?
    onebit|compression
        1-bit optimizers come in a later release; use Adam or Lamb
deepspeed\.runtime
    hybrid_engine\w*|rollout
        this project is for training; generate with an inference server, or inside
        deepspeed.zero.unwrap_model_for_generation
    domino
        tensor parallelism that overlaps half batches is not in this release; use the
        tensor_parallel block
    progressive_layer_drop
        progressive layer drop is not in this release; drop layers in the model's forward
    superoffload
        SuperOffload comes in a later release; use offload_optimizer
    zenflow
        @ZENFLOW
deepspeed\.ops\.adam
    zenflow\w+
        @ZENFLOW
deepspeed\.sequence
    auto_sp|autosp_\w+|test_autosp
        use UlyssesSPAttentionHF of deepspeed.runtime.sequence_parallel.ulysses_sp; see
        docs/sequence-parallel.md
# Names of packages
deepspeed
    set_autotp_mode|load_ds_config|(merge|record)_tp_model_init\w+
        deepspeed.tp_model_init cuts a model, and its engine knows
    set_optimizer_flags
        mark parameters yourself: param.use_muon = True or False
# Constants and getters of raw configurations
deepspeed\..*
    [A-Z0-9_]+_FORMAT
        it is a text for upstream's errors; docs/config-reference.md has every key
@CONFIG
    (ACTIVATION_QUANT|WEIGHT_QUANT|CHANNEL_PRUN|HEAD_PRUN|ROW_PRUN|SPARSE_PRUN|LAYER_RED|TECHNIQUE_
    |DIFFERENT_GROUPS|KEEP_NUMBER|MODULE_NAME|OTHER_MODULE|TEACHER|SHARED_PARAM)\w*
        compression is out of scope
    (SPARSE_|get_sparse_(?!grad))\w+
        sparse attention is out of scope
    (CURRICULUM|DATA_|DYNAMIC_BATCHING|RANDOM_LTD)\w*
        read deepspeed.runtime.config.DeepSpeedConfig(config).tree; random layer-token drop and
        batches by their tokens come in a later release
    (PLD|EIGENVALUE|get_eigenvalue|get_pld)\w*
        progressive layer drop and quantized training are not in this release
    get_(amp|checkpoint|data_types|expert|hybrid_engine|lower_precision|optimizer_gradient|pipeline
    |sparse_gradients)\w+|HybridEngineConfig|\w*(PARALLEL_WRITE|MODEL_PARALLEL_SIZE
    |NUM_GPUS_PER_NODE|NON_ELASTIC|LEGACY_FUSION|OVERFLOW|CHECK_OVERFLOW|DDP_BFLOAT16)\w*
        read deepspeed.runtime.config.DeepSpeedConfig(config).tree
deepspeed\.nebula\.config
    DLTS_\w+|NEBULA_EXPORT_ENVS
        Nebula is not supported; save to a file system
deepspeed\.checkpoint(\.constants)?
    (AUTOEP|AUTOTP|DS_AUTOTP|EP_|EXPERT_PARAMETER|FOLDING|autoep_)\w*
        files describe slices by universal_checkpoint_info and experts by ds_autoep_layers; see
        docs/checkpoint-internals.md
# Sequences
deepspeed\.runtime\.sequence_parallel\.parallel_state_sp
    get_model_parallel_\w+
        ranks that share sequences hold the whole model; use get_sequence_parallel_group and its kin
deepspeed\.runtime\.sequence_parallel\.ulysses_sp
    UlyssesSPFwdLossBwdWithLogits
        an engine whose ranks share sequences runs forward and backward as any other;
        TiledFusedLogitsLoss computes the loss in tiles
deepspeed\.runtime\.sequence_parallel\.ulysses_sp\.UlyssesSPDataLoaderAdapter
    refill
        iterate over it, it reads on by itself
# ZeRO
deepspeed\.ops\.adam
    ZenFlow\w+
        ZenFlow comes in a later release; use FusedAdam
deepspeed\.utils(\.tensor_fragment)?
    (get|set)_(full_)?hp_\w+|get_full_hp\w+|set_full_hp\w+|map_to_flat_opt_states|link_hp_params
    |lazy_init_hp_params_optimizer_state
        @FRAGMENTS
deepspeed\.runtime\.zero\.config\.DeepSpeedZeroConfig
    cpu_offload\w*|stage3_gather_fp16_weights_on_model_save
        it is an old name, which the reader rewrites: offload_optimizer, offload_param,
        gather_16bit_weights_on_model_save
@ZERO|deepspeed\.runtime\.(engine|base_optimizer|zero\.utils|pipe\.engine)
|deepspeed\.utils\.z3_leaf_module
    @MODULE_NAMES
        @INTERNAL
@OPTIMIZERS
    set_lr|get_lr|override_loss_scale
        set optimizer.param_groups[i]['lr'], or engine.set_lr; the loss scale is the configuration's
    (offload|reload)_states
        the optimizers of ZeRO stages 1 to 3 move state between steps; use one of these
    (get|set|update)_\w*(fp32|hp)_\w+|(get|set)_local_\w+
        use deepspeed.utils.safe_get_full_fp32_param and its like
    empty_partition_cache
        use engine.empty_partition_cache()
    @OPTIMIZER_METHODS
        @INTERNAL
deepspeed\.runtime\.zero\.((init_context|partition_parameters)\.Init
|parameter_offload\.DeepSpeedZeRoOffload)
    @SHARDING_METHODS
        @INTERNAL
# The engine
@ENGINE
    (sparse_all(reduce|_gather)\w*|zero_grad_hooks|clip_fp32_gradients|allreduce_(bucket|and_copy
    |no_retain)|buffered_allreduce_fallback|all_gather_scalar)
        gradients are reduced and clipped by engine.backward and engine.step
    get_(autosp|autotp|deepcompile|deepspeed_compile)_backend|register_compile_pass|get_compile_time
    |compile_zero_optimization_stage|uses_parallelization_pass_only
        DeepCompile comes in a later release; use engine.compile()
    random_ltd_(config|initialize)
        random layer-token drop comes in a later release; curriculum_learning lets sequences grow
    autotuning_(start|end|metric|model|profile)\w*
        autotuning is out of scope
    quantize_training|swap_tensor_config
        quantized training is out of scope
    load_moe_state_dict|_save_moe_checkpoint
        use engine.load_checkpoint and save_checkpoint, which know experts too
    @ENGINE_METHODS
        @INTERNAL
deepspeed\.runtime\.pipe\.(engine\.PipelineEngine|module\.PipelineModule)
    @PIPELINE_METHODS
        @INTERNAL
deepspeed\.runtime\.engine\.\w+
    active_timers|print_forward_breakdown|get_wall_clock_timers
        use wall_clock_breakdown and engine.timers.summary()
# Files
deepspeed\.checkpoint\.ds_to_universal
    @CONVERSION
        use main(parse_arguments([...])), or the command ds_to_universal
deepspeed\.checkpoint(\.reshape_\w+)?
    \w*(reshape_(meg|utils)|merge_state|meg_2d)\w*
        use the command ds_to_universal, which converts for any number of ranks
# Helpers
deepspeed\.runtime\.utils
    @HELPERS
        it is a helper of upstream's own code; torch and deepspeed.utils have what scripts need
deepspeed\.launcher\.runner
    run_autotuning
        autotuning is out of scope
deepspeed\.moe\.(sharded_moe|mappings)(\.\w+)?
    einsum|symbolic
        use torch.einsum; exporting experts as ONNX is not supported
deepspeed\.profiling\.flops_profiler\.profiler
    wrapFunc
        operators are counted as they run, and nothing is patched
deepspeed\.checkpoint\.deepspeed_checkpoint\.DeepSpeedCheckpoint
    show_\w+_(map|mapping)
        print what get_pp_transformer_map, get_embedding_files and the like return
"""


def _read(table: str) -> Iterator[Absence]:
    """Read a table of packages (`where`), names below them, and why below those."""
    rows: list[list[list[str]]] = []
    depth = 3
    for line in filter(None, (line.partition("#")[0].rstrip() for line in table.splitlines())):
        before, depth = depth, (len(line) - len(line.lstrip())) // 4
        if depth < before:
            rows.append([*(rows[-1][:depth] if depth else []), *([] for _ in range(3 - depth))])
        rows[-1][depth].append(line.strip())
    for where, names, why in rows:
        texts = ("".join(where), "".join(names), " ".join(why))
        yield Absence(*(re.sub(r"^@(\w+)", lambda m: _SAID[m[1]], text) for text in texts))


ABSENCES = tuple(_read(_TABLE))
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

"""The ``zero_optimization`` block: what is sharded, how it travels, and where it is kept."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, model_validator
from pydantic_core import PydanticCustomError, PydanticUseDefault

from deepspeed.runtime.config_models.base import (
    AUTO,
    TAKES_AUTO,
    Bool,
    Count,
    DeepSpeedConfigModel,
    Default,
    Int,
    Natural,
    Part,
    Size,
    Text,
    block,
    option,
    plain_number,
    read_boolean,
)
from deepspeed.runtime.config_models.enums import OffloadDeviceEnum, ZeroStageEnum
from deepspeed.utils.logging import warn_once

# What a configuration, or this release, may lack (`option(needs=...)`).
STAGE_3 = "ZeRO stage 3"
OTHER_STAGES = "ZeRO stage 1 or 2"
NVME_LOADING = "state that is loaded while it is trained"
NVME_STATE = 'offload_optimizer.device "nvme"'
NVME_PARAMS = 'offload_param.device "nvme"'
NVME = 'a device "nvme"'
SUB_GROUPS = "updates in parts"
TRACE = "an order of modules that matters"

DEFAULT_LEAF_MODULE_CLASSES: list[str] = [
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
]
DEFAULT_LEAF_MODULE_NAMES: list[str] = []
DEFAULT_LEAF_MODULE_NAME_SUFFIXES: list[str] = []


def _stage(value: object) -> ZeroStageEnum:
    value = plain_number(value)
    if isinstance(value, bool) or value not in (0, 1, 2, 3):
        raise PydanticCustomError("wrong_stage", "0, 1, 2 or 3")
    return ZeroStageEnum(value)


def _device(value: object) -> object:
    # accelerate and Lightning may hand null for "stay where you are".
    return OffloadDeviceEnum.none if value is None else value


def _gathering(value: object) -> bool:
    if value == AUTO:
        # Of saving alone: what is trained is the same.
        warn_once(
            'zero_optimization.stage3_gather_16bit_weights_on_model_save: "auto" is left over and '
            "read as false: engine.save_16bit_model() saves nothing at stage 3. Use true or false"
        )
        raise PydanticUseDefault
    return read_boolean(value)


Gathering = Annotated[bool, BeforeValidator(_gathering), TAKES_AUTO]


def _several(value: object) -> object:
    return [value] if isinstance(value, str) else value


Stage = Annotated[ZeroStageEnum, BeforeValidator(_stage)]
Device = Annotated[OffloadDeviceEnum, BeforeValidator(_device)]
Texts = Annotated[list[Text], BeforeValidator(_several)]


def _stage_3(key: str, default: Default, doc: str) -> Default:
    """Return the field of a key that has an effect at stage 3 alone, and says so in its name."""
    return option(default, f"{doc} (stage 3).", alias=f"stage3_{key}", needs=STAGE_3)


class DeepSpeedZeroOffloadParamConfig(DeepSpeedConfigModel):
    """Parameters off the device (ZeRO-3)."""

    device: Device = option(OffloadDeviceEnum.none, 'Where parameters are: "none", "cpu", "nvme".')
    nvme_path: Path | None = option(None, "Folder on the NVMe device.")
    buffer_count: Natural = option(5, "Buffers for shards that are read.", needs=NVME_PARAMS)
    buffer_size: Size = option(int(1e8), "Most elements of a buffer.", ge=1, needs=NVME_PARAMS)
    max_in_cpu: Size = option(
        int(1e9), "Elements of a rank's shards that the page cache keeps.", needs=NVME_PARAMS
    )
    pin_memory: Bool = option(True, "Use page-locked CPU memory.")


class DeepSpeedZeroOffloadOptimizerConfig(DeepSpeedConfigModel):
    """Optimizer state and step off the device."""

    device: Device = option(OffloadDeviceEnum.none, 'Where state lives: "none", "cpu" or "nvme".')
    nvme_path: Path | None = option(None, "Folder on the NVMe device.")
    buffer_count: Natural = option(4, "Gradient slices on their way to the host at once.")
    pin_memory: Bool = option(True, "Use page-locked CPU memory.")
    pipeline_read: Bool = option(False, "Accepted: reads overlap with it.", needs=NVME_STATE)
    pipeline_write: Bool = option(False, "Accepted: writes overlap with it.", needs=NVME_STATE)
    fast_init: Bool = option(False, "Accepted: state begins as files of zeros.", needs=NVME_STATE)
    ratio: Part = option(1.0, "Share of the state that is updated on the CPU.")
    speculative_update: Bool = option(False, "Update it while backward runs.")
    super_offload: Bool = option(False, "SuperOffload for Grace-class CPUs.")
    cpuadam_cores_perc: Part = option(0.8, "Share of the CPU cores.", needs="SuperOffload")


class DeepSpeedZeroLeafModuleConfig(DeepSpeedConfigModel):
    """Modules whose parameters ZeRO-3 gathers together."""

    classes: Texts = option(DEFAULT_LEAF_MODULE_CLASSES, "Class paths of leaf modules, or one.")
    names: Texts = option(DEFAULT_LEAF_MODULE_NAMES, "Names of leaf modules, or one.")
    name_suffixes: Texts = option(DEFAULT_LEAF_MODULE_NAME_SUFFIXES, "Endings of names, or one.")


class ZenFlowConfig(DeepSpeedConfigModel):
    """ZenFlow, offloading that updates important gradients first."""

    topk_ratio: Part = option(0.1, "Share of gradients updated on the device.")
    select_strategy: Text = option("auto", "When important gradients are selected anew.")
    select_interval: int | str = option("auto", "Interval of selection.")
    update_interval: int | str = option("auto", "Interval of CPU updates.")
    overlap_step: Bool = option(False, "Overlap the CPU step with training.")
    offload: Bool = option(False, "Offload selective optimizer state.")
    auto_ratio: Part = option(0.99, "Threshold of the automatic interval.")
    full_warm_up_rounds: Natural = option(0, "Rounds before selection starts.")
    pt_reserved_cores_perc: Part = option(0.5, "Share of the CPU cores kept for PyTorch.")
    steps_per_epoch: Int | None = option(None, "Steps per epoch.")


class DeepSpeedZeroConfig(DeepSpeedConfigModel):
    """ZeRO."""

    stage: Stage = option(
        ZeroStageEnum.disabled,
        "0: off; 1: shard optimizer state; 2: and gradients; 3: and weights.",
    )
    contiguous_gradients: Bool = option(True, "Copy gradients into one flat buffer as they come.")
    reduce_scatter: Bool = option(True, "Reduce-scatter gradients, instead of all-reducing them.")
    reduce_bucket_size: Size = option(int(5e8), "Elements reduced by one collective.")
    use_multi_rank_bucket_allreduce: Bool = option(
        True,
        "Reduce the pieces of several owners in one collective.",
        needs="several collectives per bucket",
    )
    allgather_partitions: Bool = option(True, "All-gather updated parameters; false: broadcast.")
    allgather_bucket_size: Size = option(
        int(5e8),
        "Elements gathered by one collective on the CPU, an even number at stages 1 and 2; devices "
        "gather in place.",
    )
    overlap_comm: Bool | None = option(None, "Overlap reduction with backward; null: at stage 3.")
    overlap_param_gather: Bool = option(
        False,
        "Gather updated parameters beside the next forward, on devices (stages 1, 2); for scripts "
        "that keep no tensors which share memory with parameters.",
    )
    load_from_fp32_weights: Bool = option(True, "Load master weights, not copy the model's.")
    elastic_checkpoint: Bool = option(False, "Save so that another world size can load it.")
    offload_param: DeepSpeedZeroOffloadParamConfig | None = option(
        None, "Parameters off the device (stage 3)."
    )
    offload_optimizer: DeepSpeedZeroOffloadOptimizerConfig | None = option(
        None, "Optimizer off the device."
    )
    zenflow: ZenFlowConfig | None = option(None, "ZenFlow.")
    sub_group_size: Size = option(int(1e9), "Elements updated at a time.", needs=SUB_GROUPS)
    prefetch_bucket_size: Size = _stage_3(
        "prefetch_bucket_size",
        int(5e7),
        "Gather the next unit ahead, and all that begin within so many elements from now; 0: none",
    )
    param_persistence_threshold: Size = _stage_3(
        "param_persistence_threshold",
        int(1e5),
        "Parameters of up to so many elements stay whole between steps",
    )
    model_persistence_threshold: Size = _stage_3(
        "model_persistence_threshold", sys.maxsize, "Elements that may stay whole together"
    )
    max_live_parameters: Size = _stage_3(
        "max_live_parameters", int(1e9), "Elements whole at a time, but for what is in use"
    )
    max_reuse_distance: Size = _stage_3(
        "max_reuse_distance",
        int(1e9),
        "Keep a parameter whole that is used again within so many elements",
    )
    gather_16bit_weights_on_model_save: Gathering = _stage_3(
        "gather_16bit_weights_on_model_save",
        False,
        "Let weights be gathered on one rank for export",
    )
    module_granularity_threshold: Size = _stage_3(
        "module_granularity_threshold",
        0,
        "A module with at most so many elements per module in it, itself counted, is gathered as "
        "one with all that is below it; 0: none",
    )
    unit_fusion_size: Size = _stage_3(
        "unit_fusion_size",
        800_000,
        "Gather neighbouring modules together, up to so many elements, of which each has up to an "
        "eighth; not more than prefetch_bucket_size, reduce_bucket_size and max_live_parameters. "
        "0: none",
    )
    use_all_reduce_for_fetch_params: Bool = _stage_3(
        "use_all_reduce_for_fetch_params", False, "Gather parameters by all-reduce"
    )
    allgather_sequential: Bool = _stage_3(
        "allgather_sequential", False, "Gather parameters one after another"
    )
    ignore_unused_parameters: Bool = option(True, "Accept parameters without a gradient.")
    skip_unused_parameters: Bool = option(
        False,
        "Leave a parameter that no rank has had a gradient for in a step as it is, as torch's "
        "optimizers do; otherwise a gradient of zeros steps it. Ranks tell each other in each "
        "step, for which the host waits.",
    )
    legacy_stage1: Bool = option(False, "The first implementation of stage 1.")
    round_robin_gradients: Bool = option(
        False,
        "Deal parameters to ranks in turn, which balances partial overlap (stages 1, 2).",
        needs=OTHER_STAGES,
    )
    zero_hpz_partition_size: Natural = option(
        1,
        "Neighbouring ranks that keep copies of gathered shards for backward (stage 3); 1: none.",
        needs=STAGE_3,
    )
    zero_quantized_weights: Bool = option(False, "Gather quantized weights (stage 3).")
    zero_quantized_nontrainable_weights: Bool = option(False, "Keep frozen weights quantized.")
    zero_quantized_gradients: Bool = option(False, "Reduce quantized gradients (stage 3).")
    zeropp_loco_param: dict[str, Any] | None = option(None, "LoCo error feedback of gradients.")
    mics_shard_size: Int = option(
        -1,
        "Neighbouring ranks that share one set of shards, of which there are several (stage 3); "
        "-1: all ranks share one.",
        needs=STAGE_3,
    )
    mics_hierarchical_params_gather: Bool = option(False, "Gather in two levels.", needs=STAGE_3)
    memory_efficient_linear: Bool = option(
        True,
        "Linear layers that do not keep weights for backward.",
        needs="gathered weights that backward keeps",
    )
    pipeline_loading_checkpoint: Bool = option(
        False, "Overlap loading a checkpoint with initialization.", needs=NVME_LOADING
    )
    override_module_apply: Bool = option(True, "Gather in Module.apply (stage 3).", needs=STAGE_3)
    log_trace_cache_warnings: Bool = option(False, "Warn when modules come otherwise.", needs=TRACE)
    enable_sanity_checks: Bool = option(False, "Check what is gathered (stage 3).", needs=STAGE_3)
    save_muon_momentum_buffer_in_memory: Bool = option(
        False, "Keep Muon's momentum on the device; not with `offload_optimizer`."
    )
    leaf_module: DeepSpeedZeroLeafModuleConfig = block(DeepSpeedZeroLeafModuleConfig, needs=STAGE_3)
    num_optimizer_instances: Count = option(
        1, "Replicas of the sharded state in the data-parallel group (stages 1 to 3)."
    )

    @model_validator(mode="after")
    def _resolve_overlap(self) -> DeepSpeedZeroConfig:
        if self.overlap_comm is None:
            # Written past the validators: an assignment would validate, and so come here, again.
            self.__dict__["overlap_comm"] = self.stage == ZeroStageEnum.weights
        return self

    @property
    def offload_optimizer_device(self) -> OffloadDeviceEnum:
        """Where optimizer state lives; ``none`` also when the block is absent."""
        return self.offload_optimizer.device if self.offload_optimizer else OffloadDeviceEnum.none

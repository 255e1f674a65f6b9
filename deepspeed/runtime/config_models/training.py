"""The root of the configuration: one field per top-level JSON key."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, field_validator
from pydantic_core import PydanticCustomError

from deepspeed.runtime.config_models import features, observe, precision, zero
from deepspeed.runtime.config_models.base import (
    Bool,
    DeepSpeedConfigModel,
    Float,
    Int,
    Interval,
    Size,
    Text,
    block,
    option,
    plain_number,
)
from deepspeed.runtime.constants import CHECKPOINT_TAG_VALIDATION_MODES
from deepspeed.utils.logging import log_levels

WRITER_TYPES = ("TORCH", "PYTHON", "FAST", "DCP", "MOCK")


def _tag_validation(value: Any) -> Any:
    if not isinstance(value, str) or value.upper() not in CHECKPOINT_TAG_VALIDATION_MODES:
        raise PydanticCustomError("wrong_mode", '"Warn", "Ignore" or "Fail"')
    return value.upper()


def _log_level(value: Any) -> Any:
    if value is not None and str(value).lower() not in log_levels:
        raise PydanticCustomError(
            "wrong_level",
            "{levels} or null",
            {"levels": ", ".join(f'"{name}"' for name in log_levels)},
        )
    return value


def _params(value: Any) -> Any:
    if not isinstance(value, dict):
        return {} if value is None else value
    return {key: plain_number(item) for key, item in value.items()}


Params = Annotated[dict[str, Any], BeforeValidator(_params)]


class OptimizerConfig(DeepSpeedConfigModel):
    """The optimizer that the engine builds."""

    type: Text = Field(
        description='Name: "Adam", "AdamW", "SGD", "Adagrad", "Lamb", "Lion", "Muon", or one of '
        "torch.optim."
    )
    params: Params = option({}, "Keyword arguments of the optimizer.")
    legacy_fusion: Bool = option(False, "Fused fp16 optimizer of old.")


class SchedulerConfig(DeepSpeedConfigModel):
    """The learning-rate schedule that the engine builds."""

    type: Text | None = option(
        None, "Name of a class of deepspeed.runtime.lr_schedules or torch.optim.lr_scheduler."
    )
    params: Params = option({}, "Keyword arguments of the schedule.")


class ParallelWriteConfig(DeepSpeedConfigModel):
    """Writing checkpoints in parallel."""

    pipeline_stage: Bool = option(
        False, "Let the data ranks of a pipeline stage share the writing."
    )


def _writer_type(value: Any) -> Any:
    if not isinstance(value, str) or value.upper() not in WRITER_TYPES:
        raise PydanticCustomError("wrong_writer", '"torch" (or "python"), "fast" or "dcp"')
    return {"PYTHON": "TORCH"}.get(value.upper(), value.upper())


class CheckpointWriterConfig(DeepSpeedConfigModel):
    """How checkpoint files are written."""

    type: Annotated[str, BeforeValidator(_writer_type)] = option(
        "FAST",
        '"torch" (or "python"): torch.save; "fast": the same files without CRC-32 sums; '
        '"dcp": tensors in the format of torch.distributed.checkpoint.',
    )
    decoupled: Bool = option(
        False, "Copy to host memory and write in the background while training goes on."
    )
    io_buffer_size: Size = option(
        16 << 20, 'Bytes of a buffer of a file being written; "dcp" buffers itself.', ge=1
    )
    io_buffer_double: Bool = option(
        True, "Fill one buffer while threads write and sum the other; a decoupled writer has one."
    )
    show_statistics: Bool = option(False, "Log size and speed of each file.")
    data_parallel: Text | None = option(None, "Ranks that share one file.")
    io_multiplier: Int = option(1, "How often each byte is written.", ge=1)


class CheckpointConfig(DeepSpeedConfigModel):
    """Checkpoints."""

    tag_validation: Annotated[str, BeforeValidator(_tag_validation)] = option(
        "WARN",
        'When ranks save under different tags: "Warn" (all use rank 0\'s), "Fail", or "Ignore" '
        "(not compared).",
    )
    load_universal: Bool = option(
        False,
        "load_checkpoint reads universal checkpoints, which ds_to_universal makes, and takes its "
        "tag from latest_universal.",
    )
    use_node_local_storage: Bool = option(
        False, "Every node has a checkpoint folder of its own, with what its ranks load."
    )
    parallel_write: ParallelWriteConfig = block(ParallelWriteConfig)
    checkpoint_serialization: Bool = option(
        True, "Write in torch's zip format; false: in that before torch 1.6."
    )
    verify: Literal["full", "sizes", "off"] = option(
        "full",
        'What loading checks against the manifest first: "full": every file\'s checksum, "sizes": '
        'all but those, "off": nothing.',
    )
    open_window: Literal["restore", "discard"] = option(
        "restore",
        "What loading does with a checkpoint that was saved inside an accumulation window: "
        '"restore" its gradients, which an equal run can, or "discard" them and begin the window '
        "anew.",
    )
    writer: CheckpointWriterConfig | None = option(
        None, 'How files are written; null: in the foreground, as with type "torch".'
    )
    keep_last: Int | None = option(
        None,
        "Remove the oldest published checkpoints of the folder when there are more than so many; "
        "null keeps all.",
        ge=1,
    )


class TrainingConfig(DeepSpeedConfigModel):
    """The configuration of training."""

    # Batch
    train_batch_size: Int | None = option(None, "Samples per optimizer step over all ranks.", ge=1)
    train_micro_batch_size_per_gpu: Int | None = option(
        None, "Samples per forward on one rank.", ge=1
    )
    gradient_accumulation_steps: Int | None = option(
        None, "Micro-batches per optimizer step.", ge=1
    )

    # Optimizer and schedule
    optimizer: OptimizerConfig | None = option(None, "The optimizer that the engine builds.")
    scheduler: SchedulerConfig | None = option(
        None, "The learning-rate schedule that the engine builds."
    )
    gradient_clipping: Float = option(1.0, "Largest global gradient norm; 0: no clipping.", ge=0)

    # Gradient reduction
    communication_data_type: Text | None = option(
        None, 'Type gradients are reduced in: "fp32", "fp16" or "bf16".'
    )
    seq_parallel_communication_data_type: Text = option(
        "fp32", "The same between sequence-parallel ranks."
    )
    prescale_gradients: Bool = option(
        False, "Divide gradients before the reduction instead of after it."
    )
    gradient_predivide_factor: Float = option(
        1.0,
        "The part divided before the reduction, without prescale_gradients. Not given, fp16 takes "
        "a power of two near the root of the number of ranks.",
        gt=0,
    )
    gradient_allreduce_op: Literal["mean", "sum"] = option(
        "mean", "Average or add gradients over ranks."
    )
    sparse_gradients: Bool = option(
        False, "Reduce gradients of sparse embeddings as sparse tensors."
    )
    disable_allgather: Bool = option(
        False, "Broadcast updated parameters instead of gathering them."
    )
    managed_gradient_accumulation: Bool = option(
        True, "The engine counts micro-batches; otherwise the caller does."
    )

    # Number formats
    fp16: precision.DeepSpeedFP16Config = block(precision.DeepSpeedFP16Config)
    bf16: precision.DeepSpeedBF16Config = block(precision.DeepSpeedBF16Config)
    data_types: precision.DataTypesConfig = block(precision.DataTypesConfig)
    torch_autocast: precision.TorchAutocastConfig = block(precision.TorchAutocastConfig)
    amp: precision.AmpConfig = block(precision.AmpConfig)
    msamp: features.OpenFeatureConfig = block(
        features.OpenFeatureConfig, "MS-AMP (written by accelerate)."
    )

    # ZeRO
    zero_optimization: zero.DeepSpeedZeroConfig = block(zero.DeepSpeedZeroConfig)
    zero_allow_untested_optimizer: Bool = option(
        False, "Try an unknown optimizer on small tensors, and use it with ZeRO if it can be."
    )
    zero_force_ds_cpu_optimizer: Bool = option(
        True, "Offloading insists on an optimizer of deepspeed.ops."
    )

    # Watching a run
    steps_per_print: Interval = option(
        None, "Steps between two progress lines; null or infinity: never."
    )
    wall_clock_breakdown: Bool = option(False, "Time forward, backward and step.")
    memory_breakdown: Bool = option(False, "Log memory at each phase.")
    dump_state: Bool = option(False, "Log the configuration at start.")
    log_level: Annotated[str | None, BeforeValidator(_log_level)] = option(
        None, 'Level of the log: "debug", "info", "warning", "error" or "critical".'
    )
    timers: observe.TimersConfig = block(observe.TimersConfig)
    comms_logger: observe.CommsLoggerConfig = block(observe.CommsLoggerConfig)
    verify: observe.VerifyConfig = block(observe.VerifyConfig)
    flops_profiler: observe.DeepSpeedFlopsProfilerConfig = block(
        observe.DeepSpeedFlopsProfilerConfig
    )
    tensorboard: observe.TensorBoardConfig = block(observe.TensorBoardConfig)
    wandb: observe.WandbConfig = block(observe.WandbConfig)
    csv_monitor: observe.CSVConfig = block(observe.CSVConfig)
    comet: observe.CometConfig = block(observe.CometConfig)
    watch: observe.WatchConfig = block(observe.WatchConfig)

    # Data
    dataloader_drop_last: Bool = option(False, "Drop the last incomplete batch.")
    data_efficiency: features.DataEfficiencyConfig = block(features.DataEfficiencyConfig)
    curriculum_learning: features.CurriculumConfig = block(features.CurriculumConfig)

    # Checkpoints
    checkpoint: CheckpointConfig = block(CheckpointConfig)
    nebula: features.DeepSpeedNebulaConfig = block(features.DeepSpeedNebulaConfig)
    datastates_ckpt: features.OpenFeatureConfig = block(
        features.OpenFeatureConfig, "DataStates checkpoints."
    )

    # Parallelism
    pipeline: features.PipelineConfig = block(features.PipelineConfig)
    tensor_parallel: features.TPTrainingConfig = block(features.TPTrainingConfig)
    inference: dict[str, Any] | None = option(
        None, "Inference engine.", needs="the inference engine"
    )
    expert_parallel: features.ExpertParallelConfig = block(features.ExpertParallelConfig)
    use_data_before_expert_parallelism: Bool = option(False, "Order of data and expert ranks.")
    sequence_parallel_size: Int | None = option(
        None, "Ranks that one sequence is split over.", ge=1
    )
    data_parallel_size: Int | None = option(
        None, "Data-parallel ranks beside sequence parallelism.", ge=1
    )
    elasticity: features.ElasticityConfig = block(features.ElasticityConfig)

    # Memory and compilation
    activation_checkpointing: features.DeepSpeedActivationCheckpointingConfig = block(
        features.DeepSpeedActivationCheckpointingConfig
    )
    aio: features.AioConfig = block(features.AioConfig)
    compile: features.CompileConfig = block(features.CompileConfig)
    graph_harvesting: Bool = option(False, "CUDA graphs of repeated kernels.")
    vocabulary_size: Int | None = option(
        None, "Vocabulary size; a multiple of 8 uses tensor cores.", ge=1
    )

    # Other features
    hybrid_engine: features.HybridEngineConfig = block(features.HybridEngineConfig)
    autotuning: features.OpenFeatureConfig = block(features.OpenFeatureConfig, "Autotuning.")
    progressive_layer_drop: features.ProgressiveLayerDropConfig = block(
        features.ProgressiveLayerDropConfig
    )
    eigenvalue: features.EigenvalueConfig = block(features.EigenvalueConfig)
    quantize_training: features.OpenFeatureConfig = block(
        features.OpenFeatureConfig, "Quantized training of old."
    )
    compression_training: dict[str, Any] | None = option(None, "Compression.")
    weight_quantization: dict[str, Any] | None = option(None, "Weight quantization.")
    sparse_attention: dict[str, Any] | None = option(None, "Sparse attention.")

    model_config = ConfigDict(extra="forbid")

    _dtypes = field_validator("communication_data_type", "seq_parallel_communication_data_type")(
        precision.checked_dtype_name
    )

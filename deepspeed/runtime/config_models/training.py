"""The root of the configuration, one field per top-level JSON key, and the blocks of its number
formats, optimizer, schedule and checkpoints.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, field_validator
from pydantic_core import PydanticCustomError

from deepspeed.runtime.config_models import features, zero
from deepspeed.runtime.config_models.base import (
    Bool,
    Count,
    DeepSpeedConfigModel,
    Float,
    Interval,
    Natural,
    Number,
    Size,
    Text,
    block,
    option,
    plain_number,
)
from deepspeed.runtime.config_utils import DeepSpeedConfigError, parse_dtype
from deepspeed.runtime.constants import CHECKPOINT_TAG_VALIDATION_MODES
from deepspeed.utils.logging import log_levels


def checked_dtype_name(value: str | None) -> str | None:
    """Return what names a dtype, or is None."""
    try:
        parse_dtype(value)
    except DeepSpeedConfigError as error:
        raise PydanticCustomError("wrong_type", '"fp32", "fp16", "bf16" or null') from error
    return value


class DeepSpeedFP16Config(DeepSpeedConfigModel):
    """Training in fp16 with loss scaling."""

    enabled: Bool = option(False, "Train in fp16.")
    auto_cast: Bool = option(False, "Cast the floating-point inputs of forward to fp16.")
    loss_scale: Float = option(0.0, "Static loss scale; 0 chooses dynamic scaling.", ge=0)
    initial_scale_power: Natural = option(16, "Dynamic scaling starts at 2 to this power.")
    loss_scale_window: Count = option(1000, "Clean steps after which the dynamic scale doubles.")
    hysteresis: Count = option(2, "Overflows needed before the dynamic scale is halved.")
    consecutive_hysteresis: Bool = option(False, "Refill the hysteresis on clean steps too.")
    min_loss_scale: Number = option(1, "Least dynamic scale, at which overflow is an error.", ge=0)
    fp16_master_weights_and_grads: Bool = option(
        False, "Master weights and gradients in fp16, moments in fp32 (stages 1 to 3)."
    )

    @property
    def dynamic(self) -> bool:
        """Whether the loss scale adapts."""
        return self.loss_scale == 0

    def initial_dynamic_scale(self) -> int:
        """Return the scale that dynamic scaling starts with."""
        return 1 << self.initial_scale_power

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        """Return the keyword arguments of ``DynamicLossScaler``."""
        return {
            "init_scale": self.initial_dynamic_scale(),
            "scale_window": self.loss_scale_window,
            "min_scale": self.min_loss_scale,
            "delayed_shift": self.hysteresis,
            "consecutive_hysteresis": self.consecutive_hysteresis,
        }


class DeepSpeedBF16Config(DeepSpeedConfigModel):
    """Training in bf16 with fp32 master weights."""

    enabled: Bool = option(False, "Train in bf16.")
    immediate_grad_update: Bool = option(False, "Add each gradient to the fp32 sum as it is made.")
    check_grad_overflow: Bool = option(True, "Skip the step of all if a gradient is not finite.")
    bf16_master_weights_and_grads: Bool = option(
        False, "Master weights and gradients in bf16 (stages 1 to 3)."
    )
    bf16_optimizer_states: Bool = option(
        False, "Moments in bf16 too, with `bf16_master_weights_and_grads`."
    )
    stochastic_rounding: Bool = option(
        False, "Round masters and moments in bf16 at random, not to the nearest value."
    )


class DataTypesConfig(DeepSpeedConfigModel):
    """Types of intermediate buffers: "fp32", "fp16", "bf16" or null."""

    grad_accum_dtype: Text | None = option(None, "Type that gradients add up in; null: their own.")
    param_dtype: Text | None = option(None, "Type of parameters, as the enabled precision says.")
    buffer_dtype: Text | None = option(
        None, "Type that module buffers are cast to; null: each keeps the type it was made in."
    )

    _check = field_validator("grad_accum_dtype", "param_dtype", "buffer_dtype")(checked_dtype_name)


class TorchAutocastConfig(DeepSpeedConfigModel):
    """torch.autocast around forward."""

    enabled: Bool = option(False, "Run forward under torch.autocast.")
    dtype: Text | None = option(None, "Autocast type; null: torch's default for the device.")
    lower_precision_safe_modules: list[Text] | None = option(
        None,
        "Class paths of modules whose gradients may be communicated in the autocast type; null: a "
        "built-in list.",
    )

    _check = field_validator("dtype")(checked_dtype_name)


class AmpConfig(DeepSpeedConfigModel):
    """NVIDIA Apex AMP; its remaining keys are Apex's."""

    model_config = ConfigDict(extra="allow")

    enabled: Bool = option(False, "Use NVIDIA Apex AMP.")


WRITER_TYPES = ("TORCH", "PYTHON", "FAST", "DCP", "MOCK")


def _tag_validation(value: object) -> str:
    if not isinstance(value, str) or value.upper() not in CHECKPOINT_TAG_VALIDATION_MODES:
        raise PydanticCustomError("wrong_mode", '"Warn", "Ignore" or "Fail"')
    return value.upper()


def _log_level(value: object) -> object:
    if value is not None and str(value).lower() not in log_levels:
        raise PydanticCustomError(
            "wrong_level",
            "{levels} or null",
            {"levels": ", ".join(f'"{name}"' for name in log_levels)},
        )
    return value


def _params(value: object) -> object:
    if not isinstance(value, dict):
        return {} if value is None else value
    return {key: plain_number(item) for key, item in value.items()}


Params = Annotated[dict[str, Any], BeforeValidator(_params)]


class ReproducibilityConfig(DeepSpeedConfigModel):
    """Equal bits whatever ranks there are; this project's own."""

    world_size_invariant: Bool = option(
        False, "Sum gradients and norms in an order that no number of ranks can change."
    )
    seed_forwards: Bool = option(
        True, "Seed random numbers before each forward by seed, step and micro-batch."
    )
    seed: Natural = option(1234, "Seed of forwards.")
    digest_every: Natural = option(
        0, "Steps from one digest in the record of `watch` to the next; 0: none."
    )


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

    type: Text | None = option(None, "A class of runtime.lr_schedules or torch.optim.lr_scheduler.")
    params: Params = option({}, "Keyword arguments of the schedule.")


class ParallelWriteConfig(DeepSpeedConfigModel):
    """Writing checkpoints in parallel."""

    pipeline_stage: Bool = option(False, "Let data ranks of a pipeline stage share the writing.")


def _writer_type(value: object) -> str:
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
    decoupled: Bool = option(False, "Copy to host memory, and write while training goes on.")
    io_buffer_size: Size = option(
        16 << 20, 'Bytes of a buffer of a file being written; "dcp" buffers itself.', ge=1
    )
    io_buffer_double: Bool = option(
        True, "Fill one buffer while threads write and sum the other; a decoupled writer has one."
    )
    show_statistics: Bool = option(False, "Log size and speed of each file.")
    data_parallel: Text | None = option(None, "Ranks that share one file.")
    io_multiplier: Count = option(1, "How often each byte is written.")


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
    use_node_local_storage: Bool = option(False, "Every node has a checkpoint folder of its own.")
    parallel_write: ParallelWriteConfig = block(ParallelWriteConfig)
    checkpoint_serialization: Bool = option(True, "Write torch's zip format; false: the older one.")
    verify: Literal["full", "sizes", "off"] = option(
        "full",
        'What loading checks against the manifest first: "full": every file\'s checksum, "sizes": '
        'all but those, "off": nothing.',
    )
    open_window: Literal["restore", "discard", "repeat"] = option(
        "restore",
        "What loading does with a checkpoint that was saved inside an accumulation window: "
        '"restore" its gradients, which an equal run can, or "discard" them and begin the window '
        'anew, or "repeat" it, with its samples once more (with '
        "reproducibility.world_size_invariant).",
    )
    writer: CheckpointWriterConfig | None = option(
        None, 'How files are written; null: in the foreground, as with type "torch".'
    )
    keep_last: Count | None = option(
        None,
        "Remove the oldest published checkpoints of the folder when there are more than so many; "
        "null keeps all.",
    )


class TrainingConfig(DeepSpeedConfigModel):
    """The configuration of training."""

    # Batch
    train_batch_size: Count | None = option(None, "Samples per optimizer step over all ranks.")
    train_micro_batch_size_per_gpu: Count | None = option(None, "Samples per forward on one rank.")
    gradient_accumulation_steps: Count | None = option(None, "Micro-batches per optimizer step.")

    # Optimizer and schedule
    optimizer: OptimizerConfig | None = option(None, "The optimizer that the engine builds.")
    scheduler: SchedulerConfig | None = option(None, "The schedule that the engine builds.")
    gradient_clipping: Float = option(1.0, "Largest global gradient norm; 0: no clipping.", ge=0)

    # Gradient reduction
    communication_data_type: Text | None = option(None, 'Type reduced in: "fp32", "fp16", "bf16".')
    seq_parallel_communication_data_type: Text = option("fp32", "Sequence-parallel ranks' type.")
    prescale_gradients: Bool = option(False, "Divide gradients before the reduction, not after.")
    gradient_predivide_factor: Float = option(
        1.0,
        "The part divided before the reduction, without prescale_gradients. Not given, fp16 takes "
        "a power of two near the root of the number of ranks.",
        gt=0,
    )
    gradient_allreduce_op: Literal["mean", "sum"] = option("mean", "Average or add over ranks.")
    sparse_gradients: Bool = option(False, "Reduce gradients of sparse embeddings as sparse.")
    disable_allgather: Bool = option(False, "Broadcast updated parameters, not gather them.")
    managed_gradient_accumulation: Bool = option(True, "Micro-batches are counted for the caller.")

    reproducibility: ReproducibilityConfig = block(ReproducibilityConfig)

    # Number formats
    fp16: DeepSpeedFP16Config = block(DeepSpeedFP16Config)
    bf16: DeepSpeedBF16Config = block(DeepSpeedBF16Config)
    data_types: DataTypesConfig = block(DataTypesConfig)
    torch_autocast: TorchAutocastConfig = block(TorchAutocastConfig)
    amp: AmpConfig = block(AmpConfig)
    msamp: features.OpenFeatureConfig = block(features.OpenFeatureConfig, "MS-AMP (of accelerate).")

    # ZeRO
    zero_optimization: zero.DeepSpeedZeroConfig = block(zero.DeepSpeedZeroConfig)
    zero_allow_untested_optimizer: Bool = option(
        False, "Try an unknown optimizer on small tensors, and use it with ZeRO if it can be."
    )
    zero_force_ds_cpu_optimizer: Bool = option(True, "Offload deepspeed.ops' optimizers only.")

    # Watching a run
    steps_per_print: Interval = option(None, "Steps from line to line; null or infinity: never.")
    wall_clock_breakdown: Bool = option(False, "Time forward, backward and step.")
    memory_breakdown: Bool = option(False, "Log memory at each phase.")
    dump_state: Bool = option(False, "Log the configuration at start.")
    log_level: Annotated[str | None, BeforeValidator(_log_level)] = option(
        None, 'Level of the log: "debug", "info", "warning", "error" or "critical".'
    )
    timers: features.TimersConfig = block(features.TimersConfig)
    comms_logger: features.CommsLoggerConfig = block(features.CommsLoggerConfig)
    verify: features.VerifyConfig = block(features.VerifyConfig)
    flops_profiler: features.DeepSpeedFlopsProfilerConfig = block(
        features.DeepSpeedFlopsProfilerConfig
    )
    tensorboard: features.TensorBoardConfig = block(features.TensorBoardConfig)
    wandb: features.WandbConfig = block(features.WandbConfig)
    csv_monitor: features.CSVConfig = block(features.CSVConfig)
    comet: features.CometConfig = block(features.CometConfig)
    watch: features.WatchConfig = block(features.WatchConfig)

    # Data
    dataloader_drop_last: Bool = option(False, "Drop the last incomplete batch.")
    data_efficiency: features.DataEfficiencyConfig = block(features.DataEfficiencyConfig)
    curriculum_learning: features.CurriculumConfig = block(features.CurriculumConfig)

    # Checkpoints
    checkpoint: CheckpointConfig = block(CheckpointConfig)
    nebula: features.DeepSpeedNebulaConfig = block(features.DeepSpeedNebulaConfig)
    datastates_ckpt: features.OpenFeatureConfig = block(features.OpenFeatureConfig, "DataStates.")

    # Parallelism
    pipeline: features.PipelineConfig = block(features.PipelineConfig)
    tensor_parallel: features.TPTrainingConfig = block(features.TPTrainingConfig)
    inference: dict[str, Any] | None = option(None, "Inference.", needs="the inference engine")
    expert_parallel: features.ExpertParallelConfig = block(features.ExpertParallelConfig)
    use_data_before_expert_parallelism: Bool = option(False, "Order of data and expert ranks.")
    sequence_parallel_size: Count | None = option(None, "Ranks that one sequence is split over.")
    data_parallel_size: Count | None = option(None, "Data ranks beside those of sequences.")
    elasticity: features.ElasticityConfig = block(features.ElasticityConfig)

    # Memory and compilation
    activation_checkpointing: features.DeepSpeedActivationCheckpointingConfig = block(
        features.DeepSpeedActivationCheckpointingConfig
    )
    aio: features.AioConfig = block(features.AioConfig)
    compile: features.CompileConfig = block(features.CompileConfig)
    graph_harvesting: Bool = option(False, "CUDA graphs of repeated kernels.")
    vocabulary_size: Count | None = option(None, "Vocabulary; a multiple of 8 uses tensor cores.")

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
        checked_dtype_name
    )

"""Blocks of watching a run, and of features. Those that ``refusals`` refuses when they are enabled
are typed so that disabled ones are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from deepspeed.comm.constants import COMMS_LOGGER
from deepspeed.runtime.config_models.base import (
    Bool,
    Count,
    DeepSpeedConfigModel,
    Float,
    Int,
    Natural,
    Size,
    Text,
    block,
    option,
)
from deepspeed.runtime.config_models.zero import NVME


class TensorBoardConfig(DeepSpeedConfigModel):
    """TensorBoard monitor."""

    enabled: Bool = option(False, "Write to TensorBoard.")
    output_path: Text = option("", "Folder of the event files.")
    job_name: Text = option("DeepSpeedJobName", "Name of the run.")


class WandbConfig(DeepSpeedConfigModel):
    """Weights & Biases monitor."""

    enabled: Bool = option(False, "Write to Weights & Biases.")
    group: Text | None = option(None, "Group of the run.")
    team: Text | None = option(None, "Team of the run.")
    project: Text = option("deepspeed", "Project of the run.")


class CSVConfig(DeepSpeedConfigModel):
    """CSV monitor."""

    enabled: Bool = option(False, "Write CSV files.")
    output_path: Text = option("", "Folder of the CSV files.")
    job_name: Text = option("DeepSpeedJobName", "Name of the run.")


class WatchConfig(DeepSpeedConfigModel):
    """Record and page of a run; this project's own."""

    enabled: Bool = option(False, "Record every step, and draw a page of it while training.")
    output_path: Text = option("", "Folder of all runs that are compared.")
    job_name: Text = option("DeepSpeedJobName", "Name of the run.")
    refresh_seconds: Float = option(
        5.0, "Least seconds between two drawings of the page; 0: never, `ds_watch` draws it.", ge=0
    )


class CometConfig(DeepSpeedConfigModel):
    """Comet monitor."""

    enabled: Bool = option(False, "Write to Comet.")
    samples_log_interval: Count = option(100, "Samples between two points.")
    project: Text | None = option(None, "Project of the experiment.")
    workspace: Text | None = option(None, "Workspace of the experiment.")
    api_key: Text | None = option(None, "API key.")
    experiment_name: Text | None = option(None, "Name of the experiment.")
    experiment_key: Text | None = option(None, "Key of the experiment.")
    online: Bool | None = option(None, "Log online; otherwise to disk.")
    mode: Text | None = option(None, '"get", "create" or "get_or_create".')


class DeepSpeedMonitorConfig(DeepSpeedConfigModel):
    """The monitor blocks together; upstream's grouping, not a JSON block of its own."""

    tensorboard: TensorBoardConfig = block(TensorBoardConfig)
    comet: CometConfig = block(CometConfig)
    wandb: WandbConfig = block(WandbConfig)
    csv_monitor: CSVConfig = block(CSVConfig)
    watch: WatchConfig = block(WatchConfig)

    @property
    def enabled(self) -> bool:
        """Whether any monitor is on."""
        return self.takes_events or self.watch.enabled

    @property
    def takes_events(self) -> bool:
        """Whether one is on that is given the engine's numbers as events."""
        return any(
            block.enabled for block in (self.tensorboard, self.comet, self.wandb, self.csv_monitor)
        )


class DeepSpeedFlopsProfilerConfig(DeepSpeedConfigModel):
    """Profiler of floating-point operations."""

    enabled: Bool = option(False, "Profile one step.")
    recompute_fwd_factor: Float = option(0.0, "Share of forward that backward repeats.", ge=0)
    profile_step: Natural = option(1, "The step to profile.")
    module_depth: Int = option(-1, "Depth of modules shown; -1: all.")
    top_modules: Count = option(1, "Modules shown per depth.")
    detailed: Bool = option(True, "Show the annotated model.")
    output_file: Text | None = option(None, "File to write to; null: the log.")


class CommsLoggerConfig(DeepSpeedConfigModel):
    """Log of collectives."""

    enabled: Bool = option(False, "Record collectives: name, count, bytes, latency, bandwidth.")
    prof_all: Bool = option(True, "Record all operations; otherwise those of prof_ops.")
    prof_ops: list[Text] = option([], "Names of the operations to record.")
    verbose: Bool = option(False, "Print each record.")
    debug: Bool = option(False, "Add the calling function to the name.")


class DeepSpeedCommsConfig:
    """Communication options of a configuration dict: whether the section is there, whatever its
    ``enabled`` says, and if so its `comms_logger`.
    """

    def __init__(self, ds_config: Mapping[str, Any]) -> None:
        self.comms_logger_enabled = COMMS_LOGGER in ds_config
        if self.comms_logger_enabled:
            self.comms_logger = CommsLoggerConfig(**ds_config[COMMS_LOGGER])


class DeepSpeedThroughputTimerConfig(DeepSpeedConfigModel):
    """Timer of samples per second."""

    enabled: Bool = option(True, "Measure throughput.")
    synchronized: Bool = option(
        True, "Count until the device has done its work; false: until the host has given it out."
    )


class VerifyConfig(DeepSpeedConfigModel):
    """Checks of gradient synchronization while training; DS_VERIFY switches them on too."""

    ledger: Bool = option(False, "Compare the gradient that is used with all that autograd made.")
    collectives: Bool = option(False, "Compare collectives with other ranks' before they start.")
    collectives_timeout: Float = option(
        30.0, "Seconds after which a rank that does not come to a collective is missing.", gt=0
    )
    lone_gather_report: Float = option(
        60.0,
        "Seconds after which a wait for ranks that have not come (a gather of ZeRO stage 3, the "
        "reduction of gradients, saving, loading, ...) is written to the log; 0: never.",
        ge=0,
    )
    masters: Bool = option(
        False,
        "Compare the model with its rounded masters before each step, element by element, so that "
        "a write that torch does not count (`param.data`) is taken in.",
    )
    poison: Bool = option(
        False,
        "ZeRO stage 3: overwrite the memory of parameters that are let go by NaN, so that a read "
        "of it shows.",
    )
    streams: Bool = option(False, "Look for races and lifetime errors between streams.")


class TimersConfig(DeepSpeedConfigModel):
    """Timers."""

    throughput: DeepSpeedThroughputTimerConfig = block(DeepSpeedThroughputTimerConfig)


class OpenFeatureConfig(DeepSpeedConfigModel):
    """A feature whose remaining keys are its own: they have no effect while it is disabled."""

    model_config = ConfigDict(extra="allow")

    enabled: Bool = option(False, "Switch the feature on.")


class DeepSpeedActivationCheckpointingConfig(DeepSpeedConfigModel):
    """How ``deepspeed.checkpointing`` recomputes; the host also for ``torch.utils.checkpoint``."""

    partition_activations: Bool = option(False, "Split activations over model-parallel ranks.")
    number_checkpoints: Int | None = option(None, "Checkpoints, for the contiguous buffer.")
    contiguous_memory_optimization: Bool = option(False, "Save activations in one buffer.")
    cpu_checkpointing: Bool = option(False, "Save inputs in CPU memory, torch's too.")
    nvme_path: Text | None = option(None, "From there to files of this folder; an extension.")
    profile: Bool = option(False, "Time each checkpoint.")
    synchronize_checkpoint_boundary: Bool = option(False, "Wait for the stream at each checkpoint.")


class AioConfig(DeepSpeedConfigModel):
    """File I/O of state in files; `ds_nvme_tune` measures what suits a folder."""

    block_size: Size = option(1048576, "Bytes of one request.", ge=1, needs=NVME)
    queue_depth: Count = option(8, "Requests in flight.", needs=NVME)
    intra_op_parallelism: Count = option(1, "Threads per transfer.", needs=NVME)
    single_submit: Bool = option(False, "Submit requests one by one.", needs=NVME)
    overlap_events: Bool = option(True, "Submit and complete at once.", needs=NVME)
    use_gds: Bool = option(False, "GPUDirect Storage.", needs="GPUDirect Storage")


class DeepSpeedNebulaConfig(DeepSpeedConfigModel):
    """Azure Nebula checkpoints."""

    enabled: Bool = option(False, "Save through Nebula.")
    persistent_storage_path: Text | None = option(None, "Folder of the checkpoints.")
    persistent_time_interval: Int = option(100, "Seconds between persistent copies.")
    num_of_version_in_retention: Int = option(2, "Copies kept.")
    enable_nebula_load: Bool = option(True, "Load through Nebula.")
    nebula_load_path: Text | None = option(None, "Folder to load from.")


class PipelineConfig(DeepSpeedConfigModel):
    """Pipeline parallelism; read by the pipeline engine only."""

    stages: int | str = option("auto", "Number of stages; the PipelineModule's, or an error.")
    partition: Text = option("best", "How layers are split; PipelineModule(partition_method=...).")
    seed_layers: Bool = option(False, "Seed each layer alone; PipelineModule(seed_layers=True).")
    activation_checkpoint_interval: Natural = option(
        0, "Layers between activation checkpoints; 0: as the PipelineModule says."
    )
    pipe_partitioned: Bool = option(False, "Send activations in pieces over tensor-parallel ranks.")
    grad_partitioned: Bool = option(False, "Send gradients in pieces over tensor-parallel ranks.")
    use_reentrant: Bool = option(True, "Reentrant activation checkpoints.")
    schedule: Literal["auto", "1f1b", "interleaved", "zero_bubble"] = option(
        "auto",
        "Order of forward and backward; auto: interleaved with several model chunks per stage, "
        "otherwise 1f1b.",
    )


class TPConfig(DeepSpeedConfigModel):
    """Size of tensor parallelism."""

    tp_size: Count = option(1, "Ranks that one layer is split over.")
    tp_grain_size: Count = option(1, "Multiple that split sizes are rounded to.")
    mpu: Any = option(None, "Model-parallel unit.")
    tp_group: Any = option(None, "Process group.")


class TPTrainingConfig(DeepSpeedConfigModel):
    """Automatic tensor parallelism in training."""

    dtype: Any = option("fp16", "Type of the model; if given, that of the enabled precision block.")
    autotp_size: Natural = option(0, "Ranks that one layer is split over; 0 or 1: off.")
    tp_overlap_comm: Bool = option(
        False,
        "In backward, sum the gradient of a column-parallel layer's input while that of its weight "
        "is computed.",
    )
    tensor_parallel: TPConfig = block(TPConfig, alias="tp")
    injection_policy_tuple: Any = option(None, "Layers to split.")
    partition_config: dict[str, Any] | None = option(
        None, "Which layers are split and how, by patterns; null: found from their names."
    )
    preset_model: Text | None = option(None, "Family of the model; null: its config.model_type.")
    keep_module_on_host: Bool = option(False, "Keep the module in CPU memory.")
    replace_with_kernel_inject: Bool = option(False, "Inject kernels.", alias="kernel_inject")


class ExpertParallelConfig(OpenFeatureConfig):
    """Automatic expert parallelism: a model's own experts, spread over ranks."""

    enabled: Bool = option(False, "Spread the experts of a transformers model over ranks.")
    autoep_size: Count = option(1, "Ranks over which they are spread; 1: none is moved.")

    @model_validator(mode="after")
    def _check(self) -> ExpertParallelConfig:
        extra = sorted(self.model_extra or {})
        if self.enabled and extra:
            raise PydanticCustomError(
                "unknown_key",
                "no such key beside autoep_size: {keys}; remove it, experts find themselves",
                {"keys": ", ".join(extra)},
            )
        if self.autoep_size > 1 and "enabled" not in self.model_fields_set:
            raise PydanticCustomError(
                "no_switch",
                'autoep_size {size} without "enabled"; set "enabled" to true, or to false',
                {"size": self.autoep_size},
            )
        return self


class ElasticityConfig(DeepSpeedConfigModel):
    """Batch sizes that fit many world sizes."""

    enabled: Bool = option(False, "Choose batch sizes for many world sizes, without batch keys.")
    max_train_batch_size: Count = option(2000, "Largest global batch, in samples; required.")
    micro_batch_sizes: list[Int] = option([2, 4, 6], "Micro-batch sizes to choose from; required.")
    min_gpus: Count = option(1, "Fewest ranks; version 0.2 rounds down to whole nodes.")
    max_gpus: Count = option(10000, "Most ranks; version 0.2 rounds down to whole nodes.")
    num_gpus_per_node: Count = option(1, "Ranks per node (version 0.2).")
    model_parallel_size: Count = option(1, "Ranks that hold one copy of the model (version 0.2).")
    min_time: Natural = option(
        0,
        "Shortest time between two changes of world size, in minutes; for schedulers that read it.",
        needs="a resource scheduler that reads it",
    )
    prefer_larger_batch: Bool = option(True, "Of equal choices take the larger batch.")
    ignore_non_elastic_batch_info: Bool = option(False, "Override batch keys beside this block.")
    version: Float = option(0.2, "Algorithm: 0.1 (ranks) or 0.2 (whole nodes, model parallelism).")


class CompileConfig(DeepSpeedConfigModel):
    """What engine.compile() does, and DeepCompile, compiler passes over the training graph."""

    disable: Bool = option(False, "Let engine.compile() leave the model as it is.")
    backend: Text | None = option(
        None, "Backend of an engine.compile() that names none; null: the device's."
    )
    kwargs: dict[str, Any] = option(
        {}, "Arguments of torch.compile, below those of engine.compile(compile_kwargs=...)."
    )
    deepcompile: Bool = option(False, "Use DeepCompile in engine.compile().")
    free_activation: Bool = option(False, "Free activations early.")
    free_activation_threshold: Size = option(10485760, "Bytes of the smallest activation to free.")
    offload_activation: Bool = option(False, "Offload activations.")
    offload_activation_pin_memory: Bool = option(True, "Offload them to page-locked memory.")
    offload_opt_states: Bool = option(False, "Offload optimizer state.")
    double_buffer: Bool = option(True, "Two communication buffers.")
    symmetric_memory: Bool = option(False, "Symmetric memory for collectives.")
    debug_log: Bool = option(False, "Log the passes.")
    offload_parameters: Bool = option(False, "Offload parameters.")
    sync_before_reduce: Bool = option(False, "Synchronize before reductions.")
    sync_after_reduce: Bool = option(False, "Synchronize after reductions.")
    sync_before_allgather: Bool = option(False, "Synchronize before gathers.")
    sync_after_allgather: Bool = option(False, "Synchronize after gathers.")
    keep_int_input_tensors: Bool = option(True, "Keep integer inputs for backward.")
    keep_all_input_tensors: Bool = option(False, "Keep all inputs for backward.")
    passes: list[Text] | None = option(None, "Passes to run.")


class HybridEngineConfig(DeepSpeedConfigModel):
    """Engine that also generates (RLHF)."""

    enabled: Bool = option(False, "Use the hybrid engine.")
    max_out_tokens: Int = option(512, "Most tokens generated.")
    inference_tp_size: Int = option(1, "Tensor parallelism of generation.")
    release_inference_cache: Bool = option(False, "Free the cache after generation.")
    pin_parameters: Bool = option(True, "Page-locked parameters.")
    tp_gather_partition_size: Int = option(8, "Layers gathered at a time.")
    enable_cuda_graph: Bool = option(False, "CUDA graphs.")


class CurriculumConfig(DeepSpeedConfigModel):
    """Data that grows more difficult with the steps: longer sequences."""

    enabled: Bool = option(False, "Let the difficulty follow the schedule.")
    curriculum_type: Text = option(
        "seqlen",
        '"seqlen": the model is given the length as curriculum_seqlen; other names: the script '
        "asks engine.curriculum_scheduler_legacy.",
    )
    min_difficulty: Count | None = option(None, "Difficulty of the first step.")
    max_difficulty: Count | None = option(None, "Difficulty at the end.")
    schedule_type: Text | None = option(
        None, '"fixed_linear", "fixed_root", "fixed_discrete", "custom".'
    )
    schedule_config: dict[str, Any] = option(
        {},
        "total_curriculum_step and difficulty_step (fixed_linear, fixed_root), root_degree "
        "(fixed_root), difficulty and max_step (fixed_discrete).",
    )


class SamplingCurriculumConfig(DeepSpeedConfigModel):
    """Samples chosen by how difficult they are."""

    enabled: Bool = option(False, "Choose samples by metrics.")
    data_cluster_path: Text | None = option(
        None, "Folder of upstream's lists of samples.", needs="lists of samples in files"
    )
    curriculum_metrics: dict[str, dict[str, Any]] = option(
        {},
        "By name: index_to_sample_path, index_to_metric_path, difficulty_type, clustering_type, "
        "min_difficulty, max_difficulty, schedule_type, schedule_config (docs/data.md).",
    )


class DataSamplingConfig(DeepSpeedConfigModel):
    """Which samples of `training_data` come when."""

    enabled: Bool = option(False, "Let the sampler order training_data.")
    num_epochs: Count = option(1000, "Times that the data is gone through.")
    num_workers: Natural = option(0, "Worker processes of the loader.")
    pin_memory: Bool = option(False, "Load into page-locked memory.")
    curriculum_learning: SamplingCurriculumConfig = block(SamplingCurriculumConfig)
    dynamic_batching: OpenFeatureConfig = block(OpenFeatureConfig, "Batches by their tokens.")


class DataEfficiencyConfig(DeepSpeedConfigModel):
    """Data sampling (curriculum) and routing (random layer-token dropping)."""

    enabled: Bool = option(False, "Switch data efficiency on.")
    seed: Natural = option(1234, "Seed of the sampler.")
    data_sampling: DataSamplingConfig = block(DataSamplingConfig)
    data_routing: OpenFeatureConfig = block(OpenFeatureConfig, "Random layer-token dropping.")


class ProgressiveLayerDropConfig(DeepSpeedConfigModel):
    """Progressive layer drop."""

    enabled: Bool = option(False, "Drop layers progressively.")
    theta: Float = option(1.0, "Share of layers kept at the end.")
    gamma: Float = option(0.001, "How fast the share is reached.")


class EigenvalueConfig(DeepSpeedConfigModel):
    """Eigenvalues of layers, for quantized training."""

    enabled: Bool = option(False, "Compute eigenvalues.")
    verbose: Bool = option(False, "Print them.")
    max_iter: Count = option(100, "Most iterations.")
    tol: Float = option(1e-2, "Tolerance.")
    stability: Float = option(1e-6, "Added to the denominator.")
    gas_boundary_resolution: Int = option(1, "Boundaries between two computations.")
    layer_name: Text = option("bert.encoder.layer", "Where the layers are.")
    layer_num: Int = option(0, "Number of layers.")

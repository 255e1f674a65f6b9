"""Blocks of features that this release refuses when enabled (``refusals``), typed so that disabled
ones are read.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from deepspeed.runtime.config_models.base import (
    Bool,
    DeepSpeedConfigModel,
    Float,
    Int,
    Size,
    Text,
    block,
    option,
)


class OpenFeatureConfig(DeepSpeedConfigModel):
    """A feature whose remaining keys are its own: they have no effect while it is disabled."""

    model_config = ConfigDict(extra="allow")

    enabled: Bool = option(False, "Switch the feature on.")


class DeepSpeedActivationCheckpointingConfig(DeepSpeedConfigModel):
    """How ``deepspeed.checkpointing`` recomputes activations."""

    partition_activations: Bool = option(
        False, "Split saved activations over model-parallel ranks."
    )
    number_checkpoints: Int | None = option(
        None, "Number of checkpoints, for the contiguous buffer."
    )
    contiguous_memory_optimization: Bool = option(False, "Save activations in one buffer.")
    cpu_checkpointing: Bool = option(False, "Save activations in CPU memory.")
    profile: Bool = option(False, "Time each checkpoint.")
    synchronize_checkpoint_boundary: Bool = option(
        False, "Wait for the current stream at each checkpoint."
    )


class AioConfig(DeepSpeedConfigModel):
    """Asynchronous file I/O of NVMe offload."""

    block_size: Size = option(1048576, "Bytes of one request.", ge=1, needs="NVMe offload")
    queue_depth: Int = option(8, "Requests in flight.", ge=1, needs="NVMe offload")
    intra_op_parallelism: Int = option(1, "Threads per transfer.", ge=1, needs="NVMe offload")
    single_submit: Bool = option(False, "Submit requests one by one.", needs="NVMe offload")
    overlap_events: Bool = option(
        True, "Submit and complete at the same time.", needs="NVMe offload"
    )
    use_gds: Bool = option(False, "GPUDirect Storage.", needs="NVMe offload")


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

    stages: int | str = option(
        "auto", "Number of stages; the PipelineModule decides it, another number is an error."
    )
    partition: Text = option(
        "best", "How layers are split; the PipelineModule's partition_method decides it."
    )
    seed_layers: Bool = option(
        False, "Seed each layer by itself; PipelineModule(seed_layers=True) does it."
    )
    activation_checkpoint_interval: Int = option(
        0, "Layers between activation checkpoints; 0: as the PipelineModule says.", ge=0
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

    tp_size: Int = option(1, "Ranks that one layer is split over.", ge=1)
    tp_grain_size: Int = option(1, "Multiple that split sizes are rounded to.", ge=1)
    mpu: Any = option(None, "Model-parallel unit.")
    tp_group: Any = option(None, "Process group.")


class TPTrainingConfig(DeepSpeedConfigModel):
    """Automatic tensor parallelism in training."""

    dtype: Any = option(
        "fp16", "Type of the model; when given, that of the enabled precision block."
    )
    autotp_size: Int = option(0, "Ranks that one layer is split over; 0 or 1: off.", ge=0)
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
    preset_model: Text | None = option(
        None, "Family whose layers the model has; null: as its config.model_type says."
    )
    keep_module_on_host: Bool = option(False, "Keep the module in CPU memory.")
    replace_with_kernel_inject: Bool = option(False, "Inject kernels.", alias="kernel_inject")


class ExpertParallelConfig(OpenFeatureConfig):
    """Automatic expert parallelism: a model's own experts, spread over ranks."""

    enabled: Bool = option(False, "Spread the experts of a transformers model over ranks.")
    autoep_size: Int = option(1, "Ranks over which they are spread; 1: none is moved.", ge=1)

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

    enabled: Bool = option(
        False, "Choose batch sizes that fit many world sizes; no other batch keys beside it."
    )
    max_train_batch_size: Int = option(
        2000, "Largest global batch, in samples; required when enabled.", ge=1
    )
    micro_batch_sizes: list[Int] = option(
        [2, 4, 6], "Micro-batch sizes to choose from; required when enabled."
    )
    min_gpus: Int = option(1, "Fewest ranks; version 0.2 rounds down to whole nodes.", ge=1)
    max_gpus: Int = option(10000, "Most ranks; version 0.2 rounds down to whole nodes.", ge=1)
    num_gpus_per_node: Int = option(1, "Ranks per node (version 0.2).", ge=1)
    model_parallel_size: Int = option(
        1, "Ranks that hold one copy of the model (version 0.2).", ge=1
    )
    min_time: Int = option(
        0,
        "Shortest time between two changes of world size, in minutes; for schedulers that read it.",
        ge=0,
        needs="a resource scheduler that reads it",
    )
    prefer_larger_batch: Bool = option(True, "Of equal choices take the larger batch.")
    ignore_non_elastic_batch_info: Bool = option(
        False, "Override batch keys beside this block instead of refusing them."
    )
    version: Float = option(
        0.2, "Version of the algorithm, 0.1 (ranks) or 0.2 (whole nodes, model parallelism)."
    )


class CompileConfig(DeepSpeedConfigModel):
    """DeepCompile, compiler passes over the training graph."""

    deepcompile: Bool = option(False, "Use DeepCompile in engine.compile().")
    free_activation: Bool = option(False, "Free activations early.")
    free_activation_threshold: Size = option(
        10485760, "Bytes of the smallest activation to free.", ge=0
    )
    offload_activation: Bool = option(False, "Offload activations.")
    offload_activation_pin_memory: Bool = option(
        True, "Page-locked memory for offloaded activations."
    )
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
    min_difficulty: Int | None = option(None, "Difficulty of the first step.", ge=1)
    max_difficulty: Int | None = option(None, "Difficulty at the end.", ge=1)
    schedule_type: Text | None = option(
        None, '"fixed_linear", "fixed_root", "fixed_discrete" or "custom".'
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
    num_epochs: Int = option(1000, "Times that the data is gone through.", ge=1)
    num_workers: Int = option(0, "Worker processes of the loader.", ge=0)
    pin_memory: Bool = option(False, "Load into page-locked memory.")
    curriculum_learning: SamplingCurriculumConfig = block(SamplingCurriculumConfig)
    dynamic_batching: OpenFeatureConfig = block(OpenFeatureConfig, "Batches by their tokens.")


class DataEfficiencyConfig(DeepSpeedConfigModel):
    """Data sampling (curriculum) and routing (random layer-token dropping)."""

    enabled: Bool = option(False, "Switch data efficiency on.")
    seed: Int = option(1234, "Seed of the sampler.", ge=0)
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
    max_iter: Int = option(100, "Most iterations.", ge=1)
    tol: Float = option(1e-2, "Tolerance.")
    stability: Float = option(1e-6, "Added to the denominator.")
    gas_boundary_resolution: Int = option(1, "Boundaries between two computations.")
    layer_name: Text = option("bert.encoder.layer", "Where the layers are.")
    layer_num: Int = option(0, "Number of layers.")

"""Upstream's configuration getters of the engine that are about features: stage 3, offload, number
formats, and what this release refuses when it is switched on.

Each is a thin delegate to the configuration's tree, for scripts that ask; `settings` has those
that training itself is about.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.model_setup import LOWER_PRECISION_SAFE_MODULES
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum

Value = TypeVar("Value")


def setting(read: Callable[[DeepSpeedConfig], Value]) -> Callable[[EngineFeatures], Value]:
    """A method of the engine that returns what `read` takes from its configuration."""

    def method(engine: EngineFeatures) -> Value:
        return read(engine._config)

    return method


def _dumped(read: Callable[[DeepSpeedConfig], Any]) -> Callable[[EngineFeatures], dict[str, Any]]:
    """The same for a block, as a dict."""
    return setting(lambda config: dict(read(config).model_dump()))


class EngineFeatures:
    """Mixin of `DeepSpeedEngine`: upstream's getters of features."""

    _config: DeepSpeedConfig

    # ZeRO

    zero_offload_param = setting(lambda config: config.zero_config.offload_param)
    zero_force_ds_cpu_optimizer = setting(lambda config: config.tree.zero_force_ds_cpu_optimizer)
    zero_sub_group_size = setting(lambda config: config.zero_config.sub_group_size)
    zero_multi_rank_bucket_allreduce = setting(
        lambda config: config.zero_config.use_multi_rank_bucket_allreduce
    )
    zero_max_live_parameters = setting(lambda config: config.zero_config.max_live_parameters)
    zero_max_reuse_distance = setting(lambda config: config.zero_config.max_reuse_distance)
    zero_prefetch_bucket_size = setting(lambda config: config.zero_config.prefetch_bucket_size)
    zero_module_granularity_threshold = setting(
        lambda config: config.zero_config.module_granularity_threshold
    )
    zero_param_persistence_threshold = setting(
        lambda config: config.zero_config.param_persistence_threshold
    )
    zero_model_persistence_threshold = setting(
        lambda config: config.zero_config.model_persistence_threshold
    )
    zero_legacy_stage1 = setting(lambda config: config.zero_config.legacy_stage1)
    zero_save_muon_momentum_buffer_in_memory = setting(
        lambda config: config.zero_config.save_muon_momentum_buffer_in_memory
    )
    zero_hpz_partition_size = setting(lambda config: config.zero_config.zero_hpz_partition_size)
    zero_quantized_weights = setting(lambda config: config.zero_config.zero_quantized_weights)
    zero_quantized_nontrainable_weights = setting(
        lambda config: config.zero_config.zero_quantized_nontrainable_weights
    )
    zero_quantized_gradients = setting(lambda config: config.zero_config.zero_quantized_gradients)
    zeropp_loco_param = setting(lambda config: config.zero_config.zeropp_loco_param)
    zero_log_trace_cache_warnings = setting(
        lambda config: config.zero_config.log_trace_cache_warnings
    )
    zero_allgather_sequential = setting(lambda config: config.zero_config.allgather_sequential)
    is_sanity_checks_enabled = setting(lambda config: config.zero_config.enable_sanity_checks)
    mics_shard_size = setting(lambda config: config.zero_config.mics_shard_size)
    zenflow_config = setting(lambda config: config.zero_config.zenflow)
    is_first_weights_partition_group = setting(lambda config: config.zero_config.stage >= 3)

    def zero_use_cpu_optimizer(self) -> bool:
        """Whether the optimizer steps on the host."""
        return self._offload_device() is not OffloadDeviceEnum.none

    def zero_nvme_offload_optimizer(self) -> bool:
        """Whether optimizer state lies on NVMe."""
        return self._offload_device() is OffloadDeviceEnum.nvme

    def _offload_device(self) -> OffloadDeviceEnum:
        return self._config.zero_config.offload_optimizer_device

    def zero_partial_offload(self) -> float:
        """Share of the optimizer state that is offloaded."""
        offload = self._config.zero_config.offload_optimizer
        return offload.ratio if offload is not None else 1.0

    def super_offload(self) -> bool:
        """Whether SuperOffload is on."""
        offload = self._config.zero_config.offload_optimizer
        return offload is not None and offload.super_offload

    def cpuadam_cores_perc(self) -> float:
        """Share of the host's cores that SuperOffload may use."""
        offload = self._config.zero_config.offload_optimizer
        return offload.cpuadam_cores_perc if offload is not None else 0.9

    # Number formats

    fp16_master_weights_and_gradients = setting(
        lambda config: config.tree.fp16.fp16_master_weights_and_grads
    )
    bf16_master_weights_and_gradients = setting(
        lambda config: config.tree.bf16.bf16_master_weights_and_grads
    )
    bf16_optimizer_states = setting(lambda config: config.tree.bf16.bf16_optimizer_states)
    amp_enabled = setting(lambda config: config.tree.amp.enabled)
    # False without the block, as upstream.
    amp_params = setting(lambda config: config.tree.amp.model_extra or False)
    initial_dynamic_scale = setting(lambda config: config.tree.fp16.initial_dynamic_scale())
    dynamic_loss_scale_args = setting(lambda config: config.tree.fp16.dynamic_loss_scale_args())

    @property
    def sparse_gradients(self) -> bool:
        """The configuration's `sparse_gradients`."""
        return self._config.tree.sparse_gradients

    sparse_gradients_enabled = setting(lambda config: config.tree.sparse_gradients)
    graph_harvesting = setting(lambda config: config.tree.graph_harvesting)

    def torch_autocast_lower_precision_safe_modules(self) -> list[str]:
        """Class paths of modules whose gradients may travel in the autocast dtype."""
        named = self._config.torch_autocast_lower_precision_safe_modules
        if named is not None:
            return list(named)
        return [f"{cls.__module__}.{cls.__qualname__}" for cls in LOWER_PRECISION_SAFE_MODULES]

    # Optimizer, files, log

    optimizer_legacy_fusion = setting(
        lambda config: config.tree.optimizer is not None and config.tree.optimizer.legacy_fusion
    )
    use_node_local_storage = setting(lambda config: config.tree.checkpoint.use_node_local_storage)
    checkpoint_serialization_enabled = setting(
        lambda config: config.tree.checkpoint.checkpoint_serialization
    )
    checkpoint_writer_enabled = setting(lambda config: config.tree.checkpoint.writer is not None)
    log_level = setting(lambda config: config.tree.log_level)
    aio_config = _dumped(lambda config: config.tree.aio)

    # Parallelism and compilation

    tensor_parallel_config = setting(lambda config: config.tree.tensor_parallel)
    autotp_size = setting(lambda config: config.tree.tensor_parallel.autotp_size)
    is_deepcompile_enabled = setting(lambda config: config.tree.compile.deepcompile)
    is_deepcompile_active = is_deepcompile_enabled
    compile_autosp = setting(lambda config: "autosp" in (config.tree.compile.passes or ()))
    compile_autotp = setting(lambda config: "autotp" in (config.tree.compile.passes or ()))

    # What is refused when it is switched on: scripts ask whether it is.

    pld_enabled = setting(lambda config: config.tree.progressive_layer_drop.enabled)
    pld_theta = setting(lambda config: config.tree.progressive_layer_drop.theta)
    pld_gamma = setting(lambda config: config.tree.progressive_layer_drop.gamma)
    pld_params = _dumped(lambda config: config.tree.progressive_layer_drop)
    eigenvalue_enabled = setting(lambda config: config.tree.eigenvalue.enabled)
    eigenvalue_verbose = setting(lambda config: config.tree.eigenvalue.verbose)
    eigenvalue_max_iter = setting(lambda config: config.tree.eigenvalue.max_iter)
    eigenvalue_tol = setting(lambda config: config.tree.eigenvalue.tol)
    eigenvalue_stability = setting(lambda config: config.tree.eigenvalue.stability)
    eigenvalue_gas_boundary_resolution = setting(
        lambda config: config.tree.eigenvalue.gas_boundary_resolution
    )
    eigenvalue_layer_name = setting(lambda config: config.tree.eigenvalue.layer_name)
    eigenvalue_layer_num = setting(lambda config: config.tree.eigenvalue.layer_num)
    data_efficiency_enabled = setting(lambda config: config.tree.data_efficiency.enabled)
    data_efficiency_config = _dumped(lambda config: config.tree.data_efficiency)
    data_sampling_enabled = setting(
        lambda config: config.tree.data_efficiency.data_sampling.enabled
    )
    data_sampling_config = _dumped(lambda config: config.tree.data_efficiency.data_sampling)
    curriculum_learning_enabled = setting(
        lambda config: config.tree.data_efficiency.data_sampling.curriculum_learning.enabled
    )
    curriculum_learning_config = _dumped(
        lambda config: config.tree.data_efficiency.data_sampling.curriculum_learning
    )
    random_ltd_enabled = setting(lambda config: config.tree.data_efficiency.data_routing.enabled)
    autotuning_enabled = setting(lambda config: config.tree.autotuning.enabled)

    def get_pld_theta(self) -> None:
        """Share of layers kept now; None: progressive layer drop is refused."""

    # Data

    curriculum_enabled_legacy = setting(lambda config: config.tree.curriculum_learning.enabled)
    # False while it is off, as upstream.
    curriculum_params_legacy = setting(
        lambda config: (
            config.tree.curriculum_learning.enabled and config.tree.curriculum_learning.model_dump()
        )
    )

    @property
    def sparse_tensor_module_names(self) -> set[str]:
        """Names of modules with sparse gradients: none, `sparse_gradients` is refused."""
        return set()

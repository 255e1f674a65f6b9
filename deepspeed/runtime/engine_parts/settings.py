"""Upstream's configuration getters of the engine; the engine's own code reads the tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch

from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.runtime.config_utils import parse_dtype
from deepspeed.runtime.engine_parts.model_setup import LOWER_PRECISION_SAFE_MODULES
from deepspeed.runtime.gradients.accumulation import AccumulationTracker
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum

Read = Callable[[DeepSpeedConfig], object]


def _as_dict(path: str) -> Read:
    read = attrgetter(path)
    return lambda config: dict(read(config).model_dump())


def _offload(name: str, without: object) -> Read:
    def read(config: DeepSpeedConfig) -> object:
        block = config.zero_config.offload_optimizer
        return getattr(block, name) if block is not None else without

    return read


GETTERS: dict[str, str | Read] = {
    # Batch
    "train_batch_size": "train_batch_size",
    "train_micro_batch_size_per_gpu": "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "get_batch_info": attrgetter(
        "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    ),
    # Precision
    "fp16_enabled": "tree.fp16.enabled",
    "bfloat16_enabled": "tree.bf16.enabled",
    "fp16_auto_cast": lambda config: config.tree.fp16.enabled and config.tree.fp16.auto_cast,
    "dynamic_loss_scale": lambda config: config.tree.fp16.enabled and config.tree.fp16.dynamic,
    "initial_dynamic_scale": lambda config: config.tree.fp16.initial_dynamic_scale(),
    "dynamic_loss_scale_args": lambda config: config.tree.fp16.dynamic_loss_scale_args(),
    "torch_autocast_enabled": "torch_autocast_enabled",
    "torch_autocast_dtype": "torch_autocast_dtype",
    "loss_scale": "tree.fp16.loss_scale",
    "fp16_master_weights_and_gradients": "tree.fp16.fp16_master_weights_and_grads",
    "bf16_master_weights_and_gradients": "tree.bf16.bf16_master_weights_and_grads",
    "bf16_optimizer_states": "tree.bf16.bf16_optimizer_states",
    "amp_enabled": "tree.amp.enabled",
    # False without the block, as upstream.
    "amp_params": lambda config: config.tree.amp.model_extra or False,
    # ZeRO
    "zero_optimization": "zero_enabled",
    "zero_optimization_stage": lambda config: int(config.zero_config.stage),
    "zero_optimization_partition_gradients": lambda config: config.zero_config.stage >= 2,
    "zero_optimization_partition_weights": lambda config: config.zero_config.stage >= 3,
    "is_first_weights_partition_group": lambda config: config.zero_config.stage >= 3,
    "zero_overlap_comm": lambda config: bool(config.zero_config.overlap_comm),
    "zero_cpu_offload": lambda config: (
        config.zero_enabled and config.zero_config.offload_optimizer_device is OffloadDeviceEnum.cpu
    ),
    "zero_use_cpu_optimizer": lambda config: (
        config.zero_config.offload_optimizer_device is not OffloadDeviceEnum.none
    ),
    "zero_nvme_offload_optimizer": lambda config: (
        config.zero_config.offload_optimizer_device is OffloadDeviceEnum.nvme
    ),
    "zero_partial_offload": _offload("ratio", without=1.0),
    "super_offload": _offload("super_offload", without=False),
    "cpuadam_cores_perc": _offload("cpuadam_cores_perc", without=0.9),
    "zero_reduce_scatter": "zero_config.reduce_scatter",
    "zero_offload_optimizer": "zero_config.offload_optimizer",
    "zero_reduce_bucket_size": "zero_config.reduce_bucket_size",
    "zero_allgather_bucket_size": "zero_config.allgather_bucket_size",
    "zero_allgather_partitions": "zero_config.allgather_partitions",
    "zero_contiguous_gradients": "zero_config.contiguous_gradients",
    "zero_load_from_fp32_weights": "zero_config.load_from_fp32_weights",
    "zero_elastic_checkpoint": "zero_config.elastic_checkpoint",
    "zero_round_robin_gradients": "zero_config.round_robin_gradients",
    "zero_ignore_unused_parameters": "zero_config.ignore_unused_parameters",
    "zero_gather_16bit_weights_on_model_save": "zero_config.gather_16bit_weights_on_model_save",
    "zero_offload_param": "zero_config.offload_param",
    "zero_sub_group_size": "zero_config.sub_group_size",
    "zero_max_live_parameters": "zero_config.max_live_parameters",
    "zero_max_reuse_distance": "zero_config.max_reuse_distance",
    "zero_prefetch_bucket_size": "zero_config.prefetch_bucket_size",
    "zero_module_granularity_threshold": "zero_config.module_granularity_threshold",
    "zero_param_persistence_threshold": "zero_config.param_persistence_threshold",
    "zero_model_persistence_threshold": "zero_config.model_persistence_threshold",
    "zero_legacy_stage1": "zero_config.legacy_stage1",
    "zero_save_muon_momentum_buffer_in_memory": "zero_config.save_muon_momentum_buffer_in_memory",
    "zero_allgather_sequential": "zero_config.allgather_sequential",
    "zero_hpz_partition_size": "zero_config.zero_hpz_partition_size",
    "zero_quantized_weights": "zero_config.zero_quantized_weights",
    "zero_quantized_nontrainable_weights": "zero_config.zero_quantized_nontrainable_weights",
    "zero_quantized_gradients": "zero_config.zero_quantized_gradients",
    "zeropp_loco_param": "zero_config.zeropp_loco_param",
    "zero_multi_rank_bucket_allreduce": "zero_config.use_multi_rank_bucket_allreduce",
    "zero_log_trace_cache_warnings": "zero_config.log_trace_cache_warnings",
    "is_sanity_checks_enabled": "zero_config.enable_sanity_checks",
    "mics_shard_size": "zero_config.mics_shard_size",
    "zenflow_config": "zero_config.zenflow",
    "zero_allow_untested_optimizer": "tree.zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer": "tree.zero_force_ds_cpu_optimizer",
    # Gradients, optimizer and schedule
    "gradient_clipping": "tree.gradient_clipping",
    "gradient_predivide_factor": "tree.gradient_predivide_factor",
    "postscale_gradients": lambda config: not config.tree.prescale_gradients,
    "managed_gradient_accumulation": "tree.managed_gradient_accumulation",
    "sparse_gradients_enabled": "tree.sparse_gradients",
    "optimizer_params": "optimizer_params",
    "optimizer_legacy_fusion": lambda config: (
        config.tree.optimizer is not None and config.tree.optimizer.legacy_fusion
    ),
    "scheduler_name": "scheduler_name",
    "scheduler_params": "scheduler_params",
    # Parallelism and compilation
    "elasticity_enabled": "elasticity_enabled",
    # Whether elasticity counts model-parallel groups, which came with version 0.2.
    "is_elastic_model_parallel_supported": lambda config: (
        config.elasticity_enabled and config.tree.elasticity.version == 0.2
    ),
    "tensor_parallel_config": "tree.tensor_parallel",
    "autotp_size": "tree.tensor_parallel.autotp_size",
    "is_deepcompile_enabled": "tree.compile.deepcompile",
    "is_deepcompile_active": "tree.compile.deepcompile",
    "compile_autosp": lambda config: "autosp" in (config.tree.compile.passes or ()),
    "compile_autotp": lambda config: "autotp" in (config.tree.compile.passes or ()),
    "graph_harvesting": "tree.graph_harvesting",
    # Data, files and log
    "dataloader_drop_last": "tree.dataloader_drop_last",
    "checkpoint_tag_validation_enabled": "checkpoint_tag_validation_enabled",
    "checkpoint_tag_validation_fail": "checkpoint_tag_validation_fail",
    "load_universal_checkpoint": "load_universal_checkpoint",
    "use_node_local_storage": "tree.checkpoint.use_node_local_storage",
    "checkpoint_writer_enabled": lambda config: config.tree.checkpoint.writer is not None,
    "checkpoint_serialization_enabled": "tree.checkpoint.checkpoint_serialization",
    "steps_per_print": "tree.steps_per_print",
    "wall_clock_breakdown": "tree.wall_clock_breakdown",
    "memory_breakdown": "tree.memory_breakdown",
    "dump_state": "tree.dump_state",
    "log_level": "tree.log_level",
    "flops_profiler_enabled": "tree.flops_profiler.enabled",
    "flops_profiler_recompute_fwd_factor": "tree.flops_profiler.recompute_fwd_factor",
    "flops_profiler_profile_step": "tree.flops_profiler.profile_step",
    "flops_profiler_module_depth": "tree.flops_profiler.module_depth",
    "flops_profiler_top_modules": "tree.flops_profiler.top_modules",
    "flops_profiler_detailed": "tree.flops_profiler.detailed",
    "flops_profiler_output_file": "tree.flops_profiler.output_file",
    "aio_config": _as_dict("tree.aio"),
    # What is refused when it is switched on: scripts ask whether it is
    "pld_enabled": "tree.progressive_layer_drop.enabled",
    "pld_theta": "tree.progressive_layer_drop.theta",
    "pld_gamma": "tree.progressive_layer_drop.gamma",
    "pld_params": _as_dict("tree.progressive_layer_drop"),
    "eigenvalue_enabled": "tree.eigenvalue.enabled",
    "eigenvalue_verbose": "tree.eigenvalue.verbose",
    "eigenvalue_max_iter": "tree.eigenvalue.max_iter",
    "eigenvalue_tol": "tree.eigenvalue.tol",
    "eigenvalue_stability": "tree.eigenvalue.stability",
    "eigenvalue_gas_boundary_resolution": "tree.eigenvalue.gas_boundary_resolution",
    "eigenvalue_layer_name": "tree.eigenvalue.layer_name",
    "eigenvalue_layer_num": "tree.eigenvalue.layer_num",
    "data_efficiency_enabled": "tree.data_efficiency.enabled",
    "data_efficiency_config": _as_dict("tree.data_efficiency"),
    "data_sampling_enabled": "tree.data_efficiency.data_sampling.enabled",
    "data_sampling_config": _as_dict("tree.data_efficiency.data_sampling"),
    "curriculum_learning_enabled": "tree.data_efficiency.data_sampling.curriculum_learning.enabled",
    "curriculum_learning_config": _as_dict(
        "tree.data_efficiency.data_sampling.curriculum_learning"
    ),
    "random_ltd_enabled": "tree.data_efficiency.data_routing.enabled",
    "autotuning_enabled": "tree.autotuning.enabled",
    "curriculum_enabled_legacy": "tree.curriculum_learning.enabled",
    # False while it is off, as upstream.
    "curriculum_params_legacy": lambda config: (
        config.tree.curriculum_learning.enabled and config.tree.curriculum_learning.model_dump()
    ),
}
"""Method of the engine -> what of its `DeepSpeedConfig` it returns: a path, or what reads it."""


class EngineSettings:
    """What scripts ask of the configuration, and set: these methods, and `GETTERS`."""

    _config: DeepSpeedConfig
    _model_dtype: torch.dtype
    basic_optimizer: torch.optim.Optimizer | None
    tracker: AccumulationTracker
    get_batch_info: Callable[[], tuple[int, int, int]]
    zero_optimization_stage: Callable[[], int]

    @property
    def config(self) -> dict[str, Any]:
        """The configuration as a plain dict, batch sizes filled in."""
        return self._config._param_dict

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the global batch size by accumulating more or fewer micro-batches of all ranks."""
        unit = self._config.train_micro_batch_size_per_gpu * self._config.world_size
        if train_batch_size <= 0 or train_batch_size % unit:
            raise DeepSpeedConfigError(
                f"train_batch_size: {train_batch_size} is no positive multiple of "
                f"train_micro_batch_size_per_gpu ({self._config.train_micro_batch_size_per_gpu}) x "
                f"data-parallel ranks ({self._config.world_size})"
            )
        self._config.train_batch_size = train_batch_size
        self._config.gradient_accumulation_steps = train_batch_size // unit
        self.tracker.steps = train_batch_size // unit

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the micro-batch; the accumulation steps stay, the global batch follows."""
        if micro_batch_size < 1:
            raise DeepSpeedConfigError(
                f"train_micro_batch_size_per_gpu: {micro_batch_size} is not positive"
            )
        self._config.train_micro_batch_size_per_gpu = micro_batch_size
        steps = self._config.gradient_accumulation_steps
        self._config.train_batch_size = micro_batch_size * steps * self._config.world_size

    @property
    def model_dtype(self) -> torch.dtype:
        return self._model_dtype

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Dtype of the model and of gradient accumulation."""
        return self.model_dtype, parse_dtype(self._config.grad_accum_dtype) or self.model_dtype

    @property
    def communication_data_type(self) -> torch.dtype:
        """The dtype that gradients travel in."""
        return self._config.communication_data_type or self.model_dtype

    def torch_autocast_lower_precision_safe_modules(self) -> list[str]:
        """Name the classes of modules whose gradients may travel in the autocast dtype."""
        named = self._config.torch_autocast_lower_precision_safe_modules
        if named is not None:
            return list(named)
        return [f"{cls.__module__}.{cls.__qualname__}" for cls in LOWER_PRECISION_SAFE_MODULES]

    @property
    def sparse_gradients(self) -> bool:
        return self._config.tree.sparse_gradients

    @property
    def sparse_tensor_module_names(self) -> set[str]:
        """Name the modules with sparse gradients: none, `sparse_gradients` is refused."""
        return set()

    def optimizer_name(self) -> str | None:
        """Name the optimizer in use: the client's class, or the configuration's type."""
        if self.basic_optimizer is not None and self._config.optimizer_name is None:
            return type(self.basic_optimizer).__name__
        return self._config.optimizer_name

    def _groups(self) -> Sequence[dict[str, Any]]:
        return self.basic_optimizer.param_groups if self.basic_optimizer is not None else ()

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self._groups()]

    def set_lr(self, lr: float) -> None:
        for group in self._groups():
            group["lr"] = lr

    def get_mom(self) -> list[Any]:
        """Return momentum, or betas, of each parameter group."""
        return [group.get("betas", group.get("momentum")) for group in self._groups()]

    def get_type(self) -> list[Any]:
        return [group.get("type") for group in self._groups()]

    def get_pld_theta(self) -> None:
        """Share of layers kept now; None: progressive layer drop is refused."""


def _getter(name: str, how: str | Read) -> Callable[[EngineSettings], object]:
    read = attrgetter(how) if isinstance(how, str) else how

    def method(engine: EngineSettings) -> object:
        return read(engine._config)

    method.__name__, method.__qualname__ = name, f"{EngineSettings.__qualname__}.{name}"
    method.__doc__ = f"Read `{how}` of the configuration." if isinstance(how, str) else None
    return method


for _name, _how in GETTERS.items():
    setattr(EngineSettings, _name, _getter(_name, _how))

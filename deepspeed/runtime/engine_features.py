"""Upstream's configuration getters of the engine that are about features: stage 3, offload, number
formats, and what this release refuses when it is switched on.

Each is a thin delegate to the configuration's tree, for scripts that ask; `engine_settings` has
those that training itself is about.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch.utils.data import IterableDataset

from deepspeed.comm.parallel_map import ParallelMap
from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.runtime.data_pipeline.curriculum_scheduler import CUSTOM, CurriculumScheduler
from deepspeed.runtime.data_pipeline.data_sampling.data_sampler import DeepSpeedDataSampler
from deepspeed.runtime.data_pipeline.sequence_curriculum import ARGUMENT, SEQLEN
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
    """Mixin of `DeepSpeedEngine`: upstream's getters of features.

    Attributes:
        parallel_map: Which ranks share what.
        curriculum_scheduler_legacy: How difficult the data of a step may be; None without
            `curriculum_learning`.
        global_steps: Optimizer steps so far.
        training_dataloader: Batches of `training_data`; None without.
    """

    _config: DeepSpeedConfig
    parallel_map: ParallelMap
    curriculum_scheduler_legacy: CurriculumScheduler | None
    global_steps: int
    training_dataloader: Any

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

    # Ranks

    def get_data_parallel_rank(self) -> int:
        """This process's place among the data-parallel ranks."""
        return self.parallel_map.data.rank

    def get_model_parallel_rank(self) -> int:
        """The same among the model-parallel ranks."""
        return self.parallel_map.model.rank

    def get_tensor_parallel_rank(self) -> int:
        """The same among the tensor-parallel ranks."""
        return self.parallel_map.tensor.rank

    def get_sequence_parallel_group(self) -> Any:
        """The ranks that share sequences."""
        return self.parallel_map.sequence.group

    # Data

    curriculum_enabled_legacy = setting(lambda config: config.tree.curriculum_learning.enabled)
    # False while it is off, as upstream.
    curriculum_params_legacy = setting(
        lambda config: (
            config.tree.curriculum_learning.enabled and config.tree.curriculum_learning.model_dump()
        )
    )

    def _arguments_of_curriculum(self) -> dict[str, Any]:
        """Go to the difficulty of the step at hand; what the model is given for it."""
        scheduler = self.curriculum_scheduler_legacy
        if scheduler is None:
            return {}
        difficulty = scheduler.update_difficulty(self.global_steps + 1)
        is_length = self._config.tree.curriculum_learning.curriculum_type == SEQLEN
        return {ARGUMENT: difficulty} if is_length else {}

    def set_custom_curriculum_learning_schedule(
        self, schedule_func_dict: Mapping[str, Callable[[int], int]]
    ) -> None:
        """Give custom schedules their functions of the step, which counts from 1.

        Args:
            schedule_func_dict: Functions under the `curriculum_type` of `curriculum_learning`, or
                the names of metrics that `training_dataloader` chooses samples by.

        Raises:
            DeepSpeedConfigError: If there is no custom schedule of a name.
        """
        custom = {
            name: scheduler
            for name, scheduler in self._schedulers().items()
            if scheduler.get_state()["schedule_type"] == CUSTOM
        }
        unknown = sorted(schedule_func_dict.keys() - custom.keys())
        if unknown:
            raise DeepSpeedConfigError(
                f"set_custom_curriculum_learning_schedule: {unknown[0]!r} has no schedule_type "
                f'"custom"; those that have are {sorted(custom)}'
            )
        for name, function in schedule_func_dict.items():
            custom[name].set_custom_get_difficulty(function)

    def _schedulers(self) -> dict[str, CurriculumScheduler]:
        """All schedules by the name of what is difficult."""
        found: dict[str, CurriculumScheduler] = {}
        sampler = getattr(self.training_dataloader, "data_sampler", None)
        if isinstance(sampler, DeepSpeedDataSampler):
            found |= {name: metric.scheduler for name, metric in sampler.metrics.items()}
        if self.curriculum_scheduler_legacy is not None:
            found[self._config.tree.curriculum_learning.curriculum_type] = (
                self.curriculum_scheduler_legacy
            )
        return found

    def set_data_post_process_func(
        self, post_process_func: Callable[[Any, dict[str, Any]], Any]
    ) -> None:
        """Pass every batch of `training_dataloader` through a function, with the state of the
        sampler (`current_difficulties`, `curriculum_step`): to cut sequences, say.

        Raises:
            DeepSpeedConfigError: If `data_efficiency.data_sampling` does not order that loader.
        """
        loader = self.training_dataloader
        if not isinstance(getattr(loader, "data_sampler", None), DeepSpeedDataSampler):
            raise DeepSpeedConfigError(
                "set_data_post_process_func needs deepspeed.initialize(training_data=...) and "
                "data_efficiency.data_sampling.enabled: true, whose sampler has a state; otherwise "
                "process batches where they are read"
            )
        loader.post_process_func = post_process_func

    @property
    def _chooses_samples(self) -> bool:
        block = self._config.tree.data_efficiency
        return block.enabled and block.data_sampling.enabled

    def _sampler_of(self, dataset: Any, micro_batch: int) -> DeepSpeedDataSampler | None:
        """What `data_efficiency.data_sampling` orders a dataset by, if it is on."""
        block = self._config.tree.data_efficiency
        if not self._chooses_samples:
            return None
        if not self.is_map_style_dataset(dataset):
            raise DeepSpeedConfigError(
                "data_efficiency.data_sampling.enabled: true chooses samples by their number, "
                f"which a {type(dataset).__name__} does not have; use a dataset with __getitem__ "
                "and __len__, or false"
            )
        return DeepSpeedDataSampler(
            block.model_dump(),
            len(dataset),
            micro_batch,
            self.parallel_map.data.rank,
            self.parallel_map.data.size,
            gradient_accumulation_steps=self._config.gradient_accumulation_steps,
        )

    @property
    def sparse_tensor_module_names(self) -> set[str]:
        """Names of modules with sparse gradients: none, `sparse_gradients` is refused."""
        return set()

    @staticmethod
    def is_map_style_dataset(obj: Any) -> bool:
        """Whether a dataset is read by index."""
        return hasattr(obj, "__getitem__") and hasattr(obj, "__len__")

    @staticmethod
    def is_iterable_style_dataset(obj: Any) -> bool:
        """Whether a dataset is only iterated."""
        return isinstance(obj, IterableDataset)

"""Upstream's configuration getters of the engine: thin delegates to the configuration.

Scripts and client libraries call them; the engine's own code reads the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.runtime.config_utils import parse_dtype
from deepspeed.runtime.gradients.accumulation import AccumulationTracker
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum

Value = TypeVar("Value")


def setting(read: Callable[[DeepSpeedConfig], Value]) -> Callable[[EngineSettings], Value]:
    """A method of the engine that returns what `read` takes from its configuration."""

    def method(engine: EngineSettings) -> Value:
        return read(engine._config)

    return method


class EngineSettings:
    """Mixin of `DeepSpeedEngine`: what upstream's engine says of its configuration.

    It needs these attributes of the engine, and nothing else.

    Attributes:
        basic_optimizer: The torch optimizer, of which the learning rates are.
        tracker: Told when the accumulation steps change.
    """

    _config: DeepSpeedConfig
    _model_dtype: torch.dtype
    basic_optimizer: torch.optim.Optimizer | None
    tracker: AccumulationTracker

    @property
    def config(self) -> dict[str, Any]:
        """The configuration as a plain dict, batch sizes filled in."""
        return self._config._param_dict

    # Batch

    train_batch_size = setting(lambda config: config.train_batch_size)
    train_micro_batch_size_per_gpu = setting(lambda config: config.train_micro_batch_size_per_gpu)
    gradient_accumulation_steps = setting(lambda config: config.gradient_accumulation_steps)
    get_batch_info = setting(
        lambda config: (
            config.train_batch_size,
            config.train_micro_batch_size_per_gpu,
            config.gradient_accumulation_steps,
        )
    )

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the global batch size by changing the accumulation steps.

        Raises:
            DeepSpeedConfigError: If it is not a multiple of micro-batch times ranks.
        """
        unit = self.train_micro_batch_size_per_gpu() * self._config.world_size
        if train_batch_size <= 0 or train_batch_size % unit:
            raise DeepSpeedConfigError(
                f"train_batch_size: {train_batch_size} is no positive multiple of "
                f"train_micro_batch_size_per_gpu ({self.train_micro_batch_size_per_gpu()}) x "
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
        steps = self.gradient_accumulation_steps()
        self._config.train_batch_size = micro_batch_size * steps * self._config.world_size

    # Precision

    fp16_enabled = setting(lambda config: config.tree.fp16.enabled)
    bfloat16_enabled = setting(lambda config: config.tree.bf16.enabled)
    fp16_auto_cast = setting(lambda config: config.tree.fp16.enabled and config.tree.fp16.auto_cast)
    torch_autocast_enabled = setting(lambda config: config.torch_autocast_enabled)
    torch_autocast_dtype = setting(lambda config: config.torch_autocast_dtype)
    # The configured static loss scale; 0 means dynamic.
    loss_scale = setting(lambda config: config.tree.fp16.loss_scale)
    dynamic_loss_scale = setting(
        lambda config: config.tree.fp16.enabled and config.tree.fp16.dynamic
    )

    @property
    def model_dtype(self) -> torch.dtype:
        """Dtype of the parameters."""
        return self._model_dtype

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Dtype of the model and of gradient accumulation."""
        return self.model_dtype, parse_dtype(self._config.grad_accum_dtype) or self.model_dtype

    @property
    def communication_data_type(self) -> torch.dtype:
        """The dtype that gradients travel in."""
        return self._config.communication_data_type or self.model_dtype

    # ZeRO

    zero_optimization = setting(lambda config: config.zero_enabled)
    zero_optimization_stage = setting(lambda config: int(config.zero_config.stage))
    zero_optimization_partition_gradients = setting(lambda config: config.zero_config.stage >= 2)
    zero_optimization_partition_weights = setting(lambda config: config.zero_config.stage >= 3)
    zero_allow_untested_optimizer = setting(
        lambda config: config.tree.zero_allow_untested_optimizer
    )
    zero_reduce_scatter = setting(lambda config: config.zero_config.reduce_scatter)
    zero_overlap_comm = setting(lambda config: bool(config.zero_config.overlap_comm))
    zero_offload_optimizer = setting(lambda config: config.zero_config.offload_optimizer)
    zero_cpu_offload = setting(
        lambda config: (
            config.zero_enabled
            and config.zero_config.offload_optimizer_device is OffloadDeviceEnum.cpu
        )
    )
    zero_reduce_bucket_size = setting(lambda config: config.zero_config.reduce_bucket_size)
    zero_allgather_bucket_size = setting(lambda config: config.zero_config.allgather_bucket_size)
    zero_allgather_partitions = setting(lambda config: config.zero_config.allgather_partitions)
    zero_contiguous_gradients = setting(lambda config: config.zero_config.contiguous_gradients)
    zero_load_from_fp32_weights = setting(lambda config: config.zero_config.load_from_fp32_weights)
    zero_elastic_checkpoint = setting(lambda config: config.zero_config.elastic_checkpoint)
    zero_round_robin_gradients = setting(lambda config: config.zero_config.round_robin_gradients)
    zero_ignore_unused_parameters = setting(
        lambda config: config.zero_config.ignore_unused_parameters
    )
    zero_gather_16bit_weights_on_model_save = setting(
        lambda config: config.zero_config.gather_16bit_weights_on_model_save
    )
    elasticity_enabled = setting(lambda config: config.elasticity_enabled)
    # Whether elasticity counts model-parallel groups, which came with version 0.2.
    is_elastic_model_parallel_supported = setting(
        lambda config: config.elasticity_enabled and config.tree.elasticity.version == 0.2
    )

    # Gradients

    gradient_clipping = setting(lambda config: config.tree.gradient_clipping)
    gradient_predivide_factor = setting(lambda config: config.tree.gradient_predivide_factor)
    postscale_gradients = setting(lambda config: not config.tree.prescale_gradients)
    managed_gradient_accumulation = setting(
        lambda config: config.tree.managed_gradient_accumulation
    )

    # Optimizer and schedule

    optimizer_params = setting(lambda config: config.optimizer_params)
    scheduler_name = setting(lambda config: config.scheduler_name)
    scheduler_params = setting(lambda config: config.scheduler_params)

    def optimizer_name(self) -> str | None:
        """Name of the optimizer in use: the client's class, or the configuration's type."""
        if self.basic_optimizer is not None and self._config.optimizer_name is None:
            return type(self.basic_optimizer).__name__
        return self._config.optimizer_name

    def _groups(self) -> Sequence[dict[str, Any]]:
        return self.basic_optimizer.param_groups if self.basic_optimizer is not None else ()

    def get_lr(self) -> list[float]:
        """Learning rate of each parameter group."""
        return [group["lr"] for group in self._groups()]

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every parameter group."""
        for group in self._groups():
            group["lr"] = lr

    def get_mom(self) -> list[Any]:
        """Momentum, or betas, of each parameter group."""
        return [group.get("betas", group.get("momentum")) for group in self._groups()]

    def get_type(self) -> list[Any]:
        """`type` of each parameter group, where a script set one."""
        return [group.get("type") for group in self._groups()]

    # Watching

    # Steps between progress lines; None for never.
    steps_per_print = setting(lambda config: config.tree.steps_per_print)
    wall_clock_breakdown = setting(lambda config: config.tree.wall_clock_breakdown)
    memory_breakdown = setting(lambda config: config.tree.memory_breakdown)
    flops_profiler_enabled = setting(lambda config: config.tree.flops_profiler.enabled)
    flops_profiler_recompute_fwd_factor = setting(
        lambda config: config.tree.flops_profiler.recompute_fwd_factor
    )
    flops_profiler_profile_step = setting(lambda config: config.tree.flops_profiler.profile_step)
    flops_profiler_module_depth = setting(lambda config: config.tree.flops_profiler.module_depth)
    flops_profiler_top_modules = setting(lambda config: config.tree.flops_profiler.top_modules)
    flops_profiler_detailed = setting(lambda config: config.tree.flops_profiler.detailed)
    flops_profiler_output_file = setting(lambda config: config.tree.flops_profiler.output_file)
    dump_state = setting(lambda config: config.tree.dump_state)
    dataloader_drop_last = setting(lambda config: config.tree.dataloader_drop_last)

    # Checkpoints

    checkpoint_tag_validation_enabled = setting(
        lambda config: config.checkpoint_tag_validation_enabled
    )
    checkpoint_tag_validation_fail = setting(lambda config: config.checkpoint_tag_validation_fail)
    load_universal_checkpoint = setting(lambda config: config.load_universal_checkpoint)

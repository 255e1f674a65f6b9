"""Upstream's configuration getters of the engine: thin delegates to the configuration tree.

Scripts and client libraries call them; the engine's own code reads the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.runtime.model_setup import model_dtype


class EngineSettings:
    """Mixin of `DeepSpeedEngine`; expects `_config`, `optimizer` and the group sizes to be set."""

    _config: DeepSpeedConfig
    optimizer: Any
    basic_optimizer: Any
    lr_scheduler: Any
    tracker: Any

    @property
    def config(self) -> dict[str, Any]:
        """The configuration as a plain dict, batch sizes filled in."""
        return self._config._param_dict

    @property
    def model_dtype(self) -> torch.dtype:
        """Dtype of the parameters."""
        return model_dtype(self._config)

    # Batch

    def get_batch_info(self) -> tuple[int, int, int]:
        """train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps."""
        return (
            self.train_batch_size(),
            self.train_micro_batch_size_per_gpu(),
            self.gradient_accumulation_steps(),
        )

    def train_batch_size(self) -> int:
        """Samples per optimizer step over all ranks."""
        return self._config.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per forward on one rank."""
        return self._config.train_micro_batch_size_per_gpu

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self._config.gradient_accumulation_steps

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

    def fp16_enabled(self) -> bool:
        """`fp16.enabled`."""
        return self._config.tree.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        """`bf16.enabled`."""
        return self._config.tree.bf16.enabled

    def fp16_auto_cast(self) -> bool:
        """Whether floating inputs of forward are cast to fp16."""
        return self._config.tree.fp16.enabled and self._config.tree.fp16.auto_cast

    def torch_autocast_enabled(self) -> bool:
        """`torch_autocast.enabled`."""
        return self._config.torch_autocast_enabled

    def torch_autocast_dtype(self) -> torch.dtype | None:
        """`torch_autocast.dtype`."""
        return self._config.torch_autocast_dtype

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale adapts."""
        return self.fp16_enabled() and self._config.tree.fp16.loss_scale == 0

    def loss_scale(self) -> float:
        """The configured static loss scale; 0 means dynamic."""
        return self._config.tree.fp16.loss_scale

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Dtype of the model and of gradient accumulation."""
        accumulation = self._config.grad_accum_dtype
        names = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
        return self.model_dtype, names.get(str(accumulation), self.model_dtype)

    @property
    def communication_data_type(self) -> torch.dtype:
        """The dtype that gradients travel in."""
        return self._config.communication_data_type or self.model_dtype

    # ZeRO

    def zero_optimization(self) -> bool:
        """Whether a stage above 0 is on."""
        return self._config.zero_enabled

    def zero_optimization_stage(self) -> int:
        """The stage."""
        return int(self._config.zero_optimization_stage)

    def zero_optimization_partition_gradients(self) -> bool:
        """Stage 2 or above."""
        return self.zero_optimization_stage() >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Stage 3."""
        return self.zero_optimization_stage() >= 3

    def zero_allow_untested_optimizer(self) -> bool:
        """`zero_allow_untested_optimizer`."""
        return self._config.tree.zero_allow_untested_optimizer

    def zero_reduce_scatter(self) -> bool:
        """`zero_optimization.reduce_scatter`."""
        return self._config.tree.zero_optimization.reduce_scatter

    def zero_overlap_comm(self) -> bool:
        """`zero_optimization.overlap_comm`."""
        return bool(self._config.tree.zero_optimization.overlap_comm)

    def zero_offload_optimizer(self) -> Any:
        """`zero_optimization.offload_optimizer`."""
        return self._config.tree.zero_optimization.offload_optimizer

    def zero_cpu_offload(self) -> bool:
        """Whether optimizer state lives on the host."""
        offload = self.zero_offload_optimizer()
        return self.zero_optimization() and offload is not None and offload.device.value == "cpu"

    def zero_reduce_bucket_size(self) -> int:
        """`zero_optimization.reduce_bucket_size`."""
        return self._config.tree.zero_optimization.reduce_bucket_size

    def zero_allgather_bucket_size(self) -> int:
        """`zero_optimization.allgather_bucket_size`."""
        return self._config.tree.zero_optimization.allgather_bucket_size

    def zero_allgather_partitions(self) -> bool:
        """`zero_optimization.allgather_partitions`."""
        return self._config.tree.zero_optimization.allgather_partitions

    def zero_contiguous_gradients(self) -> bool:
        """`zero_optimization.contiguous_gradients`."""
        return self._config.tree.zero_optimization.contiguous_gradients

    def zero_load_from_fp32_weights(self) -> bool:
        """`zero_optimization.load_from_fp32_weights`."""
        return self._config.tree.zero_optimization.load_from_fp32_weights

    def elasticity_enabled(self) -> bool:
        """Whether the batch sizes were chosen by the `elasticity` block."""
        return self._config.elasticity_enabled

    def is_elastic_model_parallel_supported(self) -> bool:
        """Whether elasticity counts model-parallel groups: it is enabled, with version 0.2."""
        return self.elasticity_enabled() and self._config.tree.elasticity.version == 0.2

    def zero_elastic_checkpoint(self) -> bool:
        """`zero_optimization.elastic_checkpoint`."""
        return self._config.tree.zero_optimization.elastic_checkpoint

    def zero_round_robin_gradients(self) -> bool:
        """`zero_optimization.round_robin_gradients`."""
        return self._config.tree.zero_optimization.round_robin_gradients

    def zero_ignore_unused_parameters(self) -> bool:
        """`zero_optimization.ignore_unused_parameters`."""
        return self._config.tree.zero_optimization.ignore_unused_parameters

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Stage 3's switch; weights are whole below it."""
        return self._config.tree.zero_optimization.gather_16bit_weights_on_model_save

    # Gradients

    def gradient_clipping(self) -> float:
        """`gradient_clipping`."""
        return self._config.tree.gradient_clipping

    def gradient_predivide_factor(self) -> float:
        """`gradient_predivide_factor`."""
        return self._config.tree.gradient_predivide_factor

    def postscale_gradients(self) -> bool:
        """Not `prescale_gradients`."""
        return not self._config.tree.prescale_gradients

    def managed_gradient_accumulation(self) -> bool:
        """`managed_gradient_accumulation`."""
        return self._config.tree.managed_gradient_accumulation

    # Optimizer and schedule

    def optimizer_name(self) -> str | None:
        """Name of the optimizer in use: the client's class, or the configuration's type."""
        if self.basic_optimizer is not None and self._config.optimizer_name is None:
            return type(self.basic_optimizer).__name__
        return self._config.optimizer_name

    def optimizer_params(self) -> dict[str, Any] | None:
        """`optimizer.params`."""
        return self._config.optimizer_params

    def scheduler_name(self) -> str | None:
        """`scheduler.type`."""
        return self._config.scheduler_name

    def scheduler_params(self) -> dict[str, Any] | None:
        """`scheduler.params`."""
        return self._config.scheduler_params

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

    def steps_per_print(self) -> int | None:
        """Steps between progress lines; None for never."""
        every = self._config.tree.steps_per_print
        return None if every is None or every == float("inf") else int(every)

    def wall_clock_breakdown(self) -> bool:
        """`wall_clock_breakdown`."""
        return self._config.tree.wall_clock_breakdown

    def memory_breakdown(self) -> bool:
        """`memory_breakdown`."""
        return self._config.tree.memory_breakdown

    def flops_profiler_enabled(self) -> bool:
        """`flops_profiler.enabled`."""
        return self._config.tree.flops_profiler.enabled

    def flops_profiler_recompute_fwd_factor(self) -> float:
        """`flops_profiler.recompute_fwd_factor`."""
        return self._config.tree.flops_profiler.recompute_fwd_factor

    def flops_profiler_profile_step(self) -> int:
        """`flops_profiler.profile_step`."""
        return self._config.tree.flops_profiler.profile_step

    def flops_profiler_module_depth(self) -> int:
        """`flops_profiler.module_depth`."""
        return self._config.tree.flops_profiler.module_depth

    def flops_profiler_top_modules(self) -> int:
        """`flops_profiler.top_modules`."""
        return self._config.tree.flops_profiler.top_modules

    def flops_profiler_detailed(self) -> bool:
        """`flops_profiler.detailed`."""
        return self._config.tree.flops_profiler.detailed

    def flops_profiler_output_file(self) -> str | None:
        """`flops_profiler.output_file`."""
        return self._config.tree.flops_profiler.output_file

    def dump_state(self) -> bool:
        """`dump_state`."""
        return self._config.tree.dump_state

    def dataloader_drop_last(self) -> bool:
        """`dataloader_drop_last`."""
        return self._config.tree.dataloader_drop_last

    # Checkpoints

    def checkpoint_tag_validation_enabled(self) -> bool:
        """Whether ranks compare tags before saving."""
        return self._config.checkpoint_tag_validation_enabled

    def checkpoint_tag_validation_fail(self) -> bool:
        """Whether differing tags are an error."""
        return self._config.checkpoint_tag_validation_fail

    def load_universal_checkpoint(self) -> bool:
        """`checkpoint.load_universal`."""
        return self._config.load_universal_checkpoint

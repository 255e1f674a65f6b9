"""One function per key that scripts read from a raw configuration dict
(``get_train_batch_size(ds_config)``).

They look a value up and supply its default, nothing else; validation is ``DeepSpeedConfig``'s.
"""

from __future__ import annotations

from typing import Any

import torch

from deepspeed.runtime import constants as c
from deepspeed.runtime.config_utils import parse_dtype

Config = dict[str, Any]

__all__ = [
    "get_communication_data_type",
    "get_dataloader_drop_last",
    "get_dump_state",
    "get_gradient_accumulation_steps",
    "get_gradient_allreduce_op",
    "get_gradient_clipping",
    "get_gradient_predivide_factor",
    "get_managed_gradient_accumulation",
    "get_optimizer_name",
    "get_optimizer_params",
    "get_prescale_gradients",
    "get_scheduler_name",
    "get_scheduler_params",
    "get_steps_per_print",
    "get_torch_autocast_dtype",
    "get_torch_autocast_enabled",
    "get_train_batch_size",
    "get_train_micro_batch_size_per_gpu",
    "get_wall_clock_breakdown",
    "get_zero_allow_untested_optimizer",
    "get_zero_force_ds_cpu_optimizer",
]


def get_train_batch_size(param_dict: Config) -> int | None:
    """Samples per optimizer step over all ranks."""
    return param_dict.get(c.TRAIN_BATCH_SIZE, c.TRAIN_BATCH_SIZE_DEFAULT)


def get_train_micro_batch_size_per_gpu(param_dict: Config) -> int | None:
    """Samples per forward on one rank."""
    return param_dict.get(
        c.TRAIN_MICRO_BATCH_SIZE_PER_GPU, c.TRAIN_MICRO_BATCH_SIZE_PER_GPU_DEFAULT
    )


def get_gradient_accumulation_steps(param_dict: Config) -> int | None:
    """Micro-batches per optimizer step."""
    return param_dict.get(c.GRADIENT_ACCUMULATION_STEPS, c.GRADIENT_ACCUMULATION_STEPS_DEFAULT)


def get_gradient_clipping(param_dict: Config) -> float:
    """Largest global gradient norm; 0: no clipping."""
    return param_dict.get(c.GRADIENT_CLIPPING, c.GRADIENT_CLIPPING_DEFAULT)


def get_prescale_gradients(param_dict: Config) -> bool:
    """Whether gradients are divided before the reduction."""
    return param_dict.get(c.PRESCALE_GRADIENTS, c.PRESCALE_GRADIENTS_DEFAULT)


def get_gradient_predivide_factor(param_dict: Config) -> float:
    """The part divided before the reduction."""
    return param_dict.get(c.GRADIENT_PREDIVIDE_FACTOR, c.GRADIENT_PREDIVIDE_FACTOR_DEFAULT)


def get_gradient_allreduce_op(param_dict: Config) -> str:
    """``"mean"`` or ``"sum"``."""
    return param_dict.get(c.GRADIENT_ALLREDUCE_OP, c.GRADIENT_ALLREDUCE_OP_DEFAULT)


def get_communication_data_type(
    param_dict: Config,
    comm_type: str = c.COMMUNICATION_DATA_TYPE,
    comm_data_type_default: str | None = None,
) -> torch.dtype | None:
    """Type that gradients are reduced in, None for their own."""
    return parse_dtype(param_dict.get(comm_type, comm_data_type_default), comm_type)


def get_managed_gradient_accumulation(param_dict: Config) -> bool:
    """Whether the engine counts micro-batches."""
    return param_dict.get(c.MANAGED_GRADIENT_ACCUMULATION, c.MANAGED_GRADIENT_ACCUMULATION_DEFAULT)


def _named(param_dict: Config, block: str, key: str) -> Any:
    """Return a key of a block that has a ``type``, None otherwise."""
    inner = param_dict.get(block) or {}
    return inner.get(key) if c.TYPE in inner else None


def get_optimizer_name(param_dict: Config) -> str | None:
    """Name of the optimizer, as given."""
    return _named(param_dict, c.OPTIMIZER, c.TYPE)


def get_optimizer_params(param_dict: Config) -> Config | None:
    """Keyword arguments of the optimizer."""
    return _named(param_dict, c.OPTIMIZER, c.OPTIMIZER_PARAMS)


def get_scheduler_name(param_dict: Config) -> str | None:
    """Name of the schedule, as given."""
    return _named(param_dict, c.SCHEDULER, c.TYPE)


def get_scheduler_params(param_dict: Config) -> Config | None:
    """Keyword arguments of the schedule."""
    return _named(param_dict, c.SCHEDULER, c.SCHEDULER_PARAMS)


def get_torch_autocast_enabled(param_dict: Config) -> bool:
    """Whether forward runs under torch.autocast."""
    return param_dict.get(c.TORCH_AUTOCAST, {}).get(
        c.TORCH_AUTOCAST_ENABLED, c.TORCH_AUTOCAST_ENABLED_DEFAULT
    )


def get_torch_autocast_dtype(param_dict: Config) -> torch.dtype | None:
    """Type of torch.autocast, None for torch's default."""
    return parse_dtype(
        param_dict.get(c.TORCH_AUTOCAST, {}).get(c.TORCH_AUTOCAST_DTYPE), "torch_autocast.dtype"
    )


def get_steps_per_print(param_dict: Config) -> int | None:
    """Steps between two progress lines."""
    return param_dict.get(c.STEPS_PER_PRINT, c.STEPS_PER_PRINT_DEFAULT)


def get_wall_clock_breakdown(param_dict: Config) -> bool:
    """Whether forward, backward and step are timed."""
    return param_dict.get(c.WALL_CLOCK_BREAKDOWN, c.WALL_CLOCK_BREAKDOWN_DEFAULT)


def get_dump_state(param_dict: Config) -> bool:
    """Whether the configuration is logged at start."""
    return param_dict.get(c.DUMP_STATE, c.DUMP_STATE_DEFAULT)


def get_dataloader_drop_last(param_dict: Config) -> bool:
    """Whether the last incomplete batch is dropped."""
    return param_dict.get(c.DATALOADER_DROP_LAST, c.DATALOADER_DROP_LAST_DEFAULT)


def get_zero_allow_untested_optimizer(param_dict: Config) -> bool:
    """Whether any optimizer is accepted under ZeRO."""
    return param_dict.get(c.ZERO_ALLOW_UNTESTED_OPTIMIZER, c.ZERO_ALLOW_UNTESTED_OPTIMIZER_DEFAULT)


def get_zero_force_ds_cpu_optimizer(param_dict: Config) -> bool:
    """Whether offloading insists on an optimizer of ``deepspeed.ops``."""
    return param_dict.get(c.ZERO_FORCE_DS_CPU_OPTIMIZER, c.ZERO_FORCE_DS_CPU_OPTIMIZER_DEFAULT)

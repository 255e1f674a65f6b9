"""What scripts read from a raw configuration dict, under upstream's names.

``CONSTANTS`` are those of ``deepspeed.runtime.constants``; ``GETTERS`` has one function per key
(``get_train_batch_size(ds_config)``), which looks it up and supplies its default, nothing else.
Both are derived from the models. Written here are the functions that do more: they parse a value,
or validate a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from deepspeed.runtime.config_models import observe, precision, zero
from deepspeed.runtime.config_models.base import nested_model
from deepspeed.runtime.config_models.naming import Key, constants, keys
from deepspeed.runtime.config_models.reader import read_block
from deepspeed.runtime.config_models.training import TrainingConfig
from deepspeed.runtime.config_utils import parse_dtype
from deepspeed.runtime.constants import BFLOAT16_OLD

Config = dict[str, Any]

# Blocks whose keys have constants in `deepspeed.runtime.constants` -> what those start with.
_BLOCKS = {
    "optimizer": "OPTIMIZER_",
    "scheduler": "SCHEDULER_",
    "fp16": "FP16_",
    "bf16": "BFLOAT16_",
    "amp": "AMP_",
    "data_types": "",
    "torch_autocast": "TORCH_AUTOCAST_",
    "checkpoint": "CHECKPOINT_",
}
_IRREGULAR = {
    "bf16": "BFLOAT16",
    "use_data_before_expert_parallelism": "USE_DATA_BEFORE_EXPERT_PARALLEL",
    "load_universal": "LOAD_UNIVERSAL_CHECKPOINT",
    "use_node_local_storage": "USE_NODE_LOCAL_STORAGE_CHECKPOINT",
}


def _keys() -> Iterator[Key]:
    for key in keys(TrainingConfig, irregular=_IRREGULAR):
        yield key
        block = nested_model(key.field)
        if block is not None and key.path[-1] in _BLOCKS:
            yield from keys(block, key.path, _BLOCKS[key.path[-1]], _IRREGULAR)


def _getter(key: Key) -> Callable[[Config], Any]:
    *blocks, name = key.path

    def get(param_dict: Config) -> Any:
        block = param_dict
        for each in blocks:
            block = block.get(each) or {}
        return block[name] if name in block else key.default()

    get.__name__ = get.__qualname__ = f"get_{key.constant.lower()}"
    get.__doc__ = key.field.description
    return get


def get_communication_data_type(
    param_dict: Config,
    comm_type: str = "communication_data_type",
    comm_data_type_default: str | None = None,
) -> torch.dtype | None:
    """Type that gradients are reduced in, None for their own."""
    return parse_dtype(param_dict.get(comm_type, comm_data_type_default), comm_type)


def get_torch_autocast_dtype(param_dict: Config) -> torch.dtype | None:
    """Type of torch.autocast, None for torch's default."""
    return parse_dtype(param_dict.get("torch_autocast", {}).get("dtype"), "torch_autocast.dtype")


def _named(param_dict: Config, block: str, key: str) -> Any:
    """Return a key of a block that has a ``type``, None otherwise."""
    inner = param_dict.get(block) or {}
    return inner.get(key) if "type" in inner else None


def get_optimizer_name(param_dict: Config) -> str | None:
    """Name of the optimizer, as given."""
    return _named(param_dict, "optimizer", "type")


def get_optimizer_params(param_dict: Config) -> Config | None:
    """Keyword arguments of the optimizer."""
    return _named(param_dict, "optimizer", "params")


def get_scheduler_name(param_dict: Config) -> str | None:
    """Name of the schedule, as given."""
    return _named(param_dict, "scheduler", "type")


def get_scheduler_params(param_dict: Config) -> Config | None:
    """Keyword arguments of the schedule."""
    return _named(param_dict, "scheduler", "params")


def get_float16_config(param_dict: Config) -> precision.DeepSpeedFP16Config:
    """Return the validated ``fp16`` block of a whole configuration."""
    return read_block(precision.DeepSpeedFP16Config, param_dict.get("fp16", {}), "fp16")


def get_bfloat16_config(param_dict: Config) -> precision.DeepSpeedBF16Config:
    """Return the validated ``bf16`` block of a whole configuration, under its old name too."""
    block = param_dict.get("bf16", param_dict.get(BFLOAT16_OLD, {}))
    return read_block(precision.DeepSpeedBF16Config, block, "bf16")


def read_zero_config_deprecated(param_dict: Config) -> Config:
    """Return the block that the old form ``"zero_optimization": true`` stands for."""
    block: Config = {"stage": int(bool(param_dict["zero_optimization"]))}
    if block["stage"] and "allgather_size" in param_dict:
        block["allgather_bucket_size"] = param_dict["allgather_size"]
    return block


def get_zero_config(param_dict: Config) -> zero.DeepSpeedZeroConfig:
    """Return the validated ``zero_optimization`` block of a whole configuration."""
    block = param_dict.get("zero_optimization", {})
    if isinstance(block, bool):
        block = read_zero_config_deprecated(param_dict)
    return read_block(zero.DeepSpeedZeroConfig, block, "zero_optimization")


def get_monitor_config(param_dict: Config) -> observe.DeepSpeedMonitorConfig:
    """Return the validated monitor blocks of a whole configuration."""
    names = [name for name in observe.DeepSpeedMonitorConfig.model_fields if name in param_dict]
    return read_block(observe.DeepSpeedMonitorConfig, {name: param_dict[name] for name in names})


CONSTANTS = constants(_keys())
GETTERS: dict[str, Callable[..., Any]] = {
    get.__name__: get
    for get in (
        *(_getter(key) for key in _keys() if nested_model(key.field) is None),
        get_communication_data_type,
        get_optimizer_name,
        get_optimizer_params,
        get_scheduler_name,
        get_scheduler_params,
        get_torch_autocast_dtype,
        get_zero_config,
    )
}

"""Upstream's names of keys, and its functions that read raw configuration dicts.

Both are derived from the models: a key of a block has the constants ``BLOCK_KEY``, its name, and
``BLOCK_KEY_DEFAULT``, and a getter which looks it up and supplies its default. Written here are the
functions that do more: they parse a value, or validate a block.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from deepspeed.runtime.config_models import features, zero
from deepspeed.runtime.config_models.base import nested_model
from deepspeed.runtime.config_models.reader import read_block
from deepspeed.runtime.config_models.training import (
    DeepSpeedBF16Config,
    DeepSpeedFP16Config,
    TrainingConfig,
)
from deepspeed.runtime.config_utils import parse_dtype
from deepspeed.runtime.constants import BFLOAT16_OLD

Config = dict[str, Any]


class _Key(NamedTuple):
    constant: str
    path: tuple[str, ...]
    field: FieldInfo

    def default(self) -> Any:
        required = self.field.is_required()
        return None if required else self.field.get_default(call_default_factory=True)


def keys(
    model: type[BaseModel],
    path: tuple[str, ...] = (),
    prefix: str = "",
    irregular: Mapping[str, str] | None = None,
) -> Iterator[_Key]:
    """Yield the keys of a block, whose constants start with `prefix` but for the `irregular`."""
    for name, field in model.model_fields.items():
        key = field.alias or name
        # "fp16_master_weights_and_grads" of "fp16" does not say it twice.
        stem = key.removeprefix(f"{path[-1]}_") if path else key
        constant = (irregular or {}).get(key, prefix + stem.upper())
        yield _Key(constant, (*path, key), field)


def constants(keys: Iterable[_Key]) -> dict[str, Any]:
    """Return the constants of keys: each one's name and default, of a block its name."""
    table: dict[str, Any] = {}
    for key in keys:
        table[key.constant] = key.path[-1]
        if nested_model(key.field) is None:
            table[f"{key.constant}_DEFAULT"] = key.default()
    return table


def _of_block(model: type[BaseModel], block: str, constant: str) -> dict[str, Any]:
    return {constant: block, **constants(keys(model, (block,), f"{constant}_"))}


FLOPS_PROFILER = _of_block(
    features.DeepSpeedFlopsProfilerConfig, "flops_profiler", "FLOPS_PROFILER"
)
NEBULA = _of_block(features.DeepSpeedNebulaConfig, "nebula", "NEBULA")
ACTIVATION_CHECKPOINTING = _of_block(
    features.DeepSpeedActivationCheckpointingConfig, "activation_checkpointing", "ACT_CHKPT"
)
ACTIVATION_CHECKPOINTING["ACTIVATION_CHKPT_FORMAT"] = (
    "\nThe configuration's block, with its defaults:\n"
    f'"{ACTIVATION_CHECKPOINTING["ACT_CHKPT"]}": '
    f"{json.dumps(features.DeepSpeedActivationCheckpointingConfig().model_dump(), indent=2)}\n"
)
ELASTICITY = constants(
    keys(
        features.ElasticityConfig,
        irregular={
            "max_train_batch_size": "MAX_ACCEPTABLE_BATCH_SIZE",
            "micro_batch_sizes": "MICRO_BATCHES",
        },
    )
)

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


def _keys() -> Iterator[_Key]:
    for key in keys(TrainingConfig, irregular=_IRREGULAR):
        yield key
        block = nested_model(key.field)
        if block is not None and key.path[-1] in _BLOCKS:
            yield from keys(block, key.path, _BLOCKS[key.path[-1]], _IRREGULAR)


def _getter(key: _Key) -> Callable[[Config], Any]:
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
    """Return the type that gradients are reduced in, None for their own."""
    return parse_dtype(param_dict.get(comm_type, comm_data_type_default), comm_type)


def get_torch_autocast_dtype(param_dict: Config) -> torch.dtype | None:
    """Return the type of torch.autocast, None for torch's default."""
    return parse_dtype(param_dict.get("torch_autocast", {}).get("dtype"), "torch_autocast.dtype")


def _of_named(block: str, key: str) -> Callable[[Config], Any]:
    """Make a getter of a key of a block that has a ``type``, None otherwise."""

    def get(param_dict: Config) -> Any:
        inner = param_dict.get(block) or {}
        return inner.get(key) if "type" in inner else None

    get.__name__ = get.__qualname__ = f"get_{block}_{'name' if key == 'type' else key}"
    get.__doc__ = f"Return ``{key}`` of the block ``{block}``, None where it has no ``type``."
    return get


def get_float16_config(param_dict: Config) -> DeepSpeedFP16Config:
    """Return the validated ``fp16`` block."""
    return read_block(DeepSpeedFP16Config, param_dict.get("fp16", {}), "fp16")


def get_bfloat16_config(param_dict: Config) -> DeepSpeedBF16Config:
    """Return the validated ``bf16`` block, under its old name too."""
    block = param_dict.get("bf16", param_dict.get(BFLOAT16_OLD, {}))
    return read_block(DeepSpeedBF16Config, block, "bf16")


def read_zero_config_deprecated(param_dict: Config) -> Config:
    """Return the block that the old form ``"zero_optimization": true`` stands for."""
    block: Config = {"stage": int(bool(param_dict["zero_optimization"]))}
    if block["stage"] and "allgather_size" in param_dict:
        block["allgather_bucket_size"] = param_dict["allgather_size"]
    return block


def get_zero_config(param_dict: Config) -> zero.DeepSpeedZeroConfig:
    """Return the validated ``zero_optimization`` block."""
    block = param_dict.get("zero_optimization", {})
    if isinstance(block, bool):
        block = read_zero_config_deprecated(param_dict)
    return read_block(zero.DeepSpeedZeroConfig, block, "zero_optimization")


def get_monitor_config(param_dict: Config) -> features.DeepSpeedMonitorConfig:
    """Return the validated monitor blocks."""
    names = [name for name in features.DeepSpeedMonitorConfig.model_fields if name in param_dict]
    return read_block(features.DeepSpeedMonitorConfig, {name: param_dict[name] for name in names})


CONSTANTS = constants(_keys())
GETTERS: dict[str, Callable[..., Any]] = {
    get.__name__: get
    for get in (
        *(_getter(key) for key in _keys() if nested_model(key.field) is None),
        get_communication_data_type,
        *(_of_named(one, key) for one in ("optimizer", "scheduler") for key in ("type", "params")),
        get_torch_autocast_dtype,
        get_zero_config,
    )
}

"""ZeRO's stage enum and, lazily, the model of the ``zero_optimization`` block.

The model stands in ``deepspeed.runtime.config_models.zero``. ``ZeroStageEnum`` must stay in this
module: checkpoints pickle it by this path.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepspeed.runtime.config_models.zero import DeepSpeedZeroConfig as DeepSpeedZeroConfig

ZERO_OPTIMIZATION = "zero_optimization"


class ZeroStageEnum(int, Enum):
    """What ZeRO shards over the data-parallel group."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


def read_zero_config_deprecated(param_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the block that the old form ``"zero_optimization": true`` stands for."""
    block: dict[str, Any] = {"stage": 1 if param_dict[ZERO_OPTIMIZATION] else 0}
    if block["stage"] and "allgather_size" in param_dict:
        block["allgather_bucket_size"] = param_dict["allgather_size"]
    return block


def get_zero_config(param_dict: dict[str, Any]) -> DeepSpeedZeroConfig:
    """Return the validated ``zero_optimization`` block of a whole configuration.

    Raises:
        DeepSpeedConfigError: naming each key that is unknown or has a wrong type.
    """
    # startup: the models need pydantic.
    from deepspeed.runtime.config_models.reader import read_block
    from deepspeed.runtime.config_models.zero import DeepSpeedZeroConfig

    block = param_dict.get(ZERO_OPTIMIZATION, {})
    if isinstance(block, bool):
        block = read_zero_config_deprecated(param_dict)
    return read_block(DeepSpeedZeroConfig, block, ZERO_OPTIMIZATION)


def __getattr__(name: str) -> Any:
    """Load the model on first use (startup: pydantic is slow to import)."""
    if name == "DeepSpeedZeroConfig":
        from deepspeed.runtime.config_models.zero import DeepSpeedZeroConfig

        return DeepSpeedZeroConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

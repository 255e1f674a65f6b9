"""Where ZeRO may keep optimizer state and parameters: device and state enums, and (lazily) the two
models.

The models stand in ``deepspeed.runtime.config_models.zero``; the names here are upstream's import
paths.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepspeed.runtime.config_models.zero import (
        DeepSpeedZeroOffloadOptimizerConfig as DeepSpeedZeroOffloadOptimizerConfig,
    )
    from deepspeed.runtime.config_models.zero import (
        DeepSpeedZeroOffloadParamConfig as DeepSpeedZeroOffloadParamConfig,
    )

OFFLOAD_CPU_DEVICE = "cpu"
OFFLOAD_NVME_DEVICE = "nvme"


class OffloadDeviceEnum(str, Enum):
    """Where offloaded state lives."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):
    """Kinds of engine state that can be moved off the device."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


def __getattr__(name: str) -> Any:
    """Load the models on first use (startup: pydantic is slow to import)."""
    if name in ("DeepSpeedZeroOffloadOptimizerConfig", "DeepSpeedZeroOffloadParamConfig"):
        from deepspeed.runtime.config_models import zero

        return getattr(zero, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""The four monitor blocks.

The models stand in ``deepspeed.runtime.config_models.observe``; the names here are upstream's
import paths.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepspeed.runtime.config_models.observe import CometConfig as CometConfig
    from deepspeed.runtime.config_models.observe import CSVConfig as CSVConfig
    from deepspeed.runtime.config_models.observe import (
        DeepSpeedMonitorConfig as DeepSpeedMonitorConfig,
    )
    from deepspeed.runtime.config_models.observe import TensorBoardConfig as TensorBoardConfig
    from deepspeed.runtime.config_models.observe import WandbConfig as WandbConfig

_MODELS = (
    "TensorBoardConfig",
    "WandbConfig",
    "CSVConfig",
    "CometConfig",
    "DeepSpeedMonitorConfig",
)


def __getattr__(name: str) -> Any:
    """Load the models on first use (startup: pydantic is slow to import)."""
    if name in _MODELS:
        from deepspeed.runtime.config_models import observe

        return getattr(observe, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def get_monitor_config(param_dict: dict[str, Any]) -> DeepSpeedMonitorConfig:
    """Return the validated monitor blocks of a whole configuration."""
    # startup: the models need pydantic.
    from deepspeed.runtime.config_models.observe import DeepSpeedMonitorConfig
    from deepspeed.runtime.config_models.reader import read_block

    names = [name for name in DeepSpeedMonitorConfig.model_fields if name in param_dict]
    return read_block(DeepSpeedMonitorConfig, {name: param_dict[name] for name in names})

"""The nebula block.

The models stand in ``deepspeed.runtime.config_models.features``; the names here are upstream's
import paths.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepspeed.runtime.config_models.features import (
        DeepSpeedNebulaConfig as DeepSpeedNebulaConfig,
    )

_MODELS = ("DeepSpeedNebulaConfig",)


def __getattr__(name: str) -> Any:
    """Load the models on first use (startup: pydantic is slow to import)."""
    if name in _MODELS:
        from deepspeed.runtime.config_models import features

        return getattr(features, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""The flops_profiler block.

The models stand in ``deepspeed.runtime.config_models.observe``; the names here are upstream's
import paths.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deepspeed.profiling.constants import *  # noqa: F403  # upstream's path of these names

if TYPE_CHECKING:
    from deepspeed.runtime.config_models.observe import (
        DeepSpeedFlopsProfilerConfig as DeepSpeedFlopsProfilerConfig,
    )

_MODELS = ("DeepSpeedFlopsProfilerConfig",)


def __getattr__(name: str) -> Any:
    """Load the models on first use (startup: pydantic is slow to import)."""
    if name in _MODELS:
        from deepspeed.runtime.config_models import observe

        return getattr(observe, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

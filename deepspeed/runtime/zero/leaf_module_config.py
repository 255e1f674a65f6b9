"""Defaults of the leaf-module block and, lazily, its model
(``deepspeed.runtime.config_models.zero``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepspeed.runtime.config_models.zero import (
        DeepSpeedZeroLeafModuleConfig as DeepSpeedZeroLeafModuleConfig,
    )

DEFAULT_LEAF_MODULE_CLASSES: list[str] = [
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
]
DEFAULT_LEAF_MODULE_NAMES: list[str] = []
DEFAULT_LEAF_MODULE_NAME_SUFFIXES: list[str] = []


def __getattr__(name: str) -> Any:
    """Load the model on first use (startup: pydantic is slow to import)."""
    if name == "DeepSpeedZeroLeafModuleConfig":
        from deepspeed.runtime.config_models.zero import DeepSpeedZeroLeafModuleConfig

        return DeepSpeedZeroLeafModuleConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

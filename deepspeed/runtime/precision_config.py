"""The fp16 and bf16 blocks.

The models stand in ``deepspeed.runtime.config_models.precision``; the names here are upstream's
import paths.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepspeed.runtime.config_models.precision import DeepSpeedBF16Config as DeepSpeedBF16Config
    from deepspeed.runtime.config_models.precision import DeepSpeedFP16Config as DeepSpeedFP16Config

FP16 = "fp16"
BFLOAT16 = "bf16"
BFLOAT16_OLD = "bfloat16"
INITIAL_LOSS_SCALE = "init_scale"
SCALE_WINDOW = "scale_window"
DELAYED_SHIFT = "delayed_shift"
CONSECUTIVE_HYSTERESIS = "consecutive_hysteresis"
MIN_LOSS_SCALE = "min_scale"

_MODELS = (
    "DeepSpeedFP16Config",
    "DeepSpeedBF16Config",
)


def __getattr__(name: str) -> Any:
    """Load the models on first use (startup: pydantic is slow to import)."""
    if name in _MODELS:
        from deepspeed.runtime.config_models import precision

        return getattr(precision, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def get_float16_config(param_dict: dict[str, Any]) -> DeepSpeedFP16Config:
    """Return the validated ``fp16`` block of a whole configuration."""
    # startup: the models need pydantic.
    from deepspeed.runtime.config_models.precision import DeepSpeedFP16Config
    from deepspeed.runtime.config_models.reader import read_block

    return read_block(DeepSpeedFP16Config, param_dict.get(FP16, {}), FP16)


def get_bfloat16_config(param_dict: dict[str, Any]) -> DeepSpeedBF16Config:
    """Return the validated ``bf16`` block of a whole configuration, under its old name too."""
    # startup: the models need pydantic.
    from deepspeed.runtime.config_models.precision import DeepSpeedBF16Config
    from deepspeed.runtime.config_models.reader import read_block

    block = param_dict.get(BFLOAT16, param_dict.get(BFLOAT16_OLD, {}))
    return read_block(DeepSpeedBF16Config, block, BFLOAT16)

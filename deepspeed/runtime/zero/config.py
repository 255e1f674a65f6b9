"""Upstream's path of ZeRO's stages, and of the ``zero_optimization`` block's model and getter."""

from deepspeed._lazy import lazy_attributes
from deepspeed.runtime.config_models.enums import ZeroStageEnum as ZeroStageEnum

_NAMES = {
    "DeepSpeedZeroConfig": "deepspeed.runtime.config_models.zero",
    "get_zero_config": "deepspeed.runtime.config_models.getters",
    "read_zero_config_deprecated": "deepspeed.runtime.config_models.getters",
    "ZERO_OPTIMIZATION": "deepspeed.runtime.constants",
}
__getattr__ = lazy_attributes(__name__, _NAMES)

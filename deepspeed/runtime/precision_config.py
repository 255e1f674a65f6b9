"""The fp16 and bf16 blocks: upstream's path of their models, getters and constants."""

from deepspeed._lazy import lazy_attributes

_NAMES = {
    "DeepSpeedFP16Config": "deepspeed.runtime.config_models.training",
    "DeepSpeedBF16Config": "deepspeed.runtime.config_models.training",
    "get_float16_config": "deepspeed.runtime.config_models.getters",
    "get_bfloat16_config": "deepspeed.runtime.config_models.getters",
    "FP16": "deepspeed.runtime.constants",
    "BFLOAT16": "deepspeed.runtime.constants",
    "BFLOAT16_OLD": "deepspeed.runtime.constants",
    "INITIAL_LOSS_SCALE": "deepspeed.runtime.fp16.loss_scaler",
    "SCALE_WINDOW": "deepspeed.runtime.fp16.loss_scaler",
    "DELAYED_SHIFT": "deepspeed.runtime.fp16.loss_scaler",
    "CONSECUTIVE_HYSTERESIS": "deepspeed.runtime.fp16.loss_scaler",
    "MIN_LOSS_SCALE": "deepspeed.runtime.fp16.loss_scaler",
}
__getattr__ = lazy_attributes(__name__, _NAMES)

"""Where ZeRO may keep optimizer state and parameters: upstream's path of enums and models."""

from enum import Enum

from deepspeed._lazy import lazy_attributes
from deepspeed.runtime.config_models.enums import OffloadDeviceEnum as OffloadDeviceEnum

_MODELS = ("DeepSpeedZeroOffloadOptimizerConfig", "DeepSpeedZeroOffloadParamConfig")
__getattr__ = lazy_attributes(
    __name__, dict.fromkeys(_MODELS, "deepspeed.runtime.config_models.zero")
)

OFFLOAD_CPU_DEVICE = "cpu"
OFFLOAD_NVME_DEVICE = "nvme"
MIN_SWAPPABLE_BYTES = 2**20  # upstream's NVMe offload leaves smaller tensors where they are


class OffloadStateTypeEnum(str, Enum):
    """Kinds of engine state that can be moved off the device."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"

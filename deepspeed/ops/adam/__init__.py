"""Adam optimizers."""

from deepspeed._lazy import lazy_attributes
from deepspeed.ops.adam.cpu_adam import DeepSpeedCPUAdam
from deepspeed.ops.adam.fused_adam import FusedAdam

# Upstream's further names here say what to use instead.
__getattr__ = lazy_attributes(__name__)

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]

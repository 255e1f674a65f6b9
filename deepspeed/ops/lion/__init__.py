"""Lion optimizers."""

from deepspeed.ops.lion.cpu_lion import DeepSpeedCPULion
from deepspeed.ops.lion.lion import FusedLion, Lion

__all__ = ["DeepSpeedCPULion", "FusedLion", "Lion"]

"""Lion optimizers."""

from deepspeed.ops.lion.lion import DeepSpeedCPULion, FusedLion, Lion

__all__ = ["DeepSpeedCPULion", "FusedLion", "Lion"]

"""Upstream's path of the optimizers' base classes."""

from __future__ import annotations

from deepspeed._lazy import lazy_attributes

__getattr__ = lazy_attributes(
    __name__,
    {
        "DeepSpeedOptimizer": "deepspeed.runtime.optimizers.step_sequence",
        "ZeROOptimizer": "deepspeed.runtime.zero.zero_optimizer",
    },
)

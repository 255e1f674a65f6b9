"""Upstream's path of the optimizers' base classes.

The order of a step is ``optimizers.step_sequence``'s, sharded state ``zero.zero_optimizer``'s.
"""

from __future__ import annotations

from deepspeed._lazy import lazy_attributes

# Sharded optimizers derive from DeepSpeedOptimizer too, so their base can only be reached late.
__getattr__ = lazy_attributes(__name__, {"ZeROOptimizer": "deepspeed.runtime.zero.zero_optimizer"})


class DeepSpeedOptimizer:
    """Marker base class of the optimizers that `deepspeed.initialize` returns."""

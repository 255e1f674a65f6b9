"""ZeRO's stage enum, and upstream's path of the ``zero_optimization`` block's model and getter.

``ZeroStageEnum`` must stay in this module: checkpoints pickle it by this path.
"""

from enum import Enum
from typing import Any

from deepspeed._lazy import lazy_attributes

_NAMES = {
    "DeepSpeedZeroConfig": "deepspeed.runtime.config_models.zero",
    "get_zero_config": "deepspeed.runtime.config_models.getters",
    "read_zero_config_deprecated": "deepspeed.runtime.config_models.getters",
    "ZERO_OPTIMIZATION": "deepspeed.runtime.constants",
}
__getattr__ = lazy_attributes(__name__, _NAMES)


class ZeroStageEnum(int, Enum):
    """What ZeRO shards over the data-parallel group."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """As files of other Pythons have it: 3.11.0 to 3.11.3 would write getattr, which loading
        refuses.
        """
        return type(self), (self.value,)

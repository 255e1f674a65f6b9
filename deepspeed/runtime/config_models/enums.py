"""ZeRO's stage and device enums, which configuration and checkpoints read without its models.

Their module is upstream's, `deepspeed.runtime.zero`: checkpoints pickle the stage by that path.
"""

from enum import Enum


class ZeroStageEnum(int, Enum):
    """What ZeRO shards over the data-parallel group."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3

    def __reduce_ex__(self, protocol: object) -> tuple[type, tuple[int]]:
        """Pickle as other Pythons do: 3.11.0 to 3.11.3 write getattr, which loading refuses."""
        return type(self), (self.value,)


class OffloadDeviceEnum(str, Enum):
    """Where offloaded state lives."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


ZeroStageEnum.__module__ = "deepspeed.runtime.zero.config"
OffloadDeviceEnum.__module__ = "deepspeed.runtime.zero.offload_config"

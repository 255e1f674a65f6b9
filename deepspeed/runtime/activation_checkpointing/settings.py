"""What `deepspeed.checkpointing.configure` has chosen, and its checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deepspeed.comm import Group
from deepspeed.ops.state_files import StateFiles
from deepspeed.runtime.config_utils import DeepSpeedConfigError
from deepspeed.utils import groups
from deepspeed.utils.bwc import (
    bwc_tensor_model_parallel_group,
    bwc_tensor_model_parallel_rank,
    bwc_tensor_model_parallel_world_size,
)


@dataclass(frozen=True)
class Settings:
    """The arguments of `configure`, and whether the user's script called it (`by_client`). `files`
    makes those that what is saved goes to.
    """

    mpu: Any = None
    partition_activations: bool = False
    contiguous: bool = False
    num_checkpoints: int | None = None
    cpu: bool = False
    files: Callable[[], StateFiles] | None = None
    synchronize: bool = False
    profile: bool = False
    by_client: bool = False

    def check(self) -> None:
        """Refuse contiguous buffers without partitioning or without their size, and files of what
        is not on the host.
        """
        if self.files is not None and (self.contiguous or not self.cpu):
            raise DeepSpeedConfigError(
                "activation_checkpointing.nvme_path: files get what is on the host, one by one; "
                "set cpu_checkpointing: true and contiguous_memory_optimization: false"
            )
        if not self.contiguous:
            return
        if not self.partition_activations:
            raise DeepSpeedConfigError(
                "activation_checkpointing.contiguous_memory_optimization: true needs partitioned "
                "activations; set partition_activations: true, or contiguous_memory_optimization: "
                "false"
            )
        if self.num_checkpoints is None or self.num_checkpoints < 1:
            raise DeepSpeedConfigError(
                "activation_checkpointing.contiguous_memory_optimization: true needs the number of "
                f"checkpointed functions; number_checkpoints is {self.num_checkpoints}: set it, or "
                "give configure(num_checkpoints=...)"
            )

    @property
    def _unit(self) -> Any:
        return self.mpu if self.mpu is not None else groups.current().mpu

    @property
    def group(self) -> Group:
        return bwc_tensor_model_parallel_group(self._unit)

    @property
    def group_size(self) -> int:
        return bwc_tensor_model_parallel_world_size(self._unit)

    @property
    def group_rank(self) -> int:
        return bwc_tensor_model_parallel_rank(self._unit)


_current = Settings()
_is_configured = False


def current() -> Settings:
    """Return the settings in force."""
    return _current


def is_configured() -> bool:
    """Tell whether they were chosen, and are not the defaults for want of a choice."""
    return _is_configured


def choose(chosen: Settings) -> None:
    """Put settings in force, unless they cannot be honoured."""
    global _current, _is_configured
    chosen.check()
    _current, _is_configured = chosen, True


def change(**changes: Any) -> None:
    """Change some attributes of the settings in force; that is no choice of all of them."""
    global _current
    _current = dataclasses.replace(_current, **changes)

"""What offload keeps of a rank's shard, and where: the table of docs/offload.md."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from deepspeed.ops import state_files
from deepspeed.runtime.config import read_tree
from deepspeed.runtime.config_models.enums import OffloadDeviceEnum
from deepspeed.runtime.config_models.zero import DeepSpeedZeroOffloadOptimizerConfig
from deepspeed.runtime.config_utils import parse_dtype
from deepspeed.runtime.gradients.sink import STAGE_NUMEL
from deepspeed.runtime.sharding import publisher
from deepspeed.runtime.sharding.low_precision import LowPrecision

Config = str | os.PathLike[str] | dict[str, Any]

FP32_BYTES, HALF_BYTES = 4, 2
OPTIMIZER_DEFAULTS = DeepSpeedZeroOffloadOptimizerConfig()


class KeptState(NamedTuple):
    """How the optimizer's state is kept; the defaults are those of a configuration.

    Attributes:
        master, grad, moment: Bytes of each per element.
        in_files: With offload, masters and moments are in files ("nvme").
        is_twice: With offload, they are there a second time (`speculative_update`).
        params_in_files: Parameters of stage 3 that are not on the device are in files.
    """

    master: int = FP32_BYTES
    grad: int = FP32_BYTES
    moment: int = FP32_BYTES
    in_files: bool = False
    is_twice: bool = False
    params_in_files: bool = False

    @classmethod
    def of(cls, config: Config | None) -> KeptState:
        """Read the keys of a configuration that say so.

        Raises:
            DeepSpeedConfigError: it cannot be read.
        """
        if config is None:
            return FP32_STATE
        tree, _ = read_tree(config)
        zero, nvme = tree.zero_optimization, OffloadDeviceEnum.nvme
        offload, params = zero.offload_optimizer, zero.offload_param
        short, sums = LowPrecision.of(tree), parse_dtype(tree.data_types.grad_accum_dtype)
        return cls(
            FP32_BYTES if short is None else HALF_BYTES,
            FP32_BYTES if short is None and sums not in publisher.HALF_DTYPES else HALF_BYTES,
            FP32_BYTES if short is None else short.state_dtype.itemsize,
            offload is not None and offload.device == nvme,
            offload is not None and offload.speculative_update,
            params is not None and params.device == nvme,
        )

    def host(self, numel: int, moments: int) -> int:
        """Count bytes of host memory for a shard, without what `staged` counts."""
        if self.in_files:
            windows = state_files.NUM_WINDOWS * (1 + moments) if numel else 0
            return self.grad * numel + windows * state_files.WINDOW_NUMEL * FP32_BYTES
        return self.grad * numel + self._kept(numel, moments)

    def disk(self, numel: int, moments: int) -> int:
        """Count bytes of the files of a shard."""
        return self._kept(numel, moments) if self.in_files else 0

    def _kept(self, numel: int, moments: int) -> int:
        return numel * (self.master + moments * self.moment) * (1 + self.is_twice)


FP32_STATE = KeptState()


def staged(slice_numel: int, sent_numel: int, model_bytes: int) -> int:
    """Count page-locked bytes: gradients on their way to the host, of which a reduction brings
    `slice_numel`, and weights on their way from there, of a shard of `sent_numel`.
    """
    gradients = OPTIMIZER_DEFAULTS.buffer_count * min(STAGE_NUMEL, slice_numel)
    return model_bytes * (
        gradients + publisher.NUM_STAGED * min(publisher.UPDATE_NUMEL, sent_numel)
    )

"""Upstream's path of the part of stage 3 that knows who needs which parameters."""

from deepspeed.runtime.zero.gathering.coordinator import (
    PartitionedParameterCoordinator as PartitionedParameterCoordinator,
)

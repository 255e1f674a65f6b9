"""The `elasticity` block as an object, checked, and the errors of elastic training under upstream's
names.

Owns: what a block must contain. Does not own: what follows from it (`elasticity`).
"""

from __future__ import annotations

import json
from typing import Any

from deepspeed.elasticity import constants
from deepspeed.elasticity.constants import (
    DEEPSPEED_ELASTICITY_CONFIG as DEEPSPEED_ELASTICITY_CONFIG,
)
from deepspeed.elasticity.constants import LATEST_ELASTICITY_VERSION as LATEST_ELASTICITY_VERSION

# Attribute of the object -> its constant, where that is not its name in upper case.
_CONSTANTS = {"prefer_larger_batch_size": "PREFER_LARGER_BATCH"}


class ElasticityError(Exception):
    """Elastic training cannot be set up."""


class ElasticityConfigError(ElasticityError):
    """The `elasticity` block is wrong; the text names the key, the value and the remedy."""


class ElasticityIncompatibleWorldSize(ElasticityError):
    """No elastic batch fits the number of ranks that was started."""


class ElasticityConfig:
    """A checked `elasticity` block; missing keys take upstream's defaults."""

    enabled: bool
    max_acceptable_batch_size: int  # largest global batch, in samples
    micro_batches: list[int]  # samples per forward on one rank to choose from
    min_gpus: int  # fewest and most ranks
    max_gpus: int
    num_gpus_per_node: int  # ranks of one node (version 0.2 counts in nodes)
    model_parallel_size: int  # ranks that hold one copy of the model (version 0.2)
    min_time: int  # minutes between two changes of the world; read by resource schedulers only
    prefer_larger_batch_size: bool  # of equally good batches, take the larger
    # Override batch keys that stand beside the block instead of refusing them.
    ignore_non_elastic_batch_info: bool
    version: float  # of the algorithm, 0.1 or 0.2

    def __init__(self, param_dict: dict[str, Any]) -> None:
        if param_dict.get("enabled"):
            for required in (constants.MAX_ACCEPTABLE_BATCH_SIZE, constants.MICRO_BATCHES):
                if required not in param_dict:
                    raise ElasticityConfigError(
                        f"Elasticity config missing {required}; an enabled block must give it"
                    )
        for attribute in ElasticityConfig.__annotations__:
            name = _CONSTANTS.get(attribute, attribute.upper())
            key, default = getattr(constants, name), getattr(constants, f"{name}_DEFAULT")
            setattr(self, attribute, param_dict.get(key, default))
        self._check_micro_batches()
        self._check_sizes()

    def _check_micro_batches(self) -> None:
        sizes = self.micro_batches
        if not isinstance(sizes, list):
            raise ElasticityConfigError(
                f"Elasticity expected value of {constants.MICRO_BATCHES} to be a list of micro "
                f"batches, instead is: {type(sizes)}, containing: {sizes}"
            )
        if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes):
            raise ElasticityConfigError(
                f"Elasticity expected {constants.MICRO_BATCHES} to only contain positive integers, "
                f"at least one, instead contains: {sizes}"
            )

    def _check_sizes(self) -> None:
        if self.min_gpus < 1 or self.max_gpus < 1:
            raise ElasticityConfigError(
                f"Elasticity min/max gpus must be > 0, given min_gpus: {self.min_gpus}, max_gpus: "
                f"{self.max_gpus}"
            )
        if self.min_gpus > self.max_gpus:
            raise ElasticityConfigError(
                "Elasticity min_gpus cannot be greater than max_gpus, given min_gpus: "
                f"{self.min_gpus}, max_gpus: {self.max_gpus}"
            )
        if self.model_parallel_size < 1:
            raise ElasticityConfigError(
                "Model-Parallel size cannot be less than 1, given model-parallel size: "
                f"{self.model_parallel_size}"
            )
        if self.num_gpus_per_node < 1:
            raise ElasticityConfigError(
                "Number of GPUs per node cannot be less than 1, given number of GPUs per node: "
                f"{self.num_gpus_per_node}"
            )
        if self.min_time < 0:
            raise ElasticityConfigError(
                f"Elasticity min time needs to be >= 0: given {self.min_time}"
            )

    def repr(self) -> dict[str, Any]:
        """Return the attributes as a dict."""
        return self.__dict__

    def __repr__(self) -> str:
        return json.dumps(self.__dict__, sort_keys=True, indent=4)

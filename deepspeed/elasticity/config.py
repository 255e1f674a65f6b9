"""The `elasticity` block as an object, checked, and the errors of elastic training."""

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


class ElasticityConfigError(ElasticityError, ValueError):
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
                    text = f"missing {required}; an enabled block must give it"
                    raise ElasticityConfigError(f"Elasticity config {text}")
        for attribute in ElasticityConfig.__annotations__:
            name = _CONSTANTS.get(attribute, attribute.upper())
            key, default = getattr(constants, name), getattr(constants, f"{name}_DEFAULT")
            setattr(self, attribute, param_dict.get(key, default))
        wrong = self._wrong()
        if wrong:
            raise ElasticityConfigError(wrong)

    def _wrong(self) -> str:
        sizes, least, most = self.micro_batches, self.min_gpus, self.max_gpus
        key, given = constants.MICRO_BATCHES, f"given min_gpus: {least}, max_gpus: {most}"
        if not isinstance(sizes, list):
            return (
                f"Elasticity expected value of {key} to be a list of micro batches, instead is: "
                f"{type(sizes)}, containing: {sizes}"
            )
        if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes):
            text = f"to only contain positive integers, at least one, instead contains: {sizes}"
            return f"Elasticity expected {key} {text}"
        if least < 1 or most < 1:
            return f"Elasticity min/max gpus must be > 0, {given}"
        if least > most:
            return f"Elasticity min_gpus cannot be greater than max_gpus, {given}"
        for name, value in (
            ("Model-Parallel size", self.model_parallel_size),
            ("Number of GPUs per node", self.num_gpus_per_node),
        ):
            if value < 1:
                said = name.replace("Model-P", "model-p").replace("Number", "number")
                return f"{name} cannot be less than 1, given {said}: {value}"
        if self.min_time < 0:
            return f"Elasticity min time needs to be >= 0: given {self.min_time}"
        return ""

    def repr(self) -> dict[str, Any]:
        """Return the attributes as a dict."""
        return self.__dict__

    def __repr__(self) -> str:
        return json.dumps(self.__dict__, sort_keys=True, indent=4)

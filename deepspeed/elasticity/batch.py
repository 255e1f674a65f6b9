"""The three batch numbers of an elastic run, for the ranks that are there.

Owns: what an enabled `elasticity` block means to a configuration. Does not own: the arithmetic
(`elasticity`) nor how ranks are counted. Called by: `deepspeed.runtime.config`.
"""

from __future__ import annotations

from typing import Any

from deepspeed.elasticity.config import ElasticityConfig, ElasticityConfigError
from deepspeed.elasticity.constants import ELASTICITY
from deepspeed.elasticity.elasticity import compute_elastic_config, ensure_immutable_elastic_config
from deepspeed.git_version_info import version
from deepspeed.utils.logging import logger

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def elastic_batch_sizes(
    param_dict: dict[str, Any], data_parallel_size: int, world_size: int
) -> tuple[int, int, int]:
    """Return train batch, micro-batch and accumulation steps of an enabled `elasticity` block."""
    block = param_dict[ELASTICITY]
    config = ElasticityConfig(block)
    if world_size != data_parallel_size * config.model_parallel_size:
        raise ElasticityConfigError(
            f"elasticity.model_parallel_size: {config.model_parallel_size}, but {world_size} ranks "
            f"share the data in {data_parallel_size} parts; set it to the ranks that hold one copy "
            "of the model"
        )
    ensure_immutable_elastic_config(block)
    batch, _, micro = compute_elastic_config(param_dict, version, world_size=world_size)  # type: ignore[misc]
    chosen = (batch, micro, batch // (micro * data_parallel_size))
    # A configuration that was filled in before says what is chosen now, and is no contradiction.
    given = [
        f"{key}: {param_dict[key]}"
        for key, value in zip(BATCH_KEYS, chosen, strict=True)
        if param_dict.get(key) not in (None, value)
    ]
    if given and not config.ignore_non_elastic_batch_info:
        raise ElasticityConfigError(
            f"{', '.join(given)}: elasticity.enabled chooses the batch sizes; remove these keys, "
            "or set elasticity.ignore_non_elastic_batch_info to true to have them overridden"
        )
    if given:
        logger.warning("elasticity overrides %s", ", ".join(given))
    return chosen

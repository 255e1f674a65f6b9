"""Batch sizes that many world sizes can share: upstream's arithmetic, versions 0.1 and 0.2.

Owns: which global batch is taken, which numbers of ranks fit it, and the micro-batch of one of
them. Pure but for two environment variables (`WORLD_SIZE` and what a scheduler leaves in
`DEEPSPEED_ELASTICITY_CONFIG`). Does not own: the configuration that is filled in with the result
(`deepspeed.runtime.config`). Light: it imports neither torch nor numpy.

A batch fits `n` ranks when some micro-batch size divides it into `n` equal parts. Numbers with many
divisors fit many world sizes, so candidates are the micro-batch sizes (and their least common
multiple) times highly composite numbers.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from typing import Any, NamedTuple

from packaging.version import parse

from deepspeed.elasticity.config import (
    ElasticityConfig,
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
)
from deepspeed.elasticity.constants import (
    DEEPSPEED_ELASTICITY_CONFIG,
    ELASTICITY,
    LATEST_ELASTICITY_VERSION,
    MINIMUM_DEEPSPEED_VERSION,
)
from deepspeed.utils.logging import logger

HCN_LIST: list[int] = [
    1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560,
    10080, 15120, 20160, 25200, 27720, 45360, 50400, 55440, 83160, 110880, 166320, 221760, 277200,
    332640, 498960, 554400, 665280, 720720,
]  # fmt: skip
"""Highly composite numbers: each has more divisors than any smaller number."""


class _Choice(NamedTuple):
    """Global batch, the sizes it fits, and a micro-batch for the present one (0: unknown)."""

    batch: int
    valid: list[int]
    micro: int = 0


def get_candidate_batch_sizes(base_list: list[int], max_acceptable_batch_size: int) -> list[int]:
    """Return each base's largest highly composite multiple within the limit, sorted."""
    candidates = {
        base * max(factor for factor in HCN_LIST if factor * base <= max_acceptable_batch_size)
        for base in base_list
        if base <= max_acceptable_batch_size
    }
    logger.info("candidate batch sizes: %s", sorted(candidates))
    return sorted(candidates)


def get_valid_gpus(
    batch_size: int, micro_batches: list[int], min_valid_gpus: int, max_valid_gpus: int
) -> list[int]:
    """Return the numbers of ranks within the limits that `batch_size` divides among, sorted."""
    fitting: set[int] = set()
    for micro in micro_batches:
        if batch_size % micro == 0:
            fitting.update(_divisors(batch_size // micro))
    return sorted(count for count in fitting if min_valid_gpus <= count <= max_valid_gpus)


def _divisors(number: int) -> Iterable[int]:
    for low in range(1, math.isqrt(number) + 1):
        if number % low == 0:
            yield low
            yield number // low


def get_best_candidates(
    candidate_batch_sizes: list[int],
    micro_batches: list[int],
    min_gpus: int,
    max_gpus: int,
    prefer_larger: bool,
) -> tuple[int, list[int] | None]:
    """Return the candidate that fits most numbers of ranks, and those numbers.

    Of equals the larger batch wins, or the smaller unless `prefer_larger`. Without any that fits:
    the smallest micro-batch size and None (as upstream has it; `prefer_larger` gives the largest
    candidate and an empty list).
    """
    best_batch: int = min(micro_batches)
    best_valid: list[int] | None = None
    for batch in candidate_batch_sizes:
        valid = get_valid_gpus(batch, micro_batches, min_gpus, max_gpus)
        lead = len(valid) - len(best_valid or ())
        if lead > 0 or (
            lead == 0 and (batch > best_batch if prefer_larger else batch < best_batch)
        ):
            best_batch, best_valid = batch, valid
    return best_batch, best_valid


def _compatible_batch(
    config: ElasticityConfig, max_batch: int, min_count: int, max_count: int
) -> tuple[int, list[int]]:
    """Choose a batch for counts (of ranks, or of nodes) between two limits."""
    if max(config.micro_batches) > max_batch:
        raise ValueError(
            "All micro batches must be less than or equal to max_acceptable_batch_size: "
            f"{max_batch}, given micro_batch_sizes: {config.micro_batches}"
        )
    bases = [*config.micro_batches, math.lcm(*config.micro_batches)]
    candidates = get_candidate_batch_sizes(bases, max_batch)
    batch, valid = get_best_candidates(
        candidates, config.micro_batches, min_count, max_count, config.prefer_larger_batch_size
    )
    return batch, valid or []


def _largest_dividing(micro_batches: list[int], per_rank: int) -> int:
    return max(micro for micro in micro_batches if per_rank % micro == 0)


def _choose_v01(config: ElasticityConfig, world_size: int, return_microbatch: bool) -> _Choice:
    """Version 0.1: count in ranks."""
    batch, valid = _compatible_batch(
        config, config.max_acceptable_batch_size, config.min_gpus, config.max_gpus
    )
    if world_size == 0 and return_microbatch:
        world_size = _world_size_from_environment("0.1", "a micro batch size")
    if world_size == 0:
        return _Choice(batch, valid)
    if world_size not in valid:
        raise _incompatible(world_size, valid)
    return _Choice(batch, valid, _largest_dividing(config.micro_batches, batch // world_size))


def _choose_v02(config: ElasticityConfig, world_size: int) -> _Choice:
    """Choose by version 0.2, which counts in nodes, in which model-parallel groups have a place.

    Valid numbers are data-parallel sizes. A world that is none of them (half a node is away) gets a
    batch of its own: the multiple of a micro-batch times its data-parallel size that comes closest
    to the largest batch.
    """
    parallel = config.model_parallel_size
    if config.num_gpus_per_node % parallel:
        raise ElasticityError(
            f"In Elasticity v0.2, number of GPUs per node: {config.num_gpus_per_node} should be "
            f"divisible by model parallel size {parallel}; change num_gpus_per_node or "
            "model_parallel_size"
        )
    replicas = config.num_gpus_per_node // parallel
    batch, valid_nodes = _compatible_batch(
        config,
        config.max_acceptable_batch_size // replicas,
        config.min_gpus // config.num_gpus_per_node,
        config.max_gpus // config.num_gpus_per_node,
    )
    valid = [nodes * replicas for nodes in valid_nodes]
    if world_size % parallel:
        raise ElasticityIncompatibleWorldSize(
            f"World size ({world_size}) is not valid: it is no multiple of model_parallel_size "
            f"({parallel})"
        )
    size = world_size // parallel
    if size in valid:
        return _Choice(
            batch * replicas,
            valid,
            _largest_dividing(config.micro_batches, batch * replicas // size),
        )
    if not config.min_gpus <= world_size <= config.max_gpus:
        # As upstream, which starts nodes by the limits and trains with what came.
        logger.warning(
            "elasticity: %d ranks are outside min_gpus..max_gpus (%d..%d); they get a batch of "
            "their own",
            world_size,
            config.min_gpus,
            config.max_gpus,
        )
    return _own_batch(config, world_size, size)


def _own_batch(config: ElasticityConfig, world_size: int, size: int) -> _Choice:
    """The batch of a world that the common one does not fit; `size` is its data-parallel size."""
    limit = config.max_acceptable_batch_size
    batches = [
        step * (limit // step) for micro in config.micro_batches if (step := micro * size) <= limit
    ]
    if not batches:
        raise ElasticityIncompatibleWorldSize(
            f"World size ({world_size}) is not valid: one micro-batch of "
            f"{min(config.micro_batches)} on each of {size} data-parallel ranks exceeds "
            f"max_train_batch_size ({limit}); raise it or start fewer ranks"
        )
    batch = max(batches) if config.prefer_larger_batch_size else min(batches)
    return _Choice(batch, [size], _largest_dividing(config.micro_batches, batch // size))


def _incompatible(world_size: int, valid: list[int]) -> ElasticityIncompatibleWorldSize:
    return ElasticityIncompatibleWorldSize(
        f"World size ({world_size}) is not valid with the current list of valid GPU counts: {valid}"
    )


def _world_size_from_environment(version: str, purpose: str) -> int:
    text = os.environ.get("WORLD_SIZE")
    if text is None or not text.isdecimal() or int(text) < 1:
        raise ElasticityConfigError(
            f"Elasticity V {version} needs WORLD_SIZE to compute {purpose}. Either give it as "
            "argument to function compute_elastic_config or set it as an environment variable. "
            f"Value of WORLD_SIZE as environment variable is {text}"
        )
    return int(text)


def compute_elastic_config(
    ds_config: dict[str, Any],
    target_deepspeed_version: str,
    world_size: int = 0,
    return_microbatch: bool = False,
) -> tuple[int, list[int]] | tuple[int, list[int], int]:
    """Return the global batch of an elastic job and the world sizes that it fits.

    Args:
        ds_config: configuration with an `elasticity` block.
        target_deepspeed_version: version of the deepspeed that will run the job.
        world_size: number of ranks; 0 for none yet (version 0.2 then takes `WORLD_SIZE` of the
            environment).
        return_microbatch: also return a micro-batch size when `world_size` is 0, for `WORLD_SIZE`
            of the environment.

    Returns:
        (batch in samples, valid sizes in rising order) and, for a known world size, the largest
        micro-batch size that divides its share. Sizes are numbers of ranks in version 0.1, of
        data-parallel ranks in version 0.2.

    Raises:
        ElasticityConfigError: the block is missing, disabled or wrong, or the world size is needed
            and unknown.
        ElasticityError: the target version, or the layout of nodes, does not allow elasticity.
        ElasticityIncompatibleWorldSize: the batch does not fit `world_size`.
        ValueError: `ds_config` is no dict, or a micro-batch exceeds the largest batch.
        NotImplementedError: there is no such version of the algorithm.
    """
    config = _config_of(ds_config, target_deepspeed_version)
    version = float(config.version)
    if version == 0.1:
        choice = _choose_v01(config, world_size, return_microbatch)
    elif version == 0.2:
        ranks = world_size or _world_size_from_environment("0.2", "valid batch size")
        choice = _choose_v02(config, ranks)
    else:
        raise NotImplementedError(
            f"Unable to find elastic logic for version: {config.version}; use 0.1 or 0.2"
        )
    if world_size > 0 or return_microbatch:
        return choice.batch, choice.valid, choice.micro
    return choice.batch, choice.valid


def _config_of(ds_config: dict[str, Any], target_deepspeed_version: str) -> ElasticityConfig:
    if not isinstance(ds_config, dict):
        raise ValueError(
            f"Expected ds_config to be a dictionary but received a {type(ds_config)}, containing: "
            f"{ds_config}"
        )
    if ELASTICITY not in ds_config:
        raise ElasticityConfigError(
            f"'{ELASTICITY}' is missing from config json, please add it if running an elastic "
            "training job."
        )
    block = ds_config[ELASTICITY]
    if not block.get("enabled"):
        raise ElasticityConfigError(
            "Elasticity is disabled, please enable it ('enabled':true) if running an elastic "
            "training job."
        )
    config = ElasticityConfig(block)
    if config.model_parallel_size > 1 and float(config.version) != 0.2:
        raise ElasticityConfigError(
            f"Elasticity V{config.version} does not support model-parallel training. Given "
            f"model-parallel size: {config.model_parallel_size}; use version 0.2"
        )
    if float(config.version) > LATEST_ELASTICITY_VERSION:
        raise ElasticityConfigError(
            f"Attempting to run elasticity version {config.version} but runtime only supports up "
            f"to {LATEST_ELASTICITY_VERSION}"
        )
    if parse(target_deepspeed_version) < parse(MINIMUM_DEEPSPEED_VERSION):
        raise ElasticityError(
            f"Target deepspeed version of {target_deepspeed_version} is not compatible with "
            f"minimum version {MINIMUM_DEEPSPEED_VERSION} supporting elasticity."
        )
    return config


def elasticity_enabled(ds_config: dict[str, Any]) -> bool:
    """Say whether a configuration asks for elastic batch sizes."""
    return bool(ds_config.get(ELASTICITY, {}).get("enabled"))


def ensure_immutable_elastic_config(runtime_elastic_config_dict: dict[str, Any]) -> None:
    """Refuse an `elasticity` block that is not the one a resource scheduler planned with."""
    text = os.environ.get(DEEPSPEED_ELASTICITY_CONFIG)
    if text is None:
        logger.warning(
            "%s is not set: cannot tell whether a resource scheduler scales this job with the same "
            "elasticity block",
            DEEPSPEED_ELASTICITY_CONFIG,
        )
        return
    scheduler, runtime = (
        ElasticityConfig(json.loads(text)),
        ElasticityConfig(runtime_elastic_config_dict),
    )
    for name in ("max_acceptable_batch_size", "micro_batches", "version"):
        planned, present = getattr(scheduler, name), getattr(runtime, name)
        if planned != present:
            raise ElasticityConfigError(
                f"Elastic config '{name}={planned}' seen by resource scheduler does not match "
                f"config passed to runtime {name}={present}"
            )

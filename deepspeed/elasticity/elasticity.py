"""Batch sizes that many world sizes can share: upstream's arithmetic (versions 0.1 and 0.2), and
what it comes to for the ranks that are there. Light: it imports neither torch nor numpy.

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

from deepspeed.elasticity import constants
from deepspeed.elasticity.config import (
    ElasticityConfig,
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
)
from deepspeed.git_version_info import version as own_version
from deepspeed.utils.logging import logger

HCN_LIST: list[int] = [
    1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560,
    10080, 15120, 20160, 25200, 27720, 45360, 50400, 55440, 83160, 110880, 166320, 221760, 277200,
    332640, 498960, 554400, 665280, 720720,
]  # fmt: skip
# Highly composite numbers: each has more divisors than any smaller number.
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


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
    shares = (batch_size // micro for micro in micro_batches if batch_size % micro == 0)
    fitting = {count for share in shares for count in _divisors(share)}
    return sorted(count for count in fitting if min_valid_gpus <= count <= max_valid_gpus)


def _divisors(number: int) -> Iterable[int]:
    for low in range(1, math.isqrt(number) + 1):
        if number % low == 0:
            yield from (low, number // low)


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
        is_preferred = batch > best_batch if prefer_larger else batch < best_batch
        if lead > 0 or (lead == 0 and is_preferred):
            best_batch, best_valid = batch, valid
    return best_batch, best_valid


def _compatible_batch(
    config: ElasticityConfig, max_batch: int, min_count: int, max_count: int
) -> tuple[int, list[int]]:
    """Choose a batch for counts (of ranks, or of nodes) between two limits."""
    if max(config.micro_batches) > max_batch:
        text = f"{max_batch}, given micro_batch_sizes: {config.micro_batches}"
        raise ElasticityConfigError(
            f"All micro batches must be less than or equal to max_acceptable_batch_size: {text}"
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
    largest = config.max_acceptable_batch_size
    batch, valid = _compatible_batch(config, largest, config.min_gpus, config.max_gpus)
    if world_size == 0 and return_microbatch:
        world_size = _world_size_from_environment("0.1", "a micro batch size")
    if world_size == 0:
        return _Choice(batch, valid)
    if world_size not in valid:
        raise ElasticityIncompatibleWorldSize(
            f"World size ({world_size}) is not valid with the current list of valid GPU counts: "
            f"{valid}"
        )
    return _Choice(batch, valid, _largest_dividing(config.micro_batches, batch // world_size))


def _choose_v02(config: ElasticityConfig, world_size: int) -> _Choice:
    """Choose by version 0.2, which counts in nodes; valid numbers are data-parallel sizes.

    A world that is none of them (half a node is away) gets a batch of its own: the multiple of a
    micro-batch times its data-parallel size that comes closest to the largest batch.
    """
    parallel = config.model_parallel_size
    if config.num_gpus_per_node % parallel:
        raise ElasticityError(
            f"In Elasticity v0.2, number of GPUs per node: {config.num_gpus_per_node} should be "
            f"divisible by model parallel size {parallel}; change num_gpus_per_node or "
            "model_parallel_size"
        )
    each = config.num_gpus_per_node
    replicas = each // parallel
    most = config.max_acceptable_batch_size // replicas
    limits = (config.min_gpus // each, config.max_gpus // each)
    batch, valid_nodes = _compatible_batch(config, most, *limits)
    valid = [nodes * replicas for nodes in valid_nodes]
    if world_size % parallel:
        raise ElasticityIncompatibleWorldSize(
            f"World size ({world_size}) is not valid: it is no multiple of model_parallel_size "
            f"({parallel})"
        )
    size = world_size // parallel
    if size in valid:
        batch *= replicas
        return _Choice(batch, valid, _largest_dividing(config.micro_batches, batch // size))
    if not config.min_gpus <= world_size <= config.max_gpus:
        # As upstream, which starts nodes by the limits and trains with what came.
        text = "elasticity: %d ranks are outside min_gpus..max_gpus (%d..%d); they get a batch of "
        logger.warning(text + "their own", world_size, config.min_gpus, config.max_gpus)
    return _own_batch(config, world_size, size)


def _own_batch(config: ElasticityConfig, world_size: int, size: int) -> _Choice:
    """Choose for a world that the common batch does not fit; `size` is its data-parallel size."""
    limit, micros = config.max_acceptable_batch_size, config.micro_batches
    batches = [step * (limit // step) for micro in micros if (step := micro * size) <= limit]
    if not batches:
        raise ElasticityIncompatibleWorldSize(
            f"World size ({world_size}) is not valid: one micro-batch of {min(micros)} on each of "
            f"{size} data-parallel ranks exceeds max_train_batch_size ({limit}); raise it or start "
            "fewer ranks"
        )
    batch = max(batches) if config.prefer_larger_batch_size else min(batches)
    return _Choice(batch, [size], _largest_dividing(config.micro_batches, batch // size))


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
        text = f"Unable to find elastic logic for version: {config.version}; use 0.1 or 0.2"
        raise NotImplementedError(text)
    if world_size > 0 or return_microbatch:
        return choice.batch, choice.valid, choice.micro
    return choice.batch, choice.valid


def _config_of(ds_config: dict[str, Any], target_deepspeed_version: str) -> ElasticityConfig:
    if not isinstance(ds_config, dict):
        text = f"but received a {type(ds_config)}, containing: {ds_config}"
        raise ElasticityConfigError(f"Expected ds_config to be a dictionary {text}")
    remedy = "if running an elastic training job."
    if constants.ELASTICITY not in ds_config:
        text = f"'{constants.ELASTICITY}' is missing from config json, please add it {remedy}"
        raise ElasticityConfigError(text)
    block = ds_config[constants.ELASTICITY]
    if not block.get("enabled"):
        text = "Elasticity is disabled, please enable it ('enabled':true)"
        raise ElasticityConfigError(f"{text} {remedy}")
    config = ElasticityConfig(block)
    if config.model_parallel_size > 1 and float(config.version) != 0.2:
        raise ElasticityConfigError(
            f"Elasticity V{config.version} does not support model-parallel training. Given "
            f"model-parallel size: {config.model_parallel_size}; use version 0.2"
        )
    if float(config.version) > constants.LATEST_ELASTICITY_VERSION:
        text = f"but runtime only supports up to {constants.LATEST_ELASTICITY_VERSION}"
        raise ElasticityConfigError(f"Attempting to run elasticity version {config.version} {text}")
    if parse(target_deepspeed_version) < parse(constants.MINIMUM_DEEPSPEED_VERSION):
        text = f"minimum version {constants.MINIMUM_DEEPSPEED_VERSION} supporting elasticity."
        raise ElasticityError(
            f"Target deepspeed version of {target_deepspeed_version} is not compatible with {text}"
        )
    return config


def elasticity_enabled(ds_config: dict[str, Any]) -> bool:
    """Say whether a configuration asks for elastic batch sizes."""
    return bool(ds_config.get(constants.ELASTICITY, {}).get("enabled"))


def ensure_immutable_elastic_config(runtime_elastic_config_dict: dict[str, Any]) -> None:
    """Refuse an `elasticity` block that is not the one a resource scheduler planned with."""
    text = os.environ.get(constants.DEEPSPEED_ELASTICITY_CONFIG)
    if text is None:
        said = "%s is not set: cannot tell whether a resource scheduler scales this job with the "
        logger.warning(said + "same elasticity block", constants.DEEPSPEED_ELASTICITY_CONFIG)
        return
    scheduler = ElasticityConfig(json.loads(text))
    runtime = ElasticityConfig(runtime_elastic_config_dict)
    for name in ("max_acceptable_batch_size", "micro_batches", "version"):
        planned, present = getattr(scheduler, name), getattr(runtime, name)
        if planned != present:
            raise ElasticityConfigError(
                f"Elastic config '{name}={planned}' seen by resource scheduler does not match "
                f"config passed to runtime {name}={present}"
            )


def elastic_batch_sizes(
    param_dict: dict[str, Any], data_parallel_size: int, world_size: int
) -> tuple[int, int, int]:
    """Return train batch, micro-batch and accumulation steps of an enabled `elasticity` block."""
    block = param_dict[constants.ELASTICITY]
    config = ElasticityConfig(block)
    if world_size != data_parallel_size * config.model_parallel_size:
        raise ElasticityConfigError(
            f"elasticity.model_parallel_size: {config.model_parallel_size}, but {world_size} ranks "
            f"share the data in {data_parallel_size} parts; set it to the ranks that hold one copy "
            "of the model"
        )
    ensure_immutable_elastic_config(block)
    batch, _, micro = compute_elastic_config(param_dict, own_version, world_size=world_size)  # type: ignore[misc]
    chosen = (batch, micro, batch // (micro * data_parallel_size))
    # A configuration that was filled in before says what is chosen now, and is no contradiction.
    pairs = zip(BATCH_KEYS, chosen, strict=True)
    changed = [key for key, value in pairs if param_dict.get(key) not in (None, value)]
    given = ", ".join(f"{key}: {param_dict[key]}" for key in changed)
    if given and not config.ignore_non_elastic_batch_info:
        raise ElasticityConfigError(
            f"{given}: elasticity.enabled chooses the batch sizes; remove these keys, "
            "or set elasticity.ignore_non_elastic_batch_info to true to have them overridden"
        )
    if given:
        logger.warning("elasticity overrides %s", given)
    return chosen

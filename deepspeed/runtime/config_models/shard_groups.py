"""Over how many ranks stage 3 shards: ``mics_shard_size``, ``num_optimizer_instances`` and
``zero_hpz_partition_size``.

Pure arithmetic on what the user gave. Every error names key, value and remedy.
"""

from __future__ import annotations

from deepspeed.runtime.config_utils import DeepSpeedConfigError

MICS = "zero_optimization.mics_shard_size"
INSTANCES = "zero_optimization.num_optimizer_instances"
SECONDARY = "zero_optimization.zero_hpz_partition_size"


def divisors(number: int) -> str:
    """List what divides ``number``, for errors."""
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def instances_at_stage_3(count: int, mics_shard_size: int, ranks: int) -> int:
    """Return how many times the shards of stage 3 are there over `ranks`: `count`
    (``num_optimizer_instances``), unless `mics_shard_size` is above 0 and says it.
    """
    if mics_shard_size <= 0:
        return count
    _check_divides(MICS, mics_shard_size, ranks)
    meant = ranks // mics_shard_size
    if count not in (1, meant):
        raise DeepSpeedConfigError(
            f"{MICS}: {mics_shard_size} makes {meant} optimizer instances of {ranks} ranks, but "
            f"{INSTANCES}: {count}; remove one of them"
        )
    return meant


def check_secondary(size: int, instances: int, ranks: int, has_param_offload: bool) -> None:
    """Refuse secondary shards (``zero_hpz_partition_size`` above 1) that cannot be."""
    if size <= 1:
        return
    _check_divides(SECONDARY, size, ranks)
    if instances > 1:
        raise DeepSpeedConfigError(
            f"{SECONDARY}: {size} with {instances} optimizer instances ({MICS}, {INSTANCES}), "
            "inside which all gathers stay already, is not supported; use 1, or one instance"
        )
    if has_param_offload:
        raise DeepSpeedConfigError(
            f"{SECONDARY}: {size} keeps copies of shards on the device, of which "
            "zero_optimization.offload_param leaves none there; use 1, or remove offload_param"
        )


def _check_divides(key: str, size: int, ranks: int) -> None:
    if ranks % size:
        raise DeepSpeedConfigError(
            f"{key}: {size} does not divide the {ranks} ranks that share parameters; use one of "
            f"{divisors(ranks)}, or start another number of ranks"
        )

"""Numbers that follow from how many ranks there are: the batch's (``train = micro x accumulation x
data-parallel world``), and over how many ranks stage 3 shards. Errors say where each came from.
"""

from __future__ import annotations

from typing import NamedTuple

from deepspeed.runtime.config_utils import DeepSpeedConfigError

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"
MICS = "zero_optimization.mics_shard_size"
INSTANCES = "zero_optimization.num_optimizer_instances"
SECONDARY = "zero_optimization.zero_hpz_partition_size"


class WorldSize(NamedTuple):
    """How many data-parallel ranks there are, and how it was found out."""

    size: int
    source: str


class BatchSizes(NamedTuple):
    """Resolved batch numbers, in samples, samples and micro-batches."""

    train_batch_size: int
    train_micro_batch_size_per_gpu: int
    gradient_accumulation_steps: int


GIVEN = "given in the configuration"


def resolve_batch_sizes(
    train: int | None, micro: int | None, steps: int | None, world: WorldSize
) -> BatchSizes:
    """Derive the numbers that are not given; refuse too few, or ones that contradict each other."""
    given = {TRAIN: train, MICRO: micro, STEPS: steps}
    sources = {name: GIVEN for name, value in given.items() if value is not None}
    if train is None and micro is None:
        raise DeepSpeedConfigError(
            f"{TRAIN} and {MICRO} are both missing ({STEPS} is {steps}); give at least one of them"
        )
    if steps is None:
        if train is None or micro is None:
            steps, sources[STEPS] = 1, "the default"
        else:
            steps = train // (micro * world.size)
            sources[STEPS] = f"derived as {TRAIN} // ({MICRO} x world size)"
    if micro is None:
        # Either train or micro was given, so train is an integer here.
        micro = (train or 0) // (steps * world.size)
        sources[MICRO] = f"derived as {TRAIN} // ({STEPS} x world size)"
    if train is None:
        train = micro * steps * world.size
        sources[TRAIN] = f"derived as {MICRO} x {STEPS} x world size"
    sizes = BatchSizes(train, micro, steps)
    if min(sizes) < 1 or train != micro * steps * world.size:
        raise DeepSpeedConfigError(_disagreement(sizes, sources, world))
    return sizes


def _disagreement(sizes: BatchSizes, sources: dict[str, str], world: WorldSize) -> str:
    numbers = "; ".join(
        f"{name} = {value} ({sources[name]})"
        for name, value in zip(sizes._fields, sizes, strict=True)
    )
    product = sizes.train_micro_batch_size_per_gpu * sizes.gradient_accumulation_steps * world.size
    return (
        f"the batch sizes do not agree: {TRAIN} must be {MICRO} x {STEPS} x world size, each at "
        f"least 1, but {sizes.train_batch_size} != {sizes.train_micro_batch_size_per_gpu} x "
        f"{sizes.gradient_accumulation_steps} x {world.size} = {product}. {numbers}; world size = "
        f"{world.size} ({world.source}). Change one of the given numbers, or leave one out to have "
        "it derived"
    )


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

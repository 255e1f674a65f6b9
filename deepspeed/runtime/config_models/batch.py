"""The three batch numbers: ``train = micro x accumulation x data-parallel world``.

Pure arithmetic on what the user gave. Every error says where each number came from.
"""

from __future__ import annotations

from typing import NamedTuple

from deepspeed.runtime.config_utils import DeepSpeedConfigError

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"


class WorldSize(NamedTuple):
    """Number of data-parallel ranks, and how it was found out."""

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
            steps, sources[STEPS] = (
                train // (micro * world.size),
                f"derived as {TRAIN} // ({MICRO} x world size)",
            )
    if micro is None:
        # Either train or micro was given, so train is an integer here.
        micro = (train or 0) // (steps * world.size)
        sources[MICRO] = f"derived as {TRAIN} // ({STEPS} x world size)"
    if train is None:
        train, sources[TRAIN] = (
            micro * steps * world.size,
            f"derived as {MICRO} x {STEPS} x world size",
        )
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

"""Sizes of pieces that work is cut into, lowered for a while.

Why: docs/checking-synchronization.md. Simulated runs of `ds_verify` and of the tests lower them, as
they lower bucket sizes in the configuration.

`SIZES` names every such constant of the training path. All ranks have to lower them alike: some
decide how a collective is cut.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

SIZES: tuple[tuple[str, str], ...] = (
    ("deepspeed.ops.host_optimizer", "TORCH_CHUNK"),
    ("deepspeed.runtime.gradients.local_accumulator", "WIDENED_NUMEL"),
    ("deepspeed.runtime.gradients.overlay", "TAIL_NUMEL"),
    ("deepspeed.runtime.gradients.sink", "HOST_CHUNK"),
    ("deepspeed.runtime.gradients.sink", "STAGE_NUMEL"),
    ("deepspeed.runtime.activation_checkpointing.saved_inputs", "MOVED_NUMEL"),
    ("deepspeed.runtime.engine_parts.digest", "AT_ONCE"),
    ("deepspeed.runtime.engine_parts.model_setup", "BROADCAST_NUMEL"),
    ("deepspeed.runtime.gradients.sequence_parts", "MESSAGE_NUMEL"),
    ("deepspeed.runtime.zero.model_sharding", "CUT_NUMEL"),
    ("deepspeed.runtime.sharding.exchange", "ROUND_NUMEL"),
    ("deepspeed.runtime.sharding.flattening", "CONVERTED_NUMEL"),
    ("deepspeed.ops.early_update", "TASK_NUMEL"),
    ("deepspeed.ops.state_files", "WINDOW_NUMEL"),
    ("deepspeed.runtime.sharding.low_precision", "DEVICE_NUMEL"),
    ("deepspeed.runtime.sharding.low_precision", "HOST_NUMEL"),
    ("deepspeed.runtime.sharding.publisher", "UPDATE_NUMEL"),
    ("deepspeed.runtime.tensor_parallel.cutting", "WHOLE_NUMEL"),
    ("deepspeed.runtime.zero.gathering.undone_edits", "PIECE_NUMEL"),
)
"""(Module, constant), in elements."""

# Of a rank's shard: two pieces are on their way while the third is written, and some more.
PIECES_PER_SHARD = 8


def piece_numel(numel: int, world: int) -> int:
    """A size at which each rank's part of `numel` elements is `PIECES_PER_SHARD` pieces."""
    return max(1, numel // (PIECES_PER_SHARD * world))


@contextmanager
def lowered_sizes(numel: int) -> Iterator[None]:
    """Within it no piece has more than `numel` elements. The same on all ranks.

    Args:
        numel: At least 1.

    Raises:
        ValueError: it is less.
    """
    if numel < 1:
        raise ValueError(f"lowered_sizes: numel={numel}; give at least 1 element per piece")
    owners = [(importlib.import_module(module), name) for module, name in SIZES]
    before = [getattr(owner, name) for owner, name in owners]
    for (owner, name), size in zip(owners, before, strict=True):
        # Chunks are parts of pieces, for a host's caches: of one size they would not cut any.
        setattr(owner, name, min(size, max(1, numel // 2) if name.endswith("_CHUNK") else numel))
    try:
        yield
    finally:
        for (owner, name), size in zip(owners, before, strict=True):
            setattr(owner, name, size)

"""Upstream's getters of which ranks share sequences, as a module that `deepspeed.initialize` takes
as `mpu`. Without `initialize_sequence_parallel` they raise.
"""

from __future__ import annotations

from typing import Any

from deepspeed._lazy import lazy_attributes
from deepspeed.runtime.sequence_parallel.attention_hf import SequenceGroups

# Upstream's further names here say what to use instead.
__getattr__ = lazy_attributes(__name__)

_groups: SequenceGroups | None = None


def initialize_sequence_parallel(sequence_parallel_size: int) -> None:
    """Let so many neighbouring ranks share sequences. Collective; the last call counts."""
    global _groups
    _groups = SequenceGroups(sequence_parallel_size)


def _known() -> SequenceGroups:
    if _groups is None:
        raise RuntimeError(
            "which ranks share sequences is not known: call "
            "parallel_state_sp.initialize_sequence_parallel(size) first"
        )
    return _groups


def get_sequence_parallel_group() -> Any:
    """Return the ranks that share this one's sequences."""
    return _known().get_sequence_parallel_group()


def get_sequence_parallel_world_size() -> int:
    """Count them."""
    return _known().get_sequence_parallel_world_size()


def get_sequence_parallel_rank() -> int:
    """Return which piece this rank holds."""
    return _known().get_sequence_parallel_rank()


def get_sequence_data_parallel_group() -> Any:
    """Return the ranks over which gradients are reduced: those of all sequences."""
    return _known().replicas.group


def get_sequence_data_parallel_world_size() -> int:
    """Count them."""
    return _known().replicas.size


def get_sequence_data_parallel_rank() -> int:
    """Return this rank's place among them."""
    return _known().replicas.rank

"""Upstream's path of what long sequences need: attention over ranks, loaders, and tiles."""

from deepspeed._lazy import lazy_attributes
from deepspeed.runtime.sequence_parallel.attention_hf import UlyssesSPAttentionHF
from deepspeed.runtime.sequence_parallel.loader_adapter import UlyssesSPDataLoaderAdapter
from deepspeed.runtime.sequence_parallel.tiled_compute import (
    AutogradComputeMLP,
    SequenceTiledCompute,
    TiledFusedLogitsLoss,
    TiledLoss,
    TiledMLP,
    sequence_tiled_compute,
)

# Upstream's further names here say what to use instead.
__getattr__ = lazy_attributes(__name__)

__all__ = [
    "AutogradComputeMLP",
    "SequenceTiledCompute",
    "TiledFusedLogitsLoss",
    "TiledLoss",
    "TiledMLP",
    "UlyssesSPAttentionHF",
    "UlyssesSPDataLoaderAdapter",
    "sequence_tiled_compute",
]

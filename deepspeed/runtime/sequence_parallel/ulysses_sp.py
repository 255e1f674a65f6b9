"""Upstream's path of what long sequences need: attention over ranks, loaders, and tiles."""

from deepspeed.runtime.sequence_parallel.attention_hf import UlyssesSPAttentionHF
from deepspeed.runtime.sequence_parallel.loader_adapter import UlyssesSPDataLoaderAdapter
from deepspeed.runtime.sequence_parallel.tiled_compute import (
    SequenceTiledCompute,
    TiledFusedLogitsLoss,
    TiledMLP,
    sequence_tiled_compute,
)

__all__ = [
    "SequenceTiledCompute",
    "TiledFusedLogitsLoss",
    "TiledMLP",
    "UlyssesSPAttentionHF",
    "UlyssesSPDataLoaderAdapter",
    "sequence_tiled_compute",
]

"""Upstream's path of what long sequences need: attention over ranks, loaders, and tiles."""

from deepspeed._lazy import lazy_attributes

_HERE = "deepspeed.runtime.sequence_parallel"
_TILES = ("AutogradComputeMLP", "SequenceTiledCompute", "TiledFusedLogitsLoss", "TiledLoss")
__getattr__ = lazy_attributes(
    __name__,
    {
        "UlyssesSPAttentionHF": f"{_HERE}.attention_hf",
        "UlyssesSPDataLoaderAdapter": f"{_HERE}.loader_adapter",
        **dict.fromkeys((*_TILES, "TiledMLP", "sequence_tiled_compute"), f"{_HERE}.tiled_compute"),
    },
)

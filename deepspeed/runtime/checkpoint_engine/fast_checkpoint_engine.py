"""Files of `torch.save` without torch's own sums: the manifest has better ones."""

from __future__ import annotations

from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.config_models.training import CheckpointConfig


class FastCheckpointEngine(TorchCheckpointEngine):
    """Writes what `TorchCheckpointEngine` writes, with less work per byte; `torch.load` reads
    it.
    """

    def __init__(self, config_params: CheckpointConfig | None = None) -> None:
        super().__init__(config_params)
        self.options = self.options._replace(crc32=False)

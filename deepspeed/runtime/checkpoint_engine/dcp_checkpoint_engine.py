"""Files whose tensors are in the format of torch.distributed.checkpoint."""

from __future__ import annotations

from deepspeed.checkpoint.dcp_files import write_dcp
from deepspeed.checkpoint.file_writer import FileRecord
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine


class DcpCheckpointEngine(TorchCheckpointEngine):
    """Writes `NAME.pt`, with all but the tensors, and the folder `NAME.dcp`; see `dcp_files`."""

    def _write(self, path: str, state_dict: object) -> dict[str, FileRecord]:
        return write_dcp(path, state_dict, self.options)

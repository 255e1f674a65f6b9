"""Files written in the background by another checkpoint engine, from a copy in host memory."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from deepspeed.checkpoint.file_writer import FileRecord
from deepspeed.checkpoint.utils import HostCopy
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import (
    CheckpointCommitInfo,
    CheckpointEngine,
)
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine


class DecoupledCheckpointEngine(CheckpointEngine):
    """Returns from `save` when the content is in `copy`; `inner` writes it in a thread."""

    def __init__(self, inner: CheckpointEngine) -> None:
        super().__init__()
        if isinstance(inner, TorchCheckpointEngine):
            # Its threads would take cores from training, and an exiting interpreter does not let it
            # start them.
            inner.options = inner.options._replace(num_buffers=1, direct=True)
        self.inner = inner
        self.copy = HostCopy()
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writes: list[Future[None]] = []

    def create(self, info: CheckpointCommitInfo) -> None:
        """Wait for what was given before, then begin anew."""
        self._wait()
        self.copy.reset()
        self.inner.create(info)

    def save(self, state_dict: object, path: str) -> None:
        """Copy the content; a thread writes it."""
        self._writes.append(self._thread.submit(self.inner.save, self.copy(state_dict), path))

    def load(self, path: str, map_location: object = None) -> Any:
        self._wait()
        return self.inner.load(path, map_location)

    def commit(self, info: CheckpointCommitInfo) -> bool | None:
        """Wait for all files; raises the first error of any."""
        self._wait()
        return self.inner.commit(info)

    def is_decoupled(self) -> bool:
        return True

    def cleanup(self) -> None:
        """Wait, and end the thread."""
        self._wait()
        self._thread.shutdown()
        self.inner.cleanup()

    def preserves_storage_sharing(self) -> bool:
        return self.inner.preserves_storage_sharing()

    def records_of(self, path: str) -> dict[str, FileRecord]:
        return self.inner.records_of(path)

    def _wait(self) -> None:
        writes, self._writes = self._writes, []
        for write in writes:
            write.result()

"""The interface of what writes and reads checkpoint files. A client's own:
`engine.checkpoint_engine = MyEngine()`.

Who calls what, in this order, on every rank:

1. `create(info)`, once per checkpoint. The folder is there.
2. `save(state, path)`, for each file that this rank writes.
3. `commit(info)`: when it returns, all of them are there, and another process can read them.
4. `records_of(path)`, for each of them.

When all ranks have done so, the engine that trains renames the folder: none of this is a checkpoint
engine's. `load(path)` is called for each file that a rank needs. A decoupled engine of a client is
waited for in `commit`.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from deepspeed.checkpoint.file_writer import FileRecord, file_checksum


@dataclass
class CheckpointCommitInfo:
    """Which checkpoint is being written."""

    tag: str
    save_dir: str
    save_latest: bool


class CheckpointEngine(ABC):
    """Writes and reads files; see the module's text for the order of calls."""

    def __init__(self, config_params: object = None) -> None:
        self._commit_info: CheckpointCommitInfo | None = None

    @abstractmethod
    def create(self, info: CheckpointCommitInfo) -> None: ...

    @abstractmethod
    def save(self, state_dict: object, path: str) -> None:
        """Write one file. Its tensors are in host memory, and may change when this has returned."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        os.makedirs(path, exist_ok=exist_ok)

    @abstractmethod
    def load(self, path: str, map_location: object = None) -> Any: ...

    @abstractmethod
    def commit(self, info: CheckpointCommitInfo) -> bool | None:
        """All files of the checkpoint were given. False: it failed."""

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """Whether a data-parallel rank writes files whose content all of them have."""
        return dp_rank == 0

    def is_decoupled(self) -> bool:
        """Whether `save` returns before the file is written."""
        return False

    def set_commit_info(self, info: CheckpointCommitInfo | None) -> None:
        self._commit_info = info

    def get_commit_info(self) -> CheckpointCommitInfo | None:
        """The checkpoint that is not committed yet; None if there is none."""
        return getattr(self, "_commit_info", None)

    def cleanup(self) -> None:
        self._commit_info = None

    def preserves_storage_sharing(self) -> bool:
        """Whether tensors that share their memory share it again when read."""
        return True

    def records_of(self, path: str) -> dict[str, FileRecord]:
        """Path -> record of every file that `save(..., path)` made. Not upstream's."""
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        return {path: FileRecord(os.path.getsize(path), file_checksum(path))}

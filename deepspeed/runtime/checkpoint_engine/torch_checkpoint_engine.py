"""Files of `torch.save`, each on disk when `save` returns."""

from __future__ import annotations

import time
from typing import Any

from deepspeed.checkpoint.file_writer import FileRecord, WriteOptions
from deepspeed.checkpoint.files import read_file
from deepspeed.checkpoint.torch_files import write_file
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import (
    CheckpointCommitInfo,
    CheckpointEngine,
)
from deepspeed.runtime.config_models.training import CheckpointConfig, CheckpointWriterConfig
from deepspeed.utils.logging import logger


class TorchCheckpointEngine(CheckpointEngine):
    """Writes through the page cache."""

    def __init__(self, config_params: CheckpointConfig | None = None) -> None:
        super().__init__(config_params)
        config = config_params or CheckpointConfig()
        self._writer = config.writer or CheckpointWriterConfig()
        self.options = WriteOptions(
            self._writer.io_buffer_size,
            2 if self._writer.io_buffer_double else 1,
            zip_format=config.checkpoint_serialization,
        )
        self._records: dict[str, dict[str, FileRecord]] = {}

    def create(self, info: CheckpointCommitInfo) -> None:
        self._records = {}

    def save(self, state_dict: object, path: str) -> None:
        start = time.perf_counter()
        records = self._records[path] = self._write(path, state_dict)
        if self._writer.show_statistics:
            seconds, count = (
                time.perf_counter() - start,
                sum(record.bytes for record in records.values()),
            )
            logger.info(
                f"wrote {path}: {count} bytes in {seconds:.3f} s, {count / seconds / 1e9:.2f} GB/s"
            )

    def load(self, path: str, map_location: object = None) -> Any:
        return read_file(path, map_location=map_location)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        return True

    def records_of(self, path: str) -> dict[str, FileRecord]:
        return self._records[path]

    def _write(self, path: str, state_dict: object) -> dict[str, FileRecord]:
        return {path: write_file(path, state_dict, self.options)}

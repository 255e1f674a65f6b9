"""What file writers have in common, and the two that have no buffer."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from types import TracebackType
from typing import TYPE_CHECKING

from deepspeed.utils.exceptions import disk_error
from deepspeed.utils.logging import logger

if TYPE_CHECKING:
    from typing_extensions import Buffer

INVALID_FD = -1
CLOSE_COUNT_KEY, FILENO_COUNT_KEY, FLUSH_COUNT_KEY = "close", "fileno", "flush"
WRITE_COUNT_KEY, WRITE_BYTES_KEY, WRITE_SEC_KEY = "write", "bytes", "write_secs"
WRITE_SPEED_KEY = "write_GB/s"


class BaseFileWriter(ABC):
    """One new file, written in order; `torch.save` takes it for a file. `close` is not optional:
    what the disk refuses is raised there at the latest.
    """

    def __init__(self, file_path: str) -> None:
        self._file_path = file_path
        counts = (CLOSE_COUNT_KEY, FILENO_COUNT_KEY, FLUSH_COUNT_KEY, WRITE_COUNT_KEY)
        self._stats: dict[str, float] = dict.fromkeys((*counts, WRITE_BYTES_KEY, WRITE_SEC_KEY), 0)

    def file_path(self) -> str:
        """Return the file's name."""
        return self._file_path

    def write(self, buffer: Buffer) -> int:
        """Take the next bytes, which may change afterwards; return how many."""
        began, source = time.monotonic(), memoryview(buffer).cast("B")
        self._take(source)
        self._stats[WRITE_COUNT_KEY] += 1
        self._stats[WRITE_BYTES_KEY] += len(source)
        self._stats[WRITE_SEC_KEY] += time.monotonic() - began
        return len(source)

    def flush(self) -> None:
        """Do nothing: `close` flushes."""
        self._stats[FLUSH_COUNT_KEY] += 1

    def fileno(self) -> int:
        """Return -1: nothing may be written past this object."""
        self._stats[FILENO_COUNT_KEY] += 1
        return INVALID_FD

    @abstractmethod
    def close(self) -> None:
        """Write what is left; the file is complete when it returns, and an error raised if not."""

    @abstractmethod
    def _take(self, source: memoryview) -> None:
        """Write bytes, or keep a copy."""

    def _dump_state(self) -> None:
        seconds = self._stats[WRITE_SEC_KEY]
        speed = self._stats[WRITE_BYTES_KEY] / seconds / (1 << 30) if seconds else 0.0
        logger.info("%s: %s", self._file_path, {**self._stats, WRITE_SPEED_KEY: speed})

    def __enter__(self) -> BaseFileWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class PyFileWriter(BaseFileWriter):
    """Python's own file, through the page cache."""

    def __init__(self, file_path: str) -> None:
        super().__init__(file_path)
        self._file = open(file_path, "wb")

    def fileno(self) -> int:
        """Return the descriptor, for what is written directly."""
        self._stats[FILENO_COUNT_KEY] += 1
        self._file.flush()
        return self._file.fileno()

    def flush(self) -> None:
        """Hand the bytes to the kernel."""
        super().flush()
        self._file.flush()

    def close(self) -> None:
        """Close the file once its bytes are on disk."""
        if self._file.closed:
            return
        self._stats[CLOSE_COUNT_KEY] += 1
        try:
            with self._file as file:
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise self._named(error) from error

    def _take(self, source: memoryview) -> None:
        try:
            self._file.write(source)
        except OSError as error:
            raise self._named(error) from error

    def _named(self, error: OSError) -> OSError:
        return disk_error(error, self._file_path, int(self._stats[WRITE_BYTES_KEY]))


class MockFileWriter(BaseFileWriter):
    """No file: counts what would be written, to time all but the disk."""

    def close(self) -> None:
        """Say in the log what was counted."""
        self._stats[CLOSE_COUNT_KEY] += 1
        self._dump_state()

    def _take(self, source: memoryview) -> None:
        pass

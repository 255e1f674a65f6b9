"""`WatchMonitor`: writes a run's record, and its page from time to time."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from deepspeed.monitor.monitor import Event, RunRecord
from deepspeed.monitor.watch.page import PAGE_NAME, render
from deepspeed.monitor.watch.record import encoded, new_record, run_before
from deepspeed.monitor.watch.run import Run

DRAWING_SHARE = 0.01


class WatchMonitor(RunRecord):
    """Writes a record and its page to `output_path/job_name`, by default below `~/ds_watch`.

    Drawing takes the same time however long the run is, and comes at most every `refresh_seconds`,
    less often if it would take more than `DRAWING_SHARE` of rank 0's time.
    """

    def __init__(self, watch_config: Any) -> None:
        super().__init__(watch_config)
        base = watch_config.output_path or os.path.join(os.path.expanduser("~"), "ds_watch")
        self.log_dir = Path(base) / watch_config.job_name
        self._refresh_s: float = watch_config.refresh_seconds
        self._about: dict[str, Any] = {}
        self._file: TextIO | None = None
        self._run = Run()
        self._before: Run | None = None
        self._draw_at = -math.inf
        self._ended = False

    def describe(self, about: Mapping[str, Any]) -> None:
        """Set the first line, written with the second: a run without steps leaves nothing."""
        self._about = dict(about)

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Record values of scripts, drawn over what the script counts."""
        for name, value, at in event_list:
            self.record({"event": name, "value": float(value), "at": at})

    def record(self, line: Mapping[str, Any]) -> None:
        """Append a line, which is in the file when this returns, and draw if it is time."""
        if not self.enabled or self._ended:
            return
        if self._file is None:
            self._file = self._open()
        self._write(self._file, line)
        if self._refresh_s and time.monotonic() >= self._draw_at:
            self._draw()

    def _open(self) -> TextIO:
        file = new_record(self.log_dir)
        self._write(file, self._about)
        before = run_before(Path(file.name))
        self._before = None if before is None else Run.of_record(before)
        return file

    def _write(self, file: TextIO, line: Mapping[str, Any]) -> None:
        file.write(encoded(line))
        file.flush()
        self._run.add(dict(line))

    def _draw(self) -> None:
        begun = time.monotonic()
        write_page(self.log_dir / PAGE_NAME, render(self._run, self._before, self._refresh_s))
        done = time.monotonic()
        self._draw_at = done + max(self._refresh_s, (done - begun) / DRAWING_SHARE)

    def close(self) -> None:
        self.end()

    def end(self, error: BaseException | None = None) -> None:
        """The run has ended, by `error` if there is one; no line may follow."""
        if self._file is None:
            return
        line: dict[str, Any] = {"ended": time.time()}
        if error is not None:
            line["error"] = f"{type(error).__name__}: {error}"
        self._write(self._file, line)
        self._file.close()
        self._file = None
        self._ended = True
        if self._refresh_s:
            self._draw()


def write_page(path: Path, text: str) -> None:
    """Write a page that somebody may be reading: the old one is there until the new one is."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)

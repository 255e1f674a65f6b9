"""CSV files: one per event name, for spreadsheets and scripts."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from typing import Any

from deepspeed.monitor.monitor import Event, Monitor


class csvMonitor(Monitor):  # noqa: N801  # upstream's name
    """Appends `step,value` to `output_path/job_name/NAME.csv`, by default below `~/csv_monitor`.

    In file names the slashes of an event's name are underscores; the column's title is the part
    after the last slash.
    """

    def __init__(self, csv_config: Any) -> None:
        super().__init__(csv_config)
        base = csv_config.output_path or os.path.join(os.path.expanduser("~"), "csv_monitor")
        self.log_dir = os.path.join(base, csv_config.job_name)
        if self.enabled:
            os.makedirs(self.log_dir, exist_ok=True)

    def path_of(self, name: str) -> str:
        """The file of the events of that name."""
        return os.path.join(self.log_dir, name.replace("/", "_").replace(os.sep, "_") + ".csv")

    def write_events(self, event_list: Sequence[Event]) -> None:
        if not self.enabled:
            return
        for name, value, step in event_list:
            # Opened anew each time: nothing stays open for days, and a file that was moved away is
            # begun again.
            with open(self.path_of(name), "a", newline="", encoding="utf-8") as file:
                writer = csv.writer(file)
                if file.tell() == 0:
                    writer.writerow(["step", name.rsplit("/", 1)[-1]])
                writer.writerow([step, float(value)])

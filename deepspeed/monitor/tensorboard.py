"""TensorBoard: a folder of event files per run, by torch (needs the package tensorboard)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from deepspeed.monitor.monitor import Event, Monitor, require


class TensorBoardMonitor(Monitor):
    """Writes scalars to `output_path/job_name`; without a path to `~/tensorboard/job_name`."""

    def __init__(self, tensorboard_config: Any) -> None:
        super().__init__(tensorboard_config)
        home = os.path.join(os.path.expanduser("~"), "tensorboard")
        base = tensorboard_config.output_path or home
        self.log_dir = os.path.join(base, tensorboard_config.job_name)
        self.summary_writer: Any = None  # None if not enabled or closed
        if self.enabled:
            require("tensorboard", "tensorboard", "tensorboard")
            # optional: needs the package, and takes a second
            from torch.utils.tensorboard import SummaryWriter

            os.makedirs(self.log_dir, exist_ok=True)
            self.summary_writer = SummaryWriter(log_dir=self.log_dir)

    def write_events(self, event_list: Sequence[Event], flush: bool = True) -> None:
        if self.summary_writer is None:
            return
        for name, value, step in event_list:
            self.summary_writer.add_scalar(name, value, step)
        if flush:
            self.summary_writer.flush()

    def flush(self) -> None:
        """Have everything in the file."""
        if self.summary_writer is not None:
            self.summary_writer.flush()

    def close(self) -> None:
        if self.summary_writer is not None:
            self.summary_writer.close()
            self.summary_writer = None

"""Weights & Biases (needs the package wandb)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepspeed.monitor.monitor import Event, Monitor, require


class WandbMonitor(Monitor):
    """Logs to a run of its own, or to the one that the script has begun with `wandb.init`."""

    def __init__(self, wandb_config: Any) -> None:
        super().__init__(wandb_config)
        self.group = wandb_config.group
        self.team = wandb_config.team
        self.project = wandb_config.project
        self.run: Any = None  # None if not enabled or closed
        self._owns_run = False
        if self.enabled:
            require("wandb", "wandb", "wandb")
            import wandb  # optional: needs the package

            self._owns_run = wandb.run is None
            self.run = wandb.run
            if self._owns_run:
                self.run = wandb.init(project=self.project, group=self.group, entity=self.team)

    def log(
        self, data: dict[str, Any], step: int | None = None, commit: bool | None = None
    ) -> None:
        """Log values of one step, as `wandb.log`."""
        if self.run is not None:
            self.run.log(data, step=step, commit=commit)

    def write_events(self, event_list: Sequence[Event]) -> None:
        # Values of one step go in one call.
        by_step: dict[int, dict[str, Any]] = {}
        for name, value, step in event_list:
            by_step.setdefault(step, {})[name] = value
        for step, values in by_step.items():
            self.log(values, step=step)

    def close(self) -> None:
        # A run of the script's stays open.
        if self.run is not None and self._owns_run:
            self.run.finish()
        self.run = None

"""Comet (needs the package comet-ml)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepspeed.monitor.monitor import Event, Monitor, require

# Arguments of comet_ml.start that are keys of the block; null leaves them to Comet.
START_KEYS = ("api_key", "project", "workspace", "experiment_key", "mode", "online")


class CometMonitor(Monitor):
    """Logs to an experiment, at most one point of a name in `samples_log_interval` samples."""

    def __init__(self, comet_config: Any) -> None:
        super().__init__(comet_config)
        self.samples_log_interval = comet_config.samples_log_interval
        self.experiment: Any = None  # None if not enabled or closed
        self._last_step: dict[str, int] = {}
        if self.enabled:
            require("comet_ml", "comet-ml", "comet")
            import comet_ml  # optional: needs the package

            given = {key: getattr(comet_config, key) for key in START_KEYS}
            set_ones = {key: value for key, value in given.items() if value is not None}
            self.experiment = comet_ml.start(**set_ones)
            if comet_config.experiment_name is not None:
                self.experiment.set_name(comet_config.experiment_name)

    def write_events(self, event_list: Sequence[Event]) -> None:
        if self.experiment is None:
            return
        for name, value, step in event_list:
            if self._is_due(name, step):
                self._last_step[name] = step
                self.experiment.log_metric(name, value, step=step)

    def _is_due(self, name: str, step: int) -> bool:
        last = self._last_step.get(name)
        # A step that went back belongs to a run that was resumed from an older checkpoint.
        return last is None or step < last or step - last >= self.samples_log_interval

    def close(self) -> None:
        if self.experiment is not None:
            self.experiment.end()
            self.experiment = None

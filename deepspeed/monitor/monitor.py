"""`MonitorMaster`, which writes events to all monitors that are enabled.

The engine's own events (`runtime.step_observers.training_events`) and a script's go the same way:
`engine.monitor.write_events([("Train/accuracy", 0.5, engine.global_samples)])`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepspeed import comm as dist
from deepspeed.monitor.base import Event, Monitor, require
from deepspeed.utils.logging import logger


class MonitorMaster(Monitor):
    """All enabled monitors. Rank 0 opens and writes them; on other ranks `write_events` does
    nothing, so scripts need not ask.

    A monitor that cannot write (a full disk, a server that is away) does not end the training: it
    is named in a warning once, and asked again with the next events.

    Args:
        monitor_config: The four blocks, `deepspeed.monitor.config.DeepSpeedMonitorConfig`.

    Raises:
        ImportError: If an enabled monitor's package is not installed, on every rank alike; names
            the package and the command.
    """

    def __init__(self, monitor_config: Any) -> None:
        super().__init__(monitor_config)
        self.tb_monitor: Monitor | None = None
        self.wandb_monitor: Monitor | None = None
        self.csv_monitor: Monitor | None = None
        self.comet_monitor: Monitor | None = None
        self._warned: set[str] = set()
        self._require_packages()
        if self.enabled and _is_rank_0():
            self._open()

    def _require_packages(self) -> None:
        """Ranks must not wait for a rank 0 that has raised, so all of them look."""
        blocks = self.monitor_config
        if blocks.tensorboard.enabled:
            require("tensorboard", "tensorboard", "tensorboard")
        if blocks.wandb.enabled:
            require("wandb", "wandb", "wandb")
        if blocks.comet.enabled:
            require("comet_ml", "comet-ml", "comet")

    def _open(self) -> None:
        blocks = self.monitor_config
        if blocks.tensorboard.enabled:
            # optional: needs its package
            from deepspeed.monitor.tensorboard import TensorBoardMonitor

            self.tb_monitor = TensorBoardMonitor(blocks.tensorboard)
        if blocks.wandb.enabled:
            from deepspeed.monitor.wandb import WandbMonitor  # optional: needs its package

            self.wandb_monitor = WandbMonitor(blocks.wandb)
        if blocks.csv_monitor.enabled:
            # optional: few runs write CSV files
            from deepspeed.monitor.csv_monitor import csvMonitor

            self.csv_monitor = csvMonitor(blocks.csv_monitor)
        if blocks.comet.enabled:
            from deepspeed.monitor.comet import CometMonitor  # optional: needs its package

            self.comet_monitor = CometMonitor(blocks.comet)

    @property
    def monitors(self) -> list[Monitor]:
        """The monitors that are open here; none on ranks other than 0."""
        found = (self.tb_monitor, self.wandb_monitor, self.csv_monitor, self.comet_monitor)
        return [monitor for monitor in found if monitor is not None]

    def write_events(self, event_list: Sequence[Event]) -> None:
        """See base class.

        Raises:
            ValueError: If an event is not (name, number, step).
        """
        monitors = self.monitors
        if not monitors:
            return
        events = [checked(event) for event in event_list]
        for monitor in monitors:
            try:
                monitor.write_events(events)
            except Exception as error:
                # Whatever a logging service raises, days of training are worth more than its point.
                self._warn(type(monitor).__name__, error)

    def _warn(self, name: str, error: Exception) -> None:
        if name not in self._warned:
            self._warned.add(name)
            logger.warning(
                "%s could not write events (said once): %s: %s", name, type(error).__name__, error
            )

    def close(self) -> None:
        """See base class."""
        for monitor in self.monitors:
            try:
                monitor.close()
            except Exception as error:  # as above
                self._warn(type(monitor).__name__, error)
        self.tb_monitor = self.wandb_monitor = self.csv_monitor = self.comet_monitor = None


def checked(event: Event) -> tuple[str, float, int]:
    """An event with its value as a float.

    Raises:
        ValueError: If it is not (name, number, step).
    """
    try:
        name, value, step = event
        return str(name), float(value), int(step)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"write_events: an event is (name, number, step), got {event!r}"
        ) from error


def _is_rank_0() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0

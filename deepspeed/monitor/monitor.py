"""`Monitor`, the interface of everything that events can be written to, and `MonitorMaster`, which
writes to all that are enabled.

An event is `(name, value, step)`. The engine's own events (`training_events`) and a script's go the
same way:
`engine.monitor.write_events([("Train/accuracy", 0.5, engine.global_samples)])`.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from deepspeed import comm as dist
from deepspeed.utils.logging import logger

Event = tuple[str, Any, int]


class Monitor(ABC):
    """One place to write events to.

    Args:
        monitor_config: Its configuration block.

    Attributes:
        monitor_config: The same.
        enabled: Whether the block is; a monitor that is not opens and writes nothing.
    """

    def __init__(self, monitor_config: Any) -> None:
        self.monitor_config = monitor_config
        self.enabled: bool = monitor_config.enabled

    @abstractmethod
    def write_events(self, event_list: Sequence[Event]) -> None:
        """Write events.

        Args:
            event_list: `(name, value, step)` each; the value is a number or a tensor of one
                element.
        """

    def close(self) -> None:  # noqa: B027  # most monitors have nothing to let go of
        """Write what is buffered and let go of files and connections; no event may follow."""


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


def require(module: str, package: str, block: str) -> None:
    """Raise unless `module` can be imported.

    Args:
        module: Its name.
        package: The package that has it, as pip knows it.
        block: The configuration block that needs it.

    Raises:
        ImportError: Names the three.
    """
    if importlib.util.find_spec(module) is None:
        raise ImportError(
            f'{block}.enabled: true needs the package {package}, which is not installed: run "pip '
            f'install {package}", or set "{block}": {{"enabled": false}}'
        )


def _is_rank_0() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0

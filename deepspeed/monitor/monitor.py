"""Monitors, which events `(name, value, step)` are written to.

`MonitorMaster` writes to all that are enabled, the engine's events and a script's:
`engine.monitor.write_events([("Train/accuracy", 0.5, engine.global_samples)])`.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from deepspeed import comm as dist
from deepspeed.utils.logging import logger

Event = tuple[str, Any, int]


class Monitor(ABC):
    """One place to write events to."""

    def __init__(self, monitor_config: Any) -> None:
        self.monitor_config = monitor_config
        self.enabled: bool = monitor_config.enabled  # if not, it opens and writes nothing

    @abstractmethod
    def write_events(self, event_list: Sequence[Event]) -> None:
        """Write events."""

    def close(self) -> None:  # noqa: B027  # most monitors have nothing to let go of
        """Write what is buffered and let go of files and connections; no event may follow."""


def require(module: str, package: str, block: str) -> None:
    """Raise ImportError unless `module` can be imported, which `block` needs."""
    if importlib.util.find_spec(module) is None:
        raise ImportError(
            f'{block}.enabled: true needs the package {package}, which is not installed: run "pip '
            f'install {package}", or set "{block}": {{"enabled": false}}'
        )


class Kind(NamedTuple):
    """One of the monitors."""

    block: str
    attribute: str  # of `MonitorMaster`
    module: str
    class_name: str
    needs: tuple[str, str] | None = None  # module and package that must be installed


KINDS = (
    Kind(
        *("tensorboard", "tb_monitor", "tensorboard", "TensorBoardMonitor"),
        ("tensorboard", "tensorboard"),
    ),
    Kind("wandb", "wandb_monitor", "wandb", "WandbMonitor", ("wandb", "wandb")),
    Kind("csv_monitor", "csv_monitor", "csv_monitor", "csvMonitor"),
    Kind("comet", "comet_monitor", "comet", "CometMonitor", ("comet_ml", "comet-ml")),
    Kind("watch", "watch_monitor", "watch.monitor", "WatchMonitor"),
)


class RunRecord(Monitor):
    """The record that `watch` keeps of a run: a first line, lines, an end."""

    @abstractmethod
    def describe(self, about: Mapping[str, Any]) -> None: ...

    @abstractmethod
    def record(self, line: Mapping[str, Any]) -> None: ...

    @abstractmethod
    def end(self, error: BaseException | None = None) -> None: ...


class MonitorMaster(Monitor):
    """All enabled monitors, written by rank 0; on other ranks `write_events` does nothing.

    A monitor that cannot write (a full disk, a server that is away) does not end the training: it
    is named in a warning once, and asked again with the next events.

    Raises:
        ImportError: An enabled monitor's package is not installed; on every rank alike.
    """

    def __init__(self, monitor_config: object) -> None:
        super().__init__(monitor_config)
        self.tb_monitor: Monitor | None = None
        self.wandb_monitor: Monitor | None = None
        self.csv_monitor: Monitor | None = None
        self.comet_monitor: Monitor | None = None
        self.watch_monitor: RunRecord | None = None
        self._warned: set[str] = set()
        asked = [kind for kind in KINDS if getattr(monitor_config, kind.block).enabled]
        # Ranks must not wait for a rank 0 that has raised, so all of them look.
        for kind in asked:
            if kind.needs:
                require(*kind.needs, kind.block)
        is_rank_0 = not dist.is_initialized() or dist.get_rank() == 0
        for kind in asked if self.enabled and is_rank_0 else ():
            # optional: some need a package of their own, and few runs use them all
            module = importlib.import_module(f"deepspeed.monitor.{kind.module}")
            opened = getattr(module, kind.class_name)(getattr(monitor_config, kind.block))
            setattr(self, kind.attribute, opened)

    @property
    def monitors(self) -> list[Monitor]:
        """The monitors that are open here; none on ranks other than 0."""
        return self._of_events() + ([] if self.watch_monitor is None else [self.watch_monitor])

    def _of_events(self) -> list[Monitor]:
        """Those that are given the engine's numbers as events."""
        found = (self.tb_monitor, self.wandb_monitor, self.csv_monitor, self.comet_monitor)
        return [monitor for monitor in found if monitor is not None]

    def write_events(self, event_list: Sequence[Event], of_engine: bool = False) -> None:
        monitors = self._of_events() if of_engine else self.monitors
        if not monitors:
            return
        events = [checked(event) for event in event_list]
        for monitor in monitors:
            with self._guarded(monitor):
                monitor.write_events(events)

    # The record that `watch` keeps of a run

    def describe(self, about: Mapping[str, Any]) -> None:
        """Say what run it is."""
        if self.watch_monitor is not None:
            self.watch_monitor.describe(about)

    def record(self, line: Mapping[str, Any]) -> None:
        """Append a step."""
        if self.watch_monitor is not None:
            with self._guarded(self.watch_monitor):
                self.watch_monitor.record(line)

    def end_record(self, error: BaseException | None = None) -> None:
        """The run has ended, by `error` if there is one."""
        if self.watch_monitor is not None:
            with self._guarded(self.watch_monitor):
                self.watch_monitor.end(error)

    @contextmanager
    def _guarded(self, monitor: Monitor) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            # Whatever a logging service raises, days of training are worth more than its point.
            name, what = type(monitor).__name__, type(error).__name__
            if name not in self._warned:
                self._warned.add(name)
                logger.warning("%s could not write events (said once): %s: %s", name, what, error)

    def close(self) -> None:
        for monitor in self.monitors:
            with self._guarded(monitor):
                monitor.close()
        self.tb_monitor = self.wandb_monitor = self.csv_monitor = self.comet_monitor = None
        self.watch_monitor = None


def checked(event: Event) -> tuple[str, float, int]:
    """An event with its value as a float."""
    try:
        name, value, step = event
        return str(name), float(value), int(step)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"write_events: an event is (name, value, step), got {event!r}") from error

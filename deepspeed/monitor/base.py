"""`Monitor`, the interface of everything that events can be written to.

An event is `(name, value, step)`.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

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

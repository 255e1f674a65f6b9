"""What the package asks of streams and events, whatever the device.

A device brings its own classes (torch's, the simulator's, `host_streams`); `DeepSpeedAccelerator`'s
`Stream` and `Event` say which. Annotations name the two interfaces here.
"""

from __future__ import annotations

from typing import Any, Protocol


class Event(Protocol):
    """A point in the work of a stream."""

    def record(self, stream: Any = ...) -> None:
        """Stand for the work issued so far on ``stream`` (default: the current one)."""

    def wait(self, stream: Any = ...) -> None:
        """Let ``stream`` (default: the current one) wait."""

    def query(self) -> bool:
        """Whether that work is done."""
        ...

    def synchronize(self) -> None:
        """Let the host wait."""


class Stream(Protocol):
    """A queue of work on a device; hashable."""

    def wait_stream(self, stream: Any) -> None:
        """Work issued here from now on runs after the work issued on ``stream`` so far."""

    def wait_event(self, event: Any) -> None:
        """Work issued here from now on runs after what ``event`` stands for."""

    def record_event(self, event: Any = ...) -> Any:
        """Record ``event`` (a new one if None) behind the work issued here so far; returns it."""

    def query(self) -> bool:
        """Whether all work is done."""
        ...

    def synchronize(self) -> None:
        """Let the host wait for all work."""

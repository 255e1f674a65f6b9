"""Streams and events for devices that have none: a stream is always idle and an event is a point in
time, so that the code which orders work on streams is one code for all devices.
"""

import time


class HostEvent:
    """An event that has always happened; it keeps the time of its last `record`."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        self.enable_timing = enable_timing
        self.blocking = blocking
        self.interprocess = interprocess
        self._recorded_at: float | None = None

    def record(self, stream: "HostStream | None" = None) -> None:
        self._recorded_at = time.perf_counter()

    def wait(self, stream: "HostStream | None" = None) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def elapsed_time(self, end_event: "HostEvent") -> float:
        """Milliseconds from this event's record to that of ``end_event``."""
        if self._recorded_at is None or end_event._recorded_at is None:
            raise RuntimeError("elapsed_time needs two recorded events; call record() on both")
        return (end_event._recorded_at - self._recorded_at) * 1e3


class HostStream:
    """A stream whose work is always done. Hashable by identity; usable as a context manager."""

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.device = device
        self.priority = priority

    def wait_stream(self, stream: "HostStream") -> None:
        """Nothing to wait for."""

    def wait_event(self, event: HostEvent) -> None:
        """Nothing to wait for."""

    def record_event(self, event: HostEvent | None = None) -> HostEvent:
        recorded = HostEvent() if event is None else event
        recorded.record(self)
        return recorded

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def __enter__(self) -> "HostStream":
        return self

    def __exit__(self, *error: object) -> None:
        return None

"""A thread that looks at something now and then while a program waits, and ends when nobody has
waited for a while: whatever becomes of what it looked after, no thread is left behind.

Whoever calls `Lookout.call` before each wait pays two assignments.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable

# More than any look takes; one that hangs is left alone.
_STOP_S = 5.0


class Lookout:
    """See module."""

    def __init__(
        self,
        name: str,
        look: Callable[[], None],
        is_wanted: Callable[[], bool],
        pause_s: Callable[[], float],
    ) -> None:
        self.name = name
        self.look = look
        self.is_wanted = is_wanted
        self.pause_s = pause_s
        self._lock = threading.Lock()
        self._was_called = False
        self._thread: _Thread | None = None

    @property
    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def call(self) -> None:
        """Tell that a wait begins."""
        # In this order; see `retires`.
        self._was_called = True
        if not self.is_alive:
            with self._lock:
                if not self.is_alive:
                    self._thread = _Thread(self)
                    self._thread.start()

    def retires(self, thread: _Thread) -> bool:
        """Whether the thread may end: nobody has waited since it was asked last."""
        if self._was_called or self.is_wanted():
            self._was_called = False
            return False
        # First gone, then asked again: a call that has not seen the one is seen by the other.
        self._thread = None
        if not self._was_called:
            return True
        with self._lock:
            if self.is_alive:
                return True
            self._thread = thread
        return False


class _Thread(threading.Thread):
    """A daemon: nobody has to end it before the process ends, where `stop_all` does."""

    def __init__(self, lookout: Lookout) -> None:
        super().__init__(name=lookout.name, daemon=True)
        self._lookout = lookout
        self._told = threading.Event()

    def run(self) -> None:
        lookout = self._lookout
        while not self._told.wait(lookout.pause_s()):
            if lookout.is_wanted():
                lookout.look()
            if lookout.retires(self):
                return

    def stop(self, if_idle: bool = False) -> None:
        """End it now, unless `if_idle` and somebody waits; the next wait begins another."""
        if if_idle and self._lookout.is_wanted():
            return
        self._told.set()
        if self is not threading.current_thread():
            self.join(_STOP_S)


def stop_all(if_idle: bool = False) -> None:
    """End the threads of all lookouts, or only of those that nobody wants now."""
    for thread in threading.enumerate():
        if isinstance(thread, _Thread):
            thread.stop(if_idle)


# [Note: threads at exit]
# A thread that is in torch's C++, as in a question to the store, takes the interpreter again when
# it comes back. When that is ending it ends the thread, through frames that allow no unwinding, and
# so aborts the process ("terminate called without an active exception") after all has gone well.
# Nothing that calls torch may be under way then.
atexit.register(stop_all)

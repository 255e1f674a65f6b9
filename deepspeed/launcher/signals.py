"""Signals to a launcher: ending its wait by an exception, and the user's second Ctrl-C, which ends
a graceful shutdown.

Owns: noticing them. Does not own: what is done about the first one while processes run, which
torch's agent turns into a signal to all of them and up to half a minute of patience; asked again it
would start that half minute anew. Called by: `agent`, `launch`, `launch_rank`.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType

MIN_APART_SECONDS = 0.3
"""Signals closer together are one: `timeout` and some terminals deliver theirs twice."""


ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Interrupted(Exception):
    """This process got a signal that asks it to end."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"signal {signum}")
        self.signum = int(signum)


def raise_on_signals() -> None:
    """Let signals that ask this process to end raise `Interrupted` on the main thread."""
    for number in ENDING_SIGNALS:
        signal.signal(number, _raise)


def _raise(number: int, frame: FrameType | None) -> None:
    raise Interrupted(number)


@contextlib.contextmanager
def deferred_signals() -> Iterator[None]:
    """Let signals that ask this process to end raise `Interrupted` behind the block instead of
    within it.

    For imports of torch: numpy's native part, among others, swallows an exception that a handler
    raises while it loads, and the launch would go on as if nobody had pressed Ctrl-C.
    """
    came: list[int] = []
    before = {
        number: signal.signal(number, lambda received, frame: came.append(received))
        for number in ENDING_SIGNALS
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        raise Interrupted(came[0])


class SecondInterrupt:
    """Calls `action`, on a thread, when SIGINT arrives after another signal; a context manager for
    the main thread.

    Works through the wakeup descriptor, into which Python writes each signal's number whatever
    handlers do with it; torch's agent replaces handlers while it runs.
    """

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._thread = threading.Thread(
            target=self._watch, name="deepspeed-second-interrupt", daemon=True
        )
        self._previous = -1

    def __enter__(self) -> "SecondInterrupt":
        self._previous = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.set_wakeup_fd(self._previous)
        # The reader's end of file: the thread ends.
        os.close(self._writer)
        self._thread.join()
        os.close(self._reader)

    def _watch(self) -> None:
        first: float | None = None
        while numbers := os.read(self._reader, 16):
            now = time.monotonic()
            if first is not None and signal.SIGINT in numbers and now - first >= MIN_APART_SECONDS:
                self._action()
            if first is None and {signal.SIGINT, signal.SIGTERM}.intersection(numbers):
                first = now

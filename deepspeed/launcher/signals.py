"""Signals that ask a launcher to end: none is lost, whatever the launcher is doing.

Owns what such a signal does at each moment, and noticing the user's second Ctrl-C; not what is done
about the first one while processes run, which torch's agent turns into a signal to all of them and
up to half a minute of patience; asked again it would start that half minute anew.

An exception that a handler raises is lost where Python runs code that nobody called: callbacks of
weak references (the import system has one per module), `__del__`, native parts of modules that
clear errors while they load. So a handler raises only where this process waits, and there the
signal is repeated until the wait has ended:

- until there is something to clean up, a signal kills the process (`dying_at_once`);
- while a launch is set up and cleaned up, signals are noted (`noting_signals`);
- while it waits, they raise (`raising_signals`), first of all what has been noted;
- while torch's agent runs, `AgentWatch` repeats the one that did not reach it.
"""

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

# Signals closer together are one: `timeout` and some terminals deliver theirs twice.
MIN_APART_SECONDS = 0.3
REPEAT_SECONDS = 0.5  # how long the agent may go on after a signal before it is sent again

_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# The function of torch's agent that starts processes and waits for them; an interruption leaves it
# at once, and the graceful end is outside it.
_AGENT_LOOP = "_invoke_run"

# Signals that came while they were noted, and that nothing has raised yet; one list, as a process
# has one set of handlers.
_noted: list[int] = []


class Interrupted(BaseException):
    """This process got a signal that asks it to end; `at` is when, in monotonic seconds.

    No `Exception`: code that goes on after any error must not go on after this.
    """

    def __init__(self, signum: int, at: float | None = None) -> None:
        super().__init__(f"signal {signum}")
        self.signum = int(signum)
        self.at = time.monotonic() if at is None else at


def ending_signals() -> list[signal.Signals]:
    """Return the signals that ask this process to end: all but a SIGHUP that it was told to ignore,
    as `nohup` does. Shells let every job in the background of a script ignore SIGINT; nobody asked
    for that, and such a launch would leave its ranks behind.
    """
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in _ENDING_SIGNALS if number != signal.SIGHUP or not ignored]


def die_at_once() -> None:
    """Let Ctrl-C kill this process without a word, as SIGTERM and SIGHUP do. The launcher begins
    so: while modules load, Python's own handler may raise where nobody hears.
    """
    if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, signal.SIG_IGN):
        signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def dying_at_once() -> Iterator[None]:
    """Let `die_at_once` hold for the block."""
    before = signal.getsignal(signal.SIGINT)
    die_at_once()
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def noting_signals() -> Iterator[None]:
    """Within the block, keep signals for the next `raising_signals`."""
    with _handled_by(lambda number, frame: _noted.append(number)):
        yield


@contextlib.contextmanager
def raising_signals(error: Callable[[int], BaseException] = Interrupted) -> Iterator[None]:
    """Within the block, let signals raise on the main thread."""

    raises = False

    def handle(number: int, frame: FrameType | None) -> None:
        if raises:
            raise error(number)
        # Handlers are being put in place or taken back, which must not stop half-way.
        _noted.append(number)

    with _handled_by(handle):
        raises = True
        try:
            if _noted:
                raise error(_noted.pop(0))
            yield
        finally:
            raises = False


def take_noted() -> list[int]:
    """Return the signals that have been noted and that nothing has raised, for the last time."""
    taken = _noted.copy()
    _noted.clear()
    return taken


@contextlib.contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    # Also puts back what torch's agent replaces.
    before = {number: signal.signal(number, handler) for number in ending_signals()}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


class AgentWatch:
    """Sees to it that a signal reaches torch's agent, and that a second Ctrl-C is heard
    (`on_second`, on the thread); a context manager for the main thread, around the agent's run.

    Works through the wakeup descriptor, into which Python writes each signal's number whatever
    handlers do with it; the agent replaces handlers while it runs. `first_at` is when the first
    signal came, in monotonic seconds.
    """

    def __init__(self, on_second: Callable[[], None]) -> None:
        self._on_second = on_second
        self.first_at: float | None = None
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        name = "deepspeed-agent-watch"
        self._thread = threading.Thread(target=self._watch, name=name, daemon=True)
        self._previous = -1

    def __enter__(self) -> "AgentWatch":
        self._previous = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        signal.set_wakeup_fd(self._previous)
        # The reader's end of file: the thread ends.
        os.close(self._writer)
        self._thread.join()
        os.close(self._reader)

    def _watch(self) -> None:
        first: tuple[int, float] | None = None
        repeated = 0
        while True:
            patience = None if first is None else REPEAT_SECONDS
            ready, _, _ = select.select([self._reader], [], [], patience)
            if not ready:
                if first is not None and _is_in_agent_loop():
                    repeated += 1
                    signal.pthread_kill(_main_thread_id(), first[0])
                continue
            numbers = os.read(self._reader, 16)
            if not numbers:
                return
            now = time.monotonic()
            for number in numbers:
                if first is None:
                    if number in _ENDING_SIGNALS:
                        first, self.first_at = (number, now), now
                elif repeated and number == first[0]:
                    repeated -= 1
                elif number == signal.SIGINT and now - first[1] >= MIN_APART_SECONDS:
                    self._on_second()


def _main_thread_id() -> int:
    return threading.main_thread().ident or 0


def _is_in_agent_loop() -> bool:
    frame = sys._current_frames().get(_main_thread_id())
    while frame is not None:
        if frame.f_code.co_name == _AGENT_LOOP:
            return True
        frame = frame.f_back
    return False

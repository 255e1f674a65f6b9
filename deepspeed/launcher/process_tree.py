"""Ending processes with all that they have started, also where this process cannot.

Run as a plain file (`python process_tree.py WORD`) it is the reaper: it waits for its launcher's
end and kills what carries the word in its environment. The kernel ends ranks with their launcher
(`worker_exec`), but not what ranks have started: that comes to init. No import but Python's own.
"""

import contextlib
import ctypes
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

PR_SET_CHILD_SUBREAPER = 36
KILL_WAIT_SECONDS = 5.0
VARIABLE = "DEEPSPEED_LAUNCH_WORD"
GIVE_UP_SECONDS = 20.0
PAUSE_SECONDS = 0.02


@contextlib.contextmanager
def children_ended() -> Iterator[list[bool]]:
    """Kill every descendant that is left at the end, unless the caller sets the yielded flag.

    The agent ends the processes it started; those that *they* started (loader workers, compilers)
    are orphans by then and would come to init. A subreaper (Linux) gets them instead, so that they
    can be found. When this process is killed, or interrupted while it cleans up, its reaper does
    the same.
    """
    success = [False]
    if not sys.platform.startswith("linux"):
        # Neither subreapers nor /proc: descendants of living children only.
        try:
            yield success
        finally:
            if not success[0]:
                _kill_descendants(os.getpid(), None)
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    before = os.environ.get(VARIABLE)
    reaper, word = _start_reaper()
    os.environ[VARIABLE] = word
    try:
        yield success
    finally:
        try:
            if not success[0]:
                _kill_descendants(os.getpid(), reaper.pid)
        finally:
            os.environ.pop(VARIABLE)
            if before is not None:
                os.environ[VARIABLE] = before
            reaper.communicate(b"ok\n" if success[0] else b"")


def _start_reaper() -> "tuple[subprocess.Popen[bytes], str]":
    """Start the process that cleans up if this one cannot; return it and its word."""
    word = secrets.token_hex(16)
    # A session of its own: what a terminal or a shell sends to this process's group must not end it
    # first. -I -S and no output: it must not hold a pipe open that somebody reads to its end.
    reaper = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, word],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
    )
    return reaper, word


def _kill_descendants(pid: int, spared: int | None) -> None:
    """Kill what `pid` has started, again and again: one may be starting another."""
    # startup: psutil is needed only after a failure
    import psutil

    deadline = time.monotonic() + KILL_WAIT_SECONDS
    while time.monotonic() < deadline:
        found = psutil.Process(pid).children(recursive=True)
        children = [child for child in found if child.pid != spared]
        if not children:
            return
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=max(0.0, deadline - time.monotonic()))


def terminate_process_tree(pid: int) -> None:
    """End a process and its descendants: SIGTERM, and SIGKILL after a few seconds."""
    import psutil  # startup: see _kill_descendants

    try:
        process = psutil.Process(pid)
        alive = [*process.children(recursive=True), process]
    except psutil.NoSuchProcess:
        return
    for end in (psutil.Process.terminate, psutil.Process.kill):
        for member in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                end(member)
        _, alive = psutil.wait_procs(alive, timeout=KILL_WAIT_SECONDS)


# The reaper, a process that outlives its launcher


def main() -> None:
    """Wait for the launcher's end, then kill whatever carries the word until nothing does."""
    # A terminal's signals are for the launcher; this process ends after it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    if sys.stdin.buffer.read().endswith(b"ok\n"):
        return
    kill_marked(f"{VARIABLE}={sys.argv[1]}".encode())


def kill_marked(mark: bytes) -> None:
    """Kill processes whose environment has `mark`, until there is none: one may start another."""
    deadline = time.monotonic() + GIVE_UP_SECONDS
    while time.monotonic() < deadline:
        marked = [pid for pid in _processes() if mark in _environment(pid)]
        if not marked:
            return
        for pid in marked:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(PAUSE_SECONDS)


def _processes() -> list[int]:
    own = os.getpid()
    return [int(name) for name in os.listdir("/proc") if name.isdecimal() and int(name) != own]


def _environment(pid: int) -> list[bytes]:
    """Return the variables that a process was started with; none if that cannot be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as stream:
            return stream.read().split(b"\0")
    except OSError:
        return []


if __name__ == "__main__":
    main()

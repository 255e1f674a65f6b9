"""A small process that outlives its launcher and ends what the launcher has left, even after a
SIGKILL.

Owns: finding and killing the processes of one launch by the word in their environment. Does not
own: the orderly end, which is `process_tree`'s. Run as a plain file (`python reaper.py WORD`)
with a pipe from the launcher as stdin: the end of file is the launcher's death. A line "ok" before
it says that what is left may stay.

The kernel ends ranks with their launcher (`worker_exec`), but not what ranks have started
themselves: loader workers and shells come to init, and only their environment still tells where
they belong.
"""

import os
import signal
import sys
import time

VARIABLE = "DEEPSPEED_LAUNCH_WORD"
GIVE_UP_SECONDS = 20.0
PAUSE_SECONDS = 0.02


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
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
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

"""Ending processes with all that they have started.

Owns: finding and killing descendants, also orphaned ones, and the reaper that does it when this
process cannot. Does not own: the graceful end of ranks, which is torch's agent's and
`launch_rank`'s. Called by: `launch`, `nodes`.
"""

import contextlib
import ctypes
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from deepspeed.launcher.reaper import VARIABLE

PR_SET_CHILD_SUBREAPER = 36
KILL_WAIT_SECONDS = 5.0
REAPER = Path(__file__).with_name("reaper.py")


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
            if before is None:
                del os.environ[VARIABLE]
            else:
                os.environ[VARIABLE] = before
            reaper.communicate(b"ok\n" if success[0] else b"")


def _start_reaper() -> "tuple[subprocess.Popen[bytes], str]":
    """Start the process that cleans up if this one cannot; return it and its word."""
    word = secrets.token_hex(16)
    # A session of its own: what a terminal or a shell sends to this process's group must not end it
    # first. -I -S and no output: it must not hold a pipe open that somebody reads to its end.
    reaper = subprocess.Popen(
        [sys.executable, "-I", "-S", str(REAPER), word],
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
        children = [
            child for child in psutil.Process(pid).children(recursive=True) if child.pid != spared
        ]
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
        tree = [*process.children(recursive=True), process]
    except psutil.NoSuchProcess:
        return
    for member in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.terminate()
    _, alive = psutil.wait_procs(tree, timeout=KILL_WAIT_SECONDS)
    for member in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(alive, timeout=KILL_WAIT_SECONDS)

"""The threads that carry gloo's operations out: how they are scheduled, whether they rest."""

import atexit
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["wait_until_at_rest", "yielding_threads"]

# What newer torch calls each of them; older torch gives them no name.
_GLOO = "pt_gloo_runloop"

# What of a thread's status says whether it has run.
_FACTS = ("Name:", "Pid:", "State:", "voluntary_ctxt_switches:", "nonvoluntary_ctxt_switches:")

# Twice as long as a thread that asks for the interpreter waits before it asks again.
_REST_S = 0.01

# A thread that never rests, where torch gives gloo's no name, delays nobody longer.
_LIMIT_S = 2.0


@contextmanager
def yielding_threads(backend: str) -> Iterator[None]:
    """Let the threads that gloo starts in here push nobody off a processor when they wake.

    While a thread posts a send or a receive it holds the connection, and until it lets go gloo's
    own thread asks for it again and again, without waiting. Other ranks answer at once, so the post
    wakes that thread, mostly where the poster runs: it is pushed off, and for the 3 ms of a turn
    neither gets on.
    """
    policy = getattr(os, "SCHED_BATCH", None) if backend == "gloo" else None
    if policy is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        yield
        return
    _schedule(policy)  # threads begin with the policy of who starts them
    try:
        yield
    finally:
        _schedule(os.SCHED_OTHER)


def _schedule(policy: int) -> None:
    with suppress(OSError):  # a sandbox may refuse it: then only time is lost
        os.sched_setscheduler(0, policy, os.sched_param(0))


def wait_until_at_rest() -> None:
    """Wait until these threads have let go of the tensors of operations that are complete.

    They do so a moment after who waits is told, which is long beside a busy program, and need the
    interpreter for it. If that ends meanwhile the process aborts, though all has gone well; see
    [Note: threads at exit] in `deepspeed.comm.watch.lookout`. A thread that sleeps and has not run
    while this one slept holds none: it would have got the interpreter.
    """
    end = time.monotonic() + _LIMIT_S
    before, now = None, _threads()
    while (now != before or not all(map(_sleeps, now))) and time.monotonic() < end:
        before = now
        time.sleep(_REST_S)
        now = _threads()


def _threads() -> list[list[str]]:
    """Name, state and context switches of each of gloo's threads, or, where none has their name, of
    all but this one; [] where the system does not tell.
    """
    found = []
    for task in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # it has ended
            lines = (task / "status").read_text().splitlines()
            if task.name != str(threading.get_native_id()):
                found.append([line for line in lines if line.startswith(_FACTS)])
    return [facts for facts in found if facts[0].endswith(_GLOO)] or found


def _sleeps(facts: list[str]) -> bool:
    return "State:\tS (sleeping)" in facts


# Also where the script has made its process group by torch. Registered first, so carried out after
# what else uses one at exit.
atexit.register(wait_until_at_rest)

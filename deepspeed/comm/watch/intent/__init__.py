"""The collective intent check: ranks compare what they are about to do before they do it, instead
of hanging.

Each operation of `deepspeed.comm` is compared out of band, through the process group's key-value
store: operation, group, number in the group, reduction, root, shapes, dtypes, call site. The first
divergence raises `CollectiveMismatchError` on every rank within seconds, naming ranks and places;
so does a rank that never comes, that ended, or that waits in another operation. All ranks switch it
on or none does.

`check` is the observer, `rules` what must agree, `pairs` messages between two ranks, and
`intent_store` where ranks leave notes for each other.
"""

from __future__ import annotations

import atexit
import sys

from deepspeed.comm.watch import observation
from deepspeed.comm.watch.intent.check import IntentCheck
from deepspeed.comm.watch.intent.intent_store import CollectiveMismatchError

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "CollectiveMismatchError",
    "abort",
    "disable",
    "enable",
    "is_enabled",
]

DEFAULT_TIMEOUT_S = 30.0

_check: IntentCheck | None = None
_num_checks = 0


def enable(timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
    """Compare every operation from now on; if the check is on, only change its time limit. All
    ranks must call.

    Args:
        timeout_s: How long a rank waits for the others before it says who is missing, in seconds:
            longer than ranks legitimately differ, as by a checkpoint that one writes alone.

    Raises:
        ValueError: `timeout_s` is not positive.
    """
    global _check, _num_checks
    if not timeout_s > 0:
        raise ValueError(
            f"verify.collectives_timeout (timeout_s) is {timeout_s}; give seconds above 0"
        )
    if _check is not None:
        _check.set_timeout(timeout_s)
        return
    _check = IntentCheck(timeout_s, _num_checks)
    _num_checks += 1
    observation.add_observer(_check)
    observation.announcer = _check.announced
    atexit.register(_leave_at_exit)


def disable() -> None:
    """Compare nothing from now on; others that still wait for this rank are told."""
    global _check
    if _check is None:
        return
    observation.remove_observer(_check)
    observation.announcer = None
    atexit.unregister(_leave_at_exit)
    _check.leave("has switched the check off", stay=False)
    _check = None


def is_enabled() -> bool:
    """Whether operations are compared."""
    return _check is not None


def abort(why: str) -> None:
    """End every wait of the check, on all ranks, with `CollectiveMismatchError(why)`; from any
    thread.
    """
    if _check is not None:
        _check.abort(why)


def _leave_at_exit() -> None:
    # An exception that ends the program is known here; one in a thread, or a signal, is not.
    error = getattr(sys, "last_value", None)
    if _check is not None:
        why = "has ended"
        if error is not None:
            why += f" after {type(error).__name__}: {str(error)[:500]}"
        _check.leave(why, stay=True)

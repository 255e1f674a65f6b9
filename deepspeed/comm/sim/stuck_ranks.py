"""Ranks of the simulated device that wait for each other for ever, found while they wait.

[Note: what a rank waits for]
A rank's host waits for the device; the device is at an operation in which other ranks take part;
one of these has not begun its part. If that rank is blocked in the same way, it will not begin it
before its own wait is over, so a circle of such ranks never gets on. On a device the same circle
hangs: it consists of host waits, of what was issued, and of the order of streams, which are the
program's.

[Note: no false alarm]
A blocked rank says so in the process group's store, with what it has begun, and says it again at
each look (its beat). A circle counts when it was seen three times, the beats of all its ranks
advancing between looks: then there was a moment, that of the second look, at which all of them were
blocked at once, each in need of what another had not begun. Nothing that happens later ends that.

[Note: beside `lone_waits`]
That one reports by time, on any device, what code says that it waits for where ranks may take
different ways; it can prove nothing and ends nothing. This one knows all operations of a simulated
device and raises what it has proved. Only its report after a minute is by time: it tells of each
operation who has issued and begun it, which `lone_waits` cannot know.

A look costs the store a few requests and happens only while a rank has been blocked for a while, in
a thread; an operation that completes is charged a few assignments.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NamedTuple

from deepspeed.accelerator.call_stacks import Stack, capture, describe
from deepspeed.comm import process_groups
from deepspeed.comm.watch.lookout import Lookout
from deepspeed.utils.logging import logger

# How often a blocked rank looks at the others.
LOOK_S = 0.15
# How often a circle is seen before it counts; see [Note: no false alarm].
_SIGHTINGS = 3
# After so long a rank that is blocked for another reason says what it waits for, once.
REPORT_S = 60.0

_PREFIX = "deepspeed_sim/blocked/"
_VERDICT = "deepspeed_sim/verdict"


class HostWaitError(RuntimeError):
    """The host waits for work that depends on work which, meanwhile, nobody will issue."""


class Part(NamedTuple):
    """A rank's part in operation `number` of its `kind` (group, direction between two ranks)."""

    rank: int
    kind: str
    number: int


class Operation(NamedTuple):
    """An operation issued at `place`: this rank's part, and what others must begin for its end."""

    name: str
    own: Part
    others: tuple[Part, ...]
    place: Stack


@dataclasses.dataclass(slots=True)
class _Wait:
    """One wait: the beats of the looks at it, and the circle seen `sightings` times in a row."""

    epoch: int
    since: float = dataclasses.field(default_factory=time.monotonic)
    beat: int = 0
    circle: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)
    sightings: int = 0
    is_reported: bool = False


def _lines(place: Stack) -> str:
    return "\n".join(describe(place, "      "))


class StuckRanks:
    """What this rank has issued and begun, and the thread that looks while it is blocked."""

    def __init__(self) -> None:
        self._store: Any = None
        self._forget()
        self._operation: Operation | None = None
        self._blocked_thread = 0
        self._epoch = 0
        self._wait = _Wait(0)
        self._lookout = Lookout("stuck ranks", self._look, self._is_blocked, lambda: LOOK_S)

    def _forget(self) -> None:
        self._issued: Counter[str] = Counter()
        self._begun: Counter[str] = Counter()
        self._verdict: str | None = None

    # What the collectives tell

    def issued(self, name: str, kind: str, others: list[tuple[int, str]]) -> Operation:
        """Take in an operation: `kind` says which operations of this rank it is ordered with,
        `others` rank and kind of the parts that other ranks have in it.
        """
        number = self._issued[kind] if self.has_issued(kind) else 0
        self._issued[kind] += 1
        return Operation(
            name,
            Part(process_groups.get_rank(), kind, number),
            tuple(Part(rank, their_kind, number) for rank, their_kind in others),
            capture(),
        )

    def has_issued(self, kind: str) -> bool:
        store = process_groups.get_store()
        if store is not self._store:
            # A new world: its groups may have the names of those of the one before.
            self._store = store
            self._forget()
        return kind in self._issued

    def num_issued(self) -> dict[str, int]:
        return dict(self._issued)

    def begun(self, operation: Operation) -> None:
        self._begun[operation.own.kind] += 1

    @contextmanager
    def waiting(self, operation: Operation) -> Iterator[None]:
        """Within it this thread is blocked until an operation is complete.

        Raises:
            HostWaitError: It never will be.
        """
        self._epoch += 1
        self._operation, self._blocked_thread = operation, threading.get_ident()
        self._lookout.call()
        try:
            yield
        except RuntimeError as error:
            is_lost = process_groups.is_connection_error(error)
            verdict = self._verdict or (self._told() if is_lost else None)
            if verdict is None:
                raise
            raise HostWaitError(verdict) from None
        finally:
            self._operation = None

    def _told(self) -> str | None:
        """What the first rank that found out says of all."""
        with suppress(RuntimeError):
            if self._store.check([_VERDICT]):
                return str(self._store.get(_VERDICT).decode())
        return None

    # The thread

    def _is_blocked(self) -> bool:
        return self._operation is not None and self._verdict is None

    def _look(self) -> None:
        wait = self._wait
        if wait.epoch != self._epoch:
            self._wait = _Wait(self._epoch)  # only those that last are worth a look
            return
        # The store ends with the process that hosts it.
        with suppress(RuntimeError):
            self._look_on(wait)

    def _look_on(self, wait: _Wait) -> None:
        wait.beat += 1
        seen = self._seen(wait.epoch, wait.beat)
        circle = _circle(process_groups.get_rank(), seen)
        if circle and wait.circle.keys() == circle.keys():
            wait.sightings += _are_still_blocked(wait.circle, circle)
        else:
            wait.sightings = 1 if circle else 0
        wait.circle = circle
        if wait.sightings >= _SIGHTINGS and self._epoch == wait.epoch and self._is_blocked():
            # First, for those whose operations end because this rank's do.
            self._store.set(_VERDICT, _verdict(circle))
        self._verdict = self._told()
        if self._verdict is not None:
            process_groups.abort_groups()
        elif not wait.is_reported and time.monotonic() - wait.since > REPORT_S:
            wait.is_reported = True
            logger.error("the simulated device has waited %d s:\n%s", REPORT_S, _report(seen))

    def _seen(self, epoch: int, beat: int) -> dict[int, dict[str, Any]]:
        """The states of all blocked ranks that this one waits for, directly or not."""
        store, operation = self._store, self._operation
        if operation is None:
            return {}
        host = sys._current_frames().get(self._blocked_thread)
        own = self._state(operation, host) | {"epoch": epoch, "beat": beat}
        store.set(f"{_PREFIX}{operation.own.rank}", json.dumps(own))
        seen, waiting = {operation.own.rank: own}, _missing(own)
        while waiting:
            rank = waiting.pop().rank
            if rank in seen or not store.check([f"{_PREFIX}{rank}"]):
                continue
            state = json.loads(store.get(f"{_PREFIX}{rank}"))
            seen[rank] = state
            waiting += _missing(state)
        return seen

    def _state(self, operation: Operation, host: FrameType | None) -> dict[str, Any]:
        return {
            "operation": operation.name,
            "posted": _lines(operation.place),
            "needs": operation.others,
            "issued": self._issued,
            "begun": self._begun,
            "host": _lines(capture(frame=host)) if host is not None else "",
        }


def _missing(state: dict[str, Any]) -> list[Part]:
    return [Part(*part) for part in state["needs"]]


def _circle(start: int, seen: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Blocked ranks from `start` back to it, each in need of what the next has not begun."""
    paths = [[start]]
    visited = set()
    while paths:
        path = paths.pop()
        for part in _missing(seen[path[-1]]):
            other = seen.get(part.rank)
            if other is None or other["begun"].get(part.kind, 0) > part.number:
                continue
            if part.rank == start:
                return {rank: seen[rank] for rank in path}
            if part.rank not in visited:
                visited.add(part.rank)
                paths.append([*path, part.rank])
    return {}


def _are_still_blocked(before: dict[int, dict[str, Any]], now: dict[int, dict[str, Any]]) -> int:
    """1 if all have said again, since the look before, that they are blocked as they were."""
    pairs = [(state, now[rank]) for rank, state in before.items()]
    return int(all(a["epoch"] == b["epoch"] and a["beat"] < b["beat"] for a, b in pairs))


def _sentence(rank: int, state: dict[str, Any], seen: dict[int, dict[str, Any]]) -> str:
    text = (
        f"  rank {rank}: its host waits at\n{state['host']}\n"
        f"    for {state['operation']}, which was issued at\n{state['posted']}"
    )
    for part in _missing(state):
        other = seen.get(part.rank)
        if other is None:
            text += f"\n    rank {part.rank} is not blocked in the device, or has not said so"
        elif other["issued"].get(part.kind, 0) <= part.number:
            text += f"\n    rank {part.rank} has not issued its part, and cannot while it waits"
        elif other["begun"].get(part.kind, 0) <= part.number:
            text += (
                f"\n    rank {part.rank} has issued its part, behind {other['operation']} on its "
                "streams"
            )
    return text


def _report(seen: dict[int, dict[str, Any]]) -> str:
    return "\n".join(_sentence(rank, state, seen) for rank, state in seen.items())


def _verdict(circle: dict[int, dict[str, Any]]) -> str:
    ranks = ", ".join(map(str, circle))
    return (
        f"the hosts of rank(s) {ranks} wait for work that depends on work which they have not "
        f"issued; a device would hang here:\n{_report(circle)}\nDo not let the host wait for more "
        "than it needs (time by events), and post a receive only when all that it depends on has "
        "been issued"
    )

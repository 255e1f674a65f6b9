"""Where ranks leave notes for each other: the process group's store, out of band of all
collectives.

A rank that waits for others looks for reasons not to: a failure that another rank posted, a rank
that has left, a circle of ranks that wait for each other, the time limit. The first failure posted
is everybody's: all ranks raise the same text.

Waiting asks again and again, at growing intervals, instead of blocking in the store: other threads
(a backend that connects) use the same connection. Keys: `failed`; per rank `seen` (its last
collective), `waits` (what it waits for), `left`, `told`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import torch.distributed as torch_dist

# How often a waiting rank looks for reasons not to wait any longer; the time in which a failure
# reaches all others.
LOOK_S = 0.25
_LONGEST_PAUSE_S = 0.01
# How long a rank that fails or ends stays so that the others can read why: it may host the store.
_STAY_S = 2.0


class CollectiveMismatchError(RuntimeError):
    """The ranks do not agree on what is next, or one never comes; the text names ranks, calls."""


class IntentStore:
    """One rank's access to the store. `relieve` is called in long waits: whatever this rank owes
    others, who may not come before they have it.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        timeout_s: float,
        relieve: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank = rank
        self.timeout_s = timeout_s
        self._relieve = relieve
        self._store = store
        self._world_size = world_size
        self._failure: str | None = None
        # Notes that were there once: reading one that is not would block in the store.
        self._known: set[str] = set()
        self._num_waits = 0
        self._waiting_now = 0
        # The circle of waiting ranks as it was first seen: (number of the wait, number of its note)
        # by rank.
        self._suspected: dict[int, tuple[int, int]] = {}

    # -- notes -------------------------------------------------------------------------------------

    def write(self, notes: dict[str, str]) -> None:
        with self._connected():
            self._store.multi_set(list(notes), list(notes.values()))

    def has(self, *keys: str) -> bool:
        with self._connected():
            return bool(self._store.check(list(keys)))

    def read(self, *keys: str) -> list[str]:
        """Notes that are never erased, and empty texts for all of them while not all are there."""
        if not self._known.issuperset(keys):
            if not self.has(*keys):
                return [""] * len(keys)
            self._known.update(keys)
        with self._connected():
            return [note.decode() for note in self._store.multi_get(list(keys))]

    def claim(self, key: str, note: str) -> str:
        """Leave a note unless there is one already; gives the one that is there then."""
        with self._connected():
            return str(self._store.compare_set(key, "", note).decode())

    def erase(self, key: str) -> None:
        with self._connected():
            self._store.delete_key(key)

    @contextmanager
    def _connected(self) -> Iterator[None]:
        try:
            yield
        except torch_dist.DistNetworkError as error:
            raise CollectiveMismatchError(
                "the key-value store of the process group cannot be reached any more: the process "
                "that hosts it (rank 0, or the launcher) has ended, so a rank has failed before "
                f"this one could be told why; see its output ({error})"
            ) from error

    # -- failing -----------------------------------------------------------------------------------

    def fail(self, message: str) -> NoReturn:
        """Post a failure for all ranks and raise the first one posted."""
        self._raise(self.claim("failed", message))

    def abort(self, message: str) -> None:
        """Post a failure for all ranks without raising it: a wait in another thread will."""
        self._failure = self.claim("failed", message)

    def raise_if_failed(self) -> None:
        if self._failure is not None:
            raise CollectiveMismatchError(self._failure)
        (failure,) = self.read("failed")
        if failure:
            self._raise(failure)

    @property
    def failed(self) -> bool:
        return self._failure is not None

    def _raise(self, message: str) -> NoReturn:
        self._failure = message
        with suppress(CollectiveMismatchError):
            self.write({f"told/{self.rank}": "1"})
            self._stay()
        raise CollectiveMismatchError(message)

    def leave(self, why: str, stay: bool) -> None:
        """Tell the others why this rank takes part in nothing any more; `stay` gives them a moment
        to read it, because this process is about to end.
        """
        # RuntimeError: at the end of a process there may be no store any more, and nobody to tell.
        with suppress(RuntimeError):
            self.write({f"left/{self.rank}": why})
            if stay:
                self._stay()

    def _stay(self) -> None:
        """Wait, for a moment at most, until all other ranks know of the failure or have left."""
        end = time.monotonic() + _STAY_S
        others = [rank for rank in range(self._world_size) if rank != self.rank]
        while time.monotonic() < end and not all(
            self.has(f"told/{rank}") or self.has(f"left/{rank}") for rank in others
        ):
            time.sleep(_LONGEST_PAUSE_S)

    # -- waiting -----------------------------------------------------------------------------------

    def wait(self, ready: Callable[[], bool], missing: Callable[[], list[int]], what: str) -> None:
        """Wait until ``ready()``, which asks the store; `missing` gives the ranks that are waited
        for.

        Raises:
            CollectiveMismatchError: It will not happen, or has not within the time limit.
        """
        started = time.monotonic()
        next_look = started + LOOK_S
        self._num_waits += 1
        self._waiting_now += 1
        number, looks = self._num_waits, 0
        try:
            while not ready():
                now = time.monotonic()
                if now >= next_look:
                    looks += 1
                    self._relieve()
                    self._look(missing, what, now - started, (number, looks))
                    next_look = now + LOOK_S
                # In proportion to the wait: prompt after short ones, and out of the way of busy
                # cores in long ones.
                time.sleep(min((now - started) / 8, _LONGEST_PAUSE_S))
        finally:
            self._waiting_now -= 1
            if looks:
                self._suspected = {}
                with suppress(CollectiveMismatchError):
                    self.write({f"waits/{self.rank}": ""})

    def _look(
        self, missing: Callable[[], list[int]], what: str, waited_s: float, number: tuple[int, int]
    ) -> None:
        self.raise_if_failed()
        gone = [rank for rank in missing() if self.has(f"left/{rank}")]
        # Asked again: a rank that left may have done its part just before.
        gone = [rank for rank in missing() if rank in gone]
        if gone:
            self.fail(self._report(f"{_ranks(gone)} ended and will not come", gone, what))
        absent = missing()
        # With several threads waiting, none of them stands for the rank: it must not be taken for
        # blocked.
        if self._waiting_now == 1:
            note = {"number": number, "missing": absent, "what": what}
            self.write({f"waits/{self.rank}": json.dumps(note)})
            circle = self._circle()
            if circle:
                why = "ranks wait for each other, each in another operation"
                self.fail(self._report(why, circle, what))
        if waited_s > self.timeout_s and absent:
            reason = f"{_ranks(absent)} did not come within {self.timeout_s:g} s"
            advice = (
                "If a rank is only slow (compiling, writing a checkpoint), raise "
                "verify.collectives_timeout (timeout_s)."
            )
            self.fail(f"{self._report(reason, absent, what)}\n{advice}")

    def _circle(self) -> list[int]:
        """The other ranks of a circle of waiting ranks that includes this one; empty if there
        surely is none.

        A note may be out of date by one look. Each rank of a circle must have written a second note
        of the same wait after the circle was seen first: then all of them were waiting at that
        moment.
        """
        notes: dict[int, dict[str, Any]] = {}
        path = self._path_back(self.rank, notes, {self.rank})
        found = {rank: tuple(notes[rank]["number"]) for rank in path}
        if not found:
            return []
        before = self._suspected
        if before.keys() != found.keys() or any(
            before[rank][0] != number[0] for rank, number in found.items()
        ):
            self._suspected = found
            return []
        later = all(number[1] > before[rank][1] for rank, number in found.items())
        return [rank for rank in path if rank != self.rank] if later else []

    def _path_back(self, start: int, notes: dict[int, dict[str, Any]], seen: set[int]) -> list[int]:
        """Ranks from ``start`` along what they wait for back to this rank, or none."""
        (text,) = self.read(f"waits/{start}")
        if not text:
            return []
        notes[start] = json.loads(text)
        targets: list[int] = notes[start]["missing"]
        if self.rank in targets:
            return [start]
        for target in targets:
            if target not in seen:
                seen.add(target)
                rest = self._path_back(target, notes, seen)
                if rest:
                    return [start, *rest]
        return []

    # -- telling -----------------------------------------------------------------------------------

    def _report(self, reason: str, about: Sequence[int], what: str) -> str:
        lines = [f"{reason}.", f"  rank {self.rank} waits in {what}"]
        lines += [f"  rank {rank} {self.whereabouts(rank)}" for rank in about if rank != self.rank]
        return "\n".join(lines)

    def whereabouts(self, rank: int) -> str:
        """What is known of a rank, in words that follow its name."""
        left, waits, seen = (self.read(f"{kind}/{rank}")[0] for kind in ("left", "waits", "seen"))
        nothing = "it took part in no collective that was checked"
        last = f"its last collective was {seen}" if seen else nothing
        if left:
            return f"{left}; {last}"
        if waits:
            return f"waits in {json.loads(waits)['what']}"
        if seen:
            return f"is elsewhere; {last}"
        return f"was never heard of; {last}: is the check switched on there?"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"

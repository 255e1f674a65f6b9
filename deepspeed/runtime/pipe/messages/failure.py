"""One rank's failure is every rank's, at once and with its traceback.

A rank that raises within `FailureWatch.guard` leaves its traceback in the process group's store.
The others may be blocked at that time, on a rank that will never come. A thread of each looks into
the store a few times per second while the rank is within `guard`; when it finds a failure it ends
all operations of the process (`deepspeed.comm.abort_groups`), and what they raise becomes a
`PipelinePeerError` with the original traceback. No message and no collective costs anything for it.

A process that is killed leaves no traceback. gloo notices the closed connection; who notices first
says so in the store.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from deepspeed import comm as dist
from deepspeed.comm.watch import intent
from deepspeed.comm.watch.lookout import Lookout
from deepspeed.utils.logging import logger

# How often the thread looks.
LOOK_S = 0.25
# A failure that breaks a connection leaves a note before; without one the process was killed.
_NOTE_S = 1.0
# Whoever can name the lost rank speaks first.
_NAMELESS_S = 1.0
# How long a rank that has failed stays so that the others can read why.
_STAY_S = 2.0

_LOST = "lost its connection"

_num_made: Counter[str] = Counter()


class PipelinePeerError(RuntimeError):
    """Another rank has failed, with this number and traceback; the engine cannot go on."""


@contextmanager
def transferring(watch: FailureWatch | None, what: str) -> Iterator[None]:
    """Begin or wait for a transfer inside; a lost connection becomes a `PipelinePeerError`. No
    function that calls it: reports name the line that began a transfer.

    Args:
        watch: Knows of the other ranks' failures; None where nobody tells of them.
        what: Names the transfer and the other rank.
    """
    try:
        yield
    except RuntimeError as error:
        if not dist.is_connection_error(error):
            raise
        if watch is not None:
            watch.raise_lost(error, what)
        lost = f"rank {dist.get_rank()} {_LOST} in {what}"
        raise PipelinePeerError(_explain(lost, error)) from error


def _explain(lost: str, error: BaseException) -> str:
    return (
        f"{lost}: a process has ended without a word (killed, out of memory, a crash outside of "
        f"Python), or does not answer; see the output of the other ranks ({error})"
    )


def _place(error: BaseException) -> str:
    """Name the operation that raised, by its traceback: the collective and ranks, or the line."""
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        module, function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if module.startswith("deepspeed.comm.") and "group" in frame.f_locals:
            return (
                f"{function}, with ranks {dist.get_all_ranks_from_group(frame.f_locals['group'])}"
            )
        if not module.startswith("torch."):
            place = f"{function} ({frame.f_code.co_filename}:{line}), with other ranks"
    return place


class FailureWatch:
    """Tells the ranks of one engine of each other's failures.

    Args:
        ranks: Global ranks that take part; one alone has nobody to tell.
        name: Of the engine's kind. All ranks make their watches in the same order: the n-th watches
            of a name belong together.
        place: Where this rank is, for messages, like "stage 2".
    """

    def __init__(self, ranks: Sequence[int], name: str, place: str = "") -> None:
        self._rank = dist.get_rank()
        self._own = f"rank {self._rank}" + (f" ({place})" if place else "")
        self._key = f"deepspeed_failure/{name}/{_num_made[name]}"
        _num_made[name] += 1
        self._seen_by = {rank: f"{self._key}/seen/{rank}" for rank in ranks}
        # None: nobody to tell, or the process that hosts it has ended.
        self._store: Any = dist.get_store() if len(ranks) > 1 else None
        self._failure: str | None = None
        # Guards `_is_inside`: operations are ended only of a rank that is within `guard`.
        self._lock = threading.Lock()
        self._is_inside = False
        self._lookout = Lookout(
            "pipeline failure watch", self._look_and_wake, self._is_watching, lambda: LOOK_S
        )

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Tell a failure here to the others, and raise one of theirs, from now or before, here."""
        self.check()
        self._enter()
        try:
            yield
        except BaseException as error:
            # Also what ends the process on purpose: the others would wait for it all the same.
            self._leave()
            self._raise(error)
        self._leave()
        # Operations of devices that were ended raise nothing; their results are worthless.
        self.check()

    def check(self) -> None:
        """Raise the failure that is known, if one is; asks nobody."""
        if self._failure is not None:
            raise PipelinePeerError(self._failure)

    def close(self) -> None:
        self._store = None

    # -- this rank's failure -----------------------------------------------------------------------

    def _raise(self, error: BaseException) -> NoReturn:
        if isinstance(error, PipelinePeerError):
            self._failure = str(error)
            raise error
        # Ended by this rank's thread: whatever it looks like.
        if self._failure is not None and isinstance(error, RuntimeError):
            raise PipelinePeerError(self._failure) from error
        if dist.is_connection_error(error):
            self.raise_lost(error)
        text = "".join(traceback.format_exception(error))
        self._failure = self._tell(f"{self._own} failed:\n{text}")
        self._stay()
        raise error

    def raise_lost(self, error: BaseException, what: str = "") -> NoReturn:
        """Raise a `PipelinePeerError`: an operation ended because its connection did.

        Without `what` (see `transferring`) several take part: who can name one speaks first.
        """
        end = time.monotonic() + _NOTE_S + (0 if what else _NAMELESS_S)
        while not self._look() and self._store is not None and time.monotonic() < end:
            time.sleep(LOOK_S / 5)
        lost = f"{self._own} {_LOST} in {what or _place(error)}"
        if self._failure is None:
            self._failure = self._tell(_explain(lost, error))
        if _LOST in self._failure and lost not in self._failure:
            # Who spoke first may know less of it.
            self._failure += f"; {lost}"
        raise PipelinePeerError(self._failure) from error

    def _tell(self, failure: str) -> str:
        """Leave a failure for the others; returns the first one that was left."""
        if self._store is not None:
            with self._reaching():
                failure = self._store.compare_set(self._key, "", failure).decode()
                self._store.set(self._seen_by[self._rank], "1")
        return failure

    def _stay(self) -> None:
        """Wait a moment until all know of the failure: this process, or its store, may end."""
        end = time.monotonic() + _STAY_S
        while self._store is not None and time.monotonic() < end:
            with self._reaching():
                if self._store.check(list(self._seen_by.values())):
                    return
            time.sleep(LOOK_S / 5)

    # -- the others' -------------------------------------------------------------------------------

    def _look(self) -> bool:
        """Ask the store; whether a failure is known."""
        if self._failure is None and self._store is not None:
            with self._reaching():
                if self._store.check([self._key]):
                    self._failure = self._store.get(self._key).decode()
                    self._store.set(self._seen_by[self._rank], "1")
        return self._failure is not None

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        # The store ends with its host process: the one that failed, or one that has finished.
        try:
            yield
        except RuntimeError as error:
            logger.debug(
                "pipeline: the store of the process group cannot be reached any more (%s)", error
            )
            self._store = None

    def _enter(self) -> None:
        with self._lock:
            self._is_inside = True
        if self._store is not None:
            self._lookout.call()

    def _leave(self) -> None:
        with self._lock:
            self._is_inside = False

    # A rank that works on finds out at its next transfer; the thread is for blocked ones.

    def _is_watching(self) -> bool:
        return self._is_inside and self._failure is None and self._store is not None

    def _look_and_wake(self) -> None:
        if self._look():
            with self._lock:
                if self._is_inside:
                    self._wake()

    def _wake(self) -> None:
        # First the check: it may wait for other ranks before it lets operations go on.
        with suppress(RuntimeError):
            intent.abort(self._failure or "")
        dist.abort_groups()

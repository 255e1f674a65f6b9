"""Operations that this rank waits for and that other ranks do not join, reported while it waits.

For code in which ranks may take different ways: gathers, reductions of gradients, what ranks agree
on while they save and load, messages between pipeline stages. Whoever waits says for what, in
words; when that lasts longer than `report_s`, a thread writes it to the log, once, with where the
program is and what the other ranks say that they wait for, which they leave in the process group's
store. Nothing is ended: a rank may only be slow. A wait that is over in time costs a few
assignments, and a process that is alone has no thread.

What a device waits for is told by events: the host goes on, and the oldest operation that was not
complete when it was asked last is the one that is reported. Time counts from when the device was
seen to have come to it.

[Note: questions to events]
While a graph is recorded nobody may ask an event, and a thread that issues nothing has no device:
the program's thread asks, when it waits for the next operation. When it issues nothing any more, it
waits for its device, as in `item()`, or does something else: `_Standing` tells these apart.

[Note: meetings]
Where ranks meet to hear how long work has gone (a file that one of them writes), those that wait
for it are not alone. They say in the store that they have come before they begin the work; a wait
for ranks that have all come is not reported.

`stuck_ranks` is no twin of this. It knows every operation of the simulated device and who has begun
it, so it can prove that ranks wait for each other for ever, and raises then. Here is only time,
which proves nothing, so this logs, for the operations that say so.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

from deepspeed.accelerator import Event, get_accelerator
from deepspeed.accelerator.call_stacks import capture, describe
from deepspeed.comm import process_groups
from deepspeed.comm.watch.lookout import Lookout
from deepspeed.utils.logging import logger

DEFAULT_REPORT_S = 60.0
# How often somebody looks, at least.
_LOOK_S = 1.0
# Operations of a device that are remembered; those that come later are behind them anyway.
_MAX_ON_DEVICE = 64
# After a report is posted in the store: what the other ranks post about the same moment.
_SETTLE_S = 0.5
_PREFIX = "deepspeed_lone/"
# Of a report, which is written once: a gather that has yet to connect is ten calls below the
# program's own line.
_MAX_FRAMES = 20
_NOBODY: AbstractContextManager[None, None] = nullcontext()


@dataclass(slots=True, eq=False)
class _Wait:
    """What somebody waits for, and the context in which the host does.

    On a device the operation stands between the events `begun` and `done`; without `done` the host
    waits. `meeting` is of [Note: meetings].
    """

    watch: LoneWaits
    what: Callable[[], str]
    meeting: int = 0
    done: Event | None = None
    begun: Event | None = None
    since: float = field(default_factory=time.monotonic)
    thread: int = field(default_factory=threading.get_ident)
    is_reported: bool = False
    _outer: _Wait | None = None

    def __enter__(self) -> None:
        on_host = self.watch.on_host
        self._outer = on_host.get(self.thread)
        self.begun = _event()
        on_host[self.thread] = self
        self.watch.lookout.call()

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._outer is None:
            del self.watch.on_host[self.thread]
        else:
            self.watch.on_host[self.thread] = self._outer
        if self.begun is not None and kind is None:
            self.watch.remember(_Wait(self.watch, self.what, self.meeting, _event(), self.begun))


class _Standing:
    """How long a thread has been in one call that keeps its processor busy, as those do that wait
    for CUDA, and programs do not that go on, sleep or read. To be asked at every look.
    """

    def __init__(self) -> None:
        self._place: tuple[int, ...] = ()
        self._since = self._used = 0.0

    def seconds(self, thread: int) -> float:
        frame = sys._current_frames().get(thread)
        if frame is None or sys.platform != "linux":
            return 0.0
        # It is alive while this one has the interpreter.
        used = time.clock_gettime(time.pthread_getcpuclockid(thread))
        place, now = (thread, id(frame), frame.f_lasti), time.monotonic()
        if place != self._place or 10 * (used - self._used) < now - self._since:
            self._place, self._since, self._used = place, now, used
        return now - self._since


class LoneWaits:
    """Waits of this process, by thread (`on_host`) and in order of issue on the device; one longer
    than `report_s` seconds is reported (0: never).
    """

    def __init__(self) -> None:
        self.report_s = DEFAULT_REPORT_S
        self.on_host: dict[int, _Wait] = {}
        self._on_device: deque[_Wait] = deque()
        self._lock = threading.Lock()  # of `_on_device`
        self._standing: defaultdict[int, _Standing] = defaultdict(_Standing)
        self._store: Any = None
        self._num_meetings = 0
        self.lookout = Lookout(
            "lone waits", self._look, self._is_wanted, lambda: min(self.report_s / 4 or 1, _LOOK_S)
        )

    # What the program tells

    def waiting(
        self, what: Callable[[], str], meeting: int = 0
    ) -> AbstractContextManager[None, None]:
        """Within it this thread, or the device's current stream, waits for other ranks, for `what`;
        `meeting` is what `coming` has returned, where ranks work before they wait.
        """
        return _Wait(self, what, meeting) if self._is_watched() else _NOBODY

    def issued(self, what: Callable[[], str], done: Event) -> None:
        """Tell that a device will wait for other ranks until `done`."""
        if self._is_watched():
            self.remember(_Wait(self, what, done=done))

    def coming(self) -> int:
        """Tell that this rank comes to where all ranks of the world meet, and may have work to do
        before it waits; see [Note: meetings]. All ranks call it. Returns the number for `waiting`.
        """
        if not self._is_watched():
            return 0
        store = process_groups.get_store()
        if store is not self._store:  # a new world
            self._store, self._num_meetings = store, 0
        self._num_meetings += 1
        store.set(f"{_PREFIX}met/{process_groups.get_rank()}", str(self._num_meetings))
        return self._num_meetings

    def forget(self) -> None:
        """Look at nothing that a device still does: an engine ends."""
        with self._lock:
            self._on_device.clear()

    def _is_watched(self) -> bool:
        # Nobody is asked in every wait who there is.
        return (
            self.report_s > 0
            and (self.lookout.is_alive or process_groups.get_world_size() > 1)
            and not get_accelerator().is_capturing()
        )

    def remember(self, wait: _Wait) -> None:
        """Take in what a device was given that waits for other ranks; what is over is forgotten."""
        with self._lock:
            while self._on_device and _has_passed(self._on_device[0].done):
                self._on_device.popleft()
            oldest = self._on_device[0] if self._on_device else wait
            if not _has_passed(oldest.begun):
                oldest.since = time.monotonic()
            if len(self._on_device) < _MAX_ON_DEVICE:
                self._on_device.append(wait)
        self.lookout.call()

    # The thread

    def _is_wanted(self) -> bool:
        if not process_groups.is_initialized():
            self.forget()
        return self.report_s > 0 and bool(self.on_host or self._on_device)

    def _look(self) -> None:
        # The store ends with the process that hosts it.
        with suppress(RuntimeError):
            for wait in [*list(self.on_host.values()), *self._oldest_on_device()]:
                is_due = time.monotonic() - wait.since > self.report_s > 0
                if is_due and not wait.is_reported:
                    self._report(wait)

    def _oldest_on_device(self) -> list[_Wait]:
        """List it if its program stands; see [Note: questions to events]."""
        with self._lock:
            oldest = list(self._on_device)[:1]
        return [one for one in oldest if self._stands(one.thread) > self.report_s]

    def _stands(self, thread: int) -> float:
        """Of what backward issues, in a thread of autograd's, the program's main thread waits."""
        threads = {thread, threading.main_thread().ident or thread}
        return max([self._standing[one].seconds(one) for one in threads])

    def _report(self, wait: _Wait) -> None:
        own, store = process_groups.get_rank(), process_groups.get_store()
        others = [rank for rank in range(process_groups.get_world_size()) if rank != own]
        absent = [rank for rank in others if not _has_come(store, rank, wait.meeting)]
        wait.is_reported = True
        if not absent:
            return  # who has come does not leave: nobody has to look again
        store.set(f"{_PREFIX}{own}", wait.what())
        time.sleep(_SETTLE_S)
        frames, main = sys._current_frames(), threading.main_thread().ident or wait.thread
        frame = frames.get(wait.thread, frames.get(main))
        who = f"{_have(absent)} not joined" if wait.meeting else "not all ranks have joined"
        lines = [
            f"rank {own} has waited {time.monotonic() - wait.since:.0f} s for {wait.what()}, which "
            f"{who}. Its program is at"
        ]
        lines += describe(capture(_MAX_FRAMES, frame), "    ") if frame is not None else []
        told: dict[str, list[int]] = {}
        for rank in others:
            key, text = f"{_PREFIX}{rank}", "not waited so long for anything of this kind"
            if store.check([key]):
                text = f"last waited so long for {store.get(key).decode()}"
            told.setdefault(text, []).append(rank)
        lines += [f"{_have(ranks)} {text}" for text, ranks in told.items()]
        lines.append(
            "A rank that only takes longer will come. If ranks take different ways, "
            '"verify": {"collectives": true} (or DS_VERIFY=collectives) raises on all of them '
            "where they part. verify.lone_gather_report says after how many seconds this is written"
        )
        logger.error("%s", "\n".join(lines))


def _event() -> Event | None:
    """Record an event behind what the current stream was given; None where the host waits."""
    accelerator = get_accelerator()
    if accelerator.resolves_data_dependency():
        return None
    event: Event = accelerator.Event()
    event.record(accelerator.current_stream())
    return event


def _has_passed(event: Event | None) -> bool:
    return event is None or get_accelerator().has_passed(event)


def _have(ranks: list[int]) -> str:
    names = ", ".join(map(str, ranks))
    return f"rank {names} has" if len(ranks) == 1 else f"ranks {names} have"


def _has_come(store: Any, rank: int, meeting: int) -> bool:
    key = f"{_PREFIX}met/{rank}"
    return meeting > 0 and store.check([key]) and int(store.get(key)) >= meeting


watch = LoneWaits()

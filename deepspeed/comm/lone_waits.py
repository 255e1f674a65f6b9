"""Operations that this rank waits for and that other ranks do not join, reported while it waits.

For code in which ranks may take different ways. Whoever waits says for what, in words; when that
lasts longer than `report_s`, a thread writes it to the log, once, with where the program is and
what the other ranks say that they wait for, which they leave in the process group's store. Nothing
is ended: a rank may only be slow. A wait that is over in time costs two assignments.

What a device waits for is told by events: the host goes on, and the oldest operation that is not
complete is the one that is reported.

`stuck_ranks` is no twin of this. It knows every operation of the simulated device, which rank has
begun its part and what stands in front of it, so it can prove that ranks wait for each other for
ever, and raises then. On a real device nobody knows that: here is only time, which proves nothing,
so this logs, for the operations that say so, on every device.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from deepspeed.accelerator.call_stacks import capture, describe
from deepspeed.comm import process_groups
from deepspeed.utils.logging import logger

DEFAULT_REPORT_S = 60.0
# Operations of a device that are remembered; those that come later are behind them anyway.
_MAX_ON_DEVICE = 64
# After a report is posted in the store: what the other ranks post about the same moment.
_SETTLE_S = 0.5
_PREFIX = "deepspeed_lone/"
# Of a report, which is written once: a gather that has yet to connect is ten calls below the
# program's own line.
_MAX_FRAMES = 20


class _Wait(NamedTuple):
    """What is waited for, since when, by which thread, and whether it is complete."""

    what: Callable[[], str]
    since: float
    thread: int
    is_done: Callable[[], bool]


class LoneWaits:
    """See module.

    Attributes:
        report_s: After how many seconds a wait is reported; 0: never.
    """

    def __init__(self) -> None:
        self.report_s = DEFAULT_REPORT_S
        self._on_host: _Wait | None = None
        self._on_device: deque[_Wait] = deque()
        self._thread: threading.Thread | None = None

    @contextmanager
    def waiting(self, what: Callable[[], str]) -> Iterator[None]:
        """Within it this thread waits for other ranks."""
        self._watch()
        self._on_host = _Wait(what, time.monotonic(), threading.get_ident(), lambda: False)
        try:
            yield
        finally:
            self._on_host = None

    def issued(self, what: Callable[[], str], is_done: Callable[[], bool]) -> None:
        """A device will wait for other ranks until `is_done()`."""
        self._watch()
        self._prune()
        if len(self._on_device) < _MAX_ON_DEVICE:
            wait = _Wait(what, time.monotonic(), threading.get_ident(), is_done)
            self._on_device.append(wait)

    def _prune(self) -> None:
        while self._on_device and self._on_device[0].is_done():
            self._on_device.popleft()

    def _watch(self) -> None:
        if self.report_s > 0 and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._look, name="lone waits", daemon=True)
            self._thread.start()

    def _look(self) -> None:
        reported: _Wait | None = None
        while self.report_s > 0:
            time.sleep(min(self.report_s / 4, 1.0))
            wait = self._oldest()
            if wait is None or wait is reported or wait.is_done():
                continue
            if time.monotonic() - wait.since > self.report_s:
                reported = wait
                # The store ends with the process that hosts it.
                with suppress(RuntimeError):
                    self._report(wait)

    def _oldest(self) -> _Wait | None:
        with suppress(IndexError):  # the program's thread may just have taken it out
            return self._on_host or self._on_device[0]
        return None

    def _report(self, wait: _Wait) -> None:
        own, store = process_groups.get_rank(), process_groups.get_store()
        store.set(f"{_PREFIX}{own}", wait.what())
        time.sleep(_SETTLE_S)
        frame = sys._current_frames().get(wait.thread)
        lines = [
            f"rank {own} has waited {time.monotonic() - wait.since:.0f} s for {wait.what()}, which "
            "not all ranks have joined. Its program is at"
        ]
        lines += describe(capture(_MAX_FRAMES, frame), "    ") if frame is not None else []
        for rank in range(process_groups.get_world_size()):
            key = f"{_PREFIX}{rank}"
            if rank != own and store.check([key]):
                lines.append(f"rank {rank} has last waited so long for {store.get(key).decode()}")
            elif rank != own:
                lines.append(f"rank {rank} has not waited so long for anything of this kind")
        lines.append(
            'If ranks take different ways, "verify": {"collectives": true} (or DS_VERIFY='
            "collectives) raises on all of them where they part. verify.lone_gather_report says "
            "after how many seconds this is written"
        )
        logger.error("%s", "\n".join(lines))


watch = LoneWaits()

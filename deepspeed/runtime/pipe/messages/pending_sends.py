"""Messages on their way out: kept alive until they have left, and no longer.

On devices a handle tells whether it is complete. gloo's handles don't: only waiting for one tells,
and waiting in `send` could close a circle of ranks that wait for each other. So when much is on its
way over gloo, a thread waits in its place.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

# Less than this is held until the end of the batch; more is worth a thread.
HELD_BYTES = 8 * 1024 * 1024
HELD_TRANSFERS = 256


class _Transfer(NamedTuple):
    work: Any
    memory: torch.Tensor


class PendingSends:
    """The transfers that one channel has begun.

    Args:
        polls: Whether handles of this backend tell when they are complete.
        wait: Waits for a handle.

    Attributes:
        num_bytes: Memory held here for transfers that are not known to be complete, without what
            the thread waits for.
    """

    def __init__(self, polls: bool, wait: Callable[[Any], None]) -> None:
        self._polls = polls
        self._wait = wait
        self._begun: deque[_Transfer] = deque()
        self._waiter: _Waiter | None = None
        self.num_bytes = 0

    def add(self, work: Any, memory: torch.Tensor) -> None:
        """Hold `memory` (bytes) until `work` is complete."""
        self._begun.append(_Transfer(work, memory))
        self.num_bytes += memory.numel()
        if self._polls:
            while self._begun and self._begun[0].work.is_completed():
                self._let_go()
        elif (
            self._waiter is not None
            or self.num_bytes > HELD_BYTES
            or len(self._begun) > HELD_TRANSFERS
        ):
            self._hand_over()

    def finish(self) -> None:
        """Return when all transfers are complete: on a device, when the current stream waits for
        them.
        """
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter.finish()
        while self._begun:
            self._wait(self._begun[0].work)
            self._let_go()

    def _let_go(self) -> None:
        self.num_bytes -= self._begun.popleft().memory.numel()

    def _hand_over(self) -> None:
        if self._waiter is None:
            self._waiter = _Waiter()
        while self._begun:
            self._waiter.transfers.put(self._begun[0])
            self._let_go()


class _Waiter:
    """Waits for handles in the order of issue, in a thread, until `finish`."""

    def __init__(self) -> None:
        self.transfers: SimpleQueue[_Transfer | None] = SimpleQueue()
        self._error: Exception | None = None
        # A daemon: in a process that fails, it may wait for a rank that never comes.
        self._thread = threading.Thread(target=self._run, name="pipeline sends", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Return when all are complete; raise if one of them failed."""
        self.transfers.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        transfer = self.transfers.get()
        while transfer is not None:
            try:
                transfer.work.wait()
            except Exception as error:
                # Whatever ends the wait is for the caller of `finish`; the others are let go too.
                self._error = self._error or error
            # Not held while waiting for the next.
            transfer = None
            transfer = self.transfers.get()

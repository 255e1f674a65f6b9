"""A checkpoint that is written while training goes on: the thread, how ranks tell each other, and
when an error is raised.

Threads call no collectives, whose order is the training's. They meet in the store in which the
ranks of the world met, by a connection of their own:

1. Each rank's thread writes its files, then sets `written/R` to its error, or to nothing.
2. Rank 0's waits for all of these and sets `all_written`, which all wait for.
3. Each publisher's thread publishes (if any rank failed, removes) the folder, sets `published/R`.
4. Rank 0's waits for these and sets `all_published`, which all wait for: they know the outcome.
5. The others set `heard/R`; rank 0's, whose process may be the store, ends when all have.

The step that waits for the copy shall not bear the writing too: the thread starts with the first
backward of the next step, in which training leaves it the interpreter, or else after `_START_S`.

So a checkpoint is published though no step follows. After each step of a run with a save in flight,
one small collective tells whether the threads of all ranks have ended; only then does any rank
forget the save or raise its error, all at the same step. A host that runs ahead of its device reads
the answer after the next step, and does not wait for it. Who waits for a save repeats that
collective: of a rank that has died it raises at once, and the thread gives up with it. Where nobody
calls a collective any more (the engine ends, the interpreter exits) a dead rank shows by its
heartbeat: a rank with a save in flight counts in the store every `_HEARTBEAT_S`, however long its
disk takes, and is given up when it has been silent for `SILENCE_S`.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from deepspeed import comm as dist
from deepspeed.accelerator import runs_ahead
from deepspeed.checkpoint.files import CheckpointError
from deepspeed.comm.process_groups import own_connection
from deepspeed.comm.watch import lone_waits
from deepspeed.runtime.checkpointing.folders import Put
from deepspeed.runtime.checkpointing.save_job import SaveJob
from deepspeed.runtime.streams import LateNumber
from deepspeed.utils.logging import logger

WAIT_S = 1800.0  # for another rank's files or its disk: as long as torch waits for a collective
SILENCE_S = 30.0
PART_S = 10.0  # for the others to hear the outcome
_HEARTBEAT_S = 2.0
_LAST_BEAT_S = 5.0  # to be under way after the end; a store that is out of reach is not waited for
_NICENESS = 19  # of the thread
_START_S = 1.0  # after which it starts without a backward
# How far the rank is that is least far.
_NOT_ENDED, _FAILED, _ALL_WELL = range(3)
_POLL_S = (0.005, 0.1)  # first and longest pause between two looks into the store

in_flight: list[BackgroundSave] = []  # of all engines of the process, in the order of their start
_numbers = itertools.count()  # the same on all ranks, which start the same saves


class BackgroundSave:
    """One save in flight; `fill`, called in the thread, gives a copy. All ranks start together."""

    def __init__(
        self, job: SaveJob, description: Mapping[str, Any], fill: Callable[[Put], None]
    ) -> None:
        self.job = job
        self._description = description
        self._fill = fill
        # The client may destroy the process group while the threads run.
        self._store = dist.get_store()
        self._prefix = f"deepspeed/save/{next(_numbers)}"
        self._ranks = range(dist.get_world_size())
        self._error: str | None = None
        self._answer = LateNumber()
        self._is_asked = False  # whether the answer of a step has not been read yet
        self._is_peer_lost = False
        self._is_first_step = True  # the one that has waited for the copy
        self._may_start, self._ended = threading.Event(), threading.Event()
        self._beating = threading.Thread(
            target=self._beat, name=f"heartbeat of {job.info.tag}", daemon=True
        )
        if len(self._ranks) > 1:
            self._beating.start()
        # Not a daemon: an interpreter that exits waits for it, so a run's last save is published.
        self._thread = threading.Thread(target=self._run, name=f"save {job.info.tag}")
        in_flight.append(self)
        self._thread.start()

    def on_backward(self) -> None:
        if not self._is_first_step:
            self.start()

    def start(self) -> None:
        """Begin to write, if the thread has not begun."""
        self._may_start.set()

    def settle(self, device: torch.device, wait: bool) -> bool:
        """Whether the save has ended on all ranks, which raise together. All ranks call it."""
        if self not in in_flight:
            return True  # all ranks have settled it when another engine saved or loaded
        while (answer := self._ask(device, wait)) == _NOT_ENDED:
            if not wait:
                self._is_first_step = False
                return False
            self.start()
            self._thread.join(_POLL_S[1])
        in_flight.remove(self)
        if answer != _ALL_WELL:
            raise CheckpointError(
                self._error
                or f"{self._what} failed: another rank has lost the connection to the others"
            )
        return True

    def _ask(self, device: torch.device, wait: bool) -> float:
        """Ask all ranks how far they are; the answer is that of the step before, unless `wait`."""
        if self._is_asked:
            self._is_asked = False
            if (answer := self._answer.read()) != _NOT_ENDED:
                return answer
        own = _NOT_ENDED
        if not self._thread.is_alive():
            own = _ALL_WELL if self._error is None else _FAILED
        # Filled where it is: numbers of the host would be copied, which waits.
        least = torch.full((), own, dtype=torch.int32, device=device)
        if dist.get_world_size() > 1:
            try:
                with lone_waits.watch.waiting(lambda: self._what):
                    dist.all_reduce(least, op=dist.ReduceOp.MIN)
            except RuntimeError:
                self._is_peer_lost = True
                raise
        self._answer.post(least)
        self._is_asked = not wait and runs_ahead(least)
        return _NOT_ENDED if self._is_asked else self._answer.read()

    def join(self) -> None:
        """Wait until this rank knows the outcome; a failure is logged now, raised by `settle`."""
        self.start()
        self._thread.join()
        if self._error is not None:
            logger.error(self._error)

    @property
    def _what(self) -> str:
        return f"saving {self.job.info.tag} in the background"

    # In the thread

    def _run(self) -> None:
        if sys.platform == "linux":  # elsewhere all threads of a process have one priority
            # Training goes first where both want a core. Only downwards: this needs no rights, and
            # the thread ends with the save.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        self._may_start.wait(_START_S)
        try:
            if len(self._ranks) > 1:
                self._store = own_connection(self._store)
            failure = self._attempt(lambda: self.job.write(self._description, self._fill))
            self._fill = _nothing  # the copy is free
            failed = self._agree("written", failure, self._ranks)
            failure = self._attempt(self.job.abandon if failed else self.job.publish)
            failed = failed or self._agree("published", failure, self.job.node.publishers)
            if failed:
                told = "; ".join(
                    f"rank {rank}: {reason}"
                    for rank, reason in sorted(failed.items(), key=lambda item: int(item[0]))
                )
                self._error = f"{self._what} failed. {told}"
            self._part()
        except Exception as error:  # the connection is lost, or a rank does not answer
            self._error = f"{self._what} failed. {type(error).__name__}: {error}"
        finally:
            self._ended.set()
            # See [Note: threads at exit] of `deepspeed.comm.watch.lookout`.
            if self._beating.is_alive():
                self._beating.join(_LAST_BEAT_S)
        if self._error is not None and not threading.main_thread().is_alive():
            logger.error(self._error)  # nobody is left to raise it

    @staticmethod
    def _attempt(action: Callable[[], None]) -> str:
        try:
            action()
        except Exception as error:  # whatever it is, the other ranks must hear of it
            return f"{type(error).__name__}: {error}"
        return ""

    def _agree(self, phase: str, failure: str, ranks: Sequence[int]) -> dict[str, str]:
        """Rank -> its failure, of those of `ranks` that failed; the same on all ranks."""
        own = self.job.node.rank
        if len(self._ranks) == 1:
            return {str(own): failure} if failure else {}
        if own in ranks:
            self._store.set(f"{self._prefix}/{phase}/{own}", failure)
        if own == 0:
            told = {
                rank: self._get(f"{phase}/{rank}", rank, f"rank {rank} has not {phase} its files")
                for rank in ranks
            }
            self._store.set(
                f"{self._prefix}/all_{phase}",
                json.dumps({rank: reason for rank, reason in told.items() if reason}),
            )
        agreed: dict[str, str] = json.loads(
            self._get(f"all_{phase}", 0, f"rank 0 has not told whether all ranks have {phase}")
        )
        return agreed

    def _part(self) -> None:
        """Let rank 0, whose process may be the store, end after all others heard the outcome."""
        if self.job.node.rank > 0:
            self._store.set(f"{self._prefix}/heard/{self.job.node.rank}", "")
        elif not self._wait_for(
            [f"{self._prefix}/heard/{rank}" for rank in self._ranks if rank > 0], PART_S
        ):
            logger.warning(
                f"{self._what}: a rank has not asked for the outcome; it may have been killed"
            )

    def _get(self, name: str, rank: int, absent: str) -> str:
        key = f"{self._prefix}/{name}"
        if not self._wait_for([key], WAIT_S, rank):
            raise CheckpointError(f"{absent} in time; it may have been killed")
        value: bytes = self._store.get(key)
        return value.decode()

    def _wait_for(self, names: list[str], limit: float, rank: int | None = None) -> bool:
        """Whether all are in the store within `limit` seconds. Looks: who waits is busy."""
        start = heard = asked = time.monotonic()
        pause, heartbeat = _POLL_S[0], b""
        while names and not self._store.check(names):
            now = time.monotonic()
            # Asked no more often than it beats: this thread keeps training from the interpreter.
            if rank is not None and now - asked > _HEARTBEAT_S:
                asked = now
                if (latest := self._heartbeat_of(rank)) != heartbeat:
                    heartbeat, heard = latest, now
            if (
                self._is_peer_lost
                or now - start > limit
                or (rank is not None and now - heard > SILENCE_S)
            ):
                return False
            time.sleep(pause)
            pause = min(2 * pause, _POLL_S[1])
        return True

    def _heartbeat_of(self, rank: int) -> bytes:
        key = f"{self._prefix}/heartbeat/{rank}"
        return bytes(self._store.get(key)) if self._store.check([key]) else b""

    def _beat(self) -> None:
        """Count in the store, in a thread and by a connection of its own: the other may be busy."""
        store, key = None, f"{self._prefix}/heartbeat/{self.job.node.rank}"
        with suppress(Exception):  # the process that is the store has ended: nobody listens
            while not self._ended.wait(_HEARTBEAT_S):
                store = store or own_connection(self._store)
                store.add(key, 1)


def _nothing(put: Put) -> None: ...


def finish_saves(device: torch.device) -> None:
    """Wait for all saves of this process. All ranks call it, together."""
    while in_flight:
        in_flight[0].settle(device, wait=True)

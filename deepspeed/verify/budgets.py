"""Whether a program can hang because a device has few queues and few processors; how these run what
was issued is told in docs/checking-internals.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from deepspeed import comm as dist
from deepspeed.accelerator.sim.issue_log import (
    Communication,
    Entry,
    HostMeeting,
    HostWait,
    IssueLog,
    Kernel,
    StreamWait,
)
from deepspeed.accelerator.sim_accelerator import simulated_device
from deepspeed.comm.sim import stream_collectives
from deepspeed.comm.sim.stuck_ranks import HostWaitError

_SHOWN = 6
Key = tuple[str, int]
_Queued = Kernel | StreamWait | Communication


@dataclass(frozen=True)
class Budget:
    """The limits of one device."""

    queues: int = 8  # hardware queues (CUDA_DEVICE_MAX_CONNECTIONS); streams take them in turn
    processors: int = 132  # streaming multiprocessors
    per_collective: int = 32  # of them, what a kernel of a collective holds at most
    per_message: int = 4  # what one between two ranks holds; channels of pipelines ask for four

    def needs(self, entry: Communication) -> int:
        """Count the processors of a kernel."""
        wanted = self.per_message if entry.is_message else self.per_collective
        return min(wanted, self.processors)


@dataclass
class RankLog:
    """What one rank issued."""

    entries: Sequence[Entry]  # in the order of issue
    names: Sequence[str]  # of the streams
    # How many operations of each kind it had issued when the log began and ended.
    before: dict[str, int]
    after: dict[str, int]

    def has(self, key: Key) -> bool:
        """Tell whether a part is in the log; others are no matter of it."""
        kind, number = key
        return self.before.get(kind, 0) <= number < self.after.get(kind, 0)


class BudgetError(HostWaitError):
    """A device of these limits can hang in what was issued."""


class _Device:
    """One rank's host and device."""

    def __init__(self, log: RankLog, budget: Budget) -> None:
        self._log = log
        self._budget = budget
        self._next = 0
        # With the place in the order of issue.
        self._queues: list[deque[tuple[int, _Queued]]] = [deque() for _ in range(budget.queues)]
        # Of each stream, the positions of what is not over.
        self._open: dict[int, deque[int]] = {}
        self.running: list[Communication] = []
        self.free = budget.processors
        self._begun: set[Key] = set()

    def has_begun(self, key: Key) -> bool:
        """Tell whether this rank's part of an operation is there."""
        return key in self._begun or not self._log.has(key)

    @property
    def is_over(self) -> bool:
        """Whether nothing is left."""
        return not (self._next < len(self._log.entries) or any(self._queues) or self.running)

    def _is_over(self, stream: int, until: int) -> bool:
        positions = self._open.get(stream)
        return not positions or positions[0] > until

    # One move each; False: there is none

    def issue(self, devices: Sequence[_Device]) -> bool:
        """Let the host go on to where it waits."""
        start = self._next
        entries = self._log.entries
        while self._next < len(entries):
            entry = entries[self._next]
            if isinstance(entry, HostWait):
                if not self._is_over(entry.stream, entry.until):
                    break
            elif isinstance(entry, HostMeeting):
                self._begun.add(entry.own)
                if _missing(entry, devices):
                    break
            else:
                self._queues[entry.stream % len(self._queues)].append((self._next, entry))
                self._open.setdefault(entry.stream, deque()).append(entry.position)
            self._next += 1
        return self._next > start

    def begin(self) -> bool:
        """Begin what can begin."""
        moved = False
        while ready := [one for one in self._queues if one and not self._obstacle(one[0][1])]:
            entry = min(ready, key=lambda queue: queue[0][0]).popleft()[1]
            if isinstance(entry, Communication):
                self.running.append(entry)
                self._begun.add(entry.own)
                self.free -= self._budget.needs(entry)
            else:
                self._open[entry.stream].popleft()
            moved = True
        return moved

    def _obstacle(self, entry: _Queued) -> str:
        """Say why an entry at the head of its queue does not begin; empty if it does."""
        if any(other.stream == entry.stream for other in self.running):
            return "what is before it in its stream is not over"
        if isinstance(entry, StreamWait):
            over = self._is_over(entry.other, entry.until)
            return "" if over else "its stream waits for another"
        needed = self._budget.needs(entry) if isinstance(entry, Communication) else 1
        if self.free >= needed:
            return ""
        return "no processor is free" if not self.free else f"{needed} processors are not free"

    def end(self, devices: Sequence[_Device]) -> bool:
        """End operations whose parts are all there."""
        over = [entry for entry in self.running if not _missing(entry, devices)]
        for entry in over:
            self.running.remove(entry)
            self.free += self._budget.needs(entry)
            self._open[entry.stream].popleft()
        return bool(over)

    # Messages

    def report(self, rank: int, devices: Sequence[_Device]) -> str:
        """Say what holds this rank up."""
        total = self._budget.processors
        lines = [f"  rank {rank}: {total - self.free} of {total} processors are held"]
        for entry in self.running[:_SHOWN]:
            ranks = ", ".join(map(str, _missing(entry, devices))) or "nobody"
            lines.append(f"    by {entry.name}, which waits for rank(s) {ranks}, issued at")
            lines.append(entry.place)
        lines += [self._waiting(queue) for queue in self._queues if queue][:_SHOWN]
        if self._next < len(self._log.entries):
            host = self._log.entries[self._next]
            if isinstance(host, (HostWait, HostMeeting)):
                lines.append(f"    its host waits at\n{host.place}")
        return "\n".join(line for line in lines if line)

    def _waiting(self, queue: deque[tuple[int, _Queued]]) -> str:
        """Say what of a queue does not begin, and why; empty if computation waits."""
        (_, head), name = queue[0], self._log.names
        reason = self._obstacle(head)
        first = next((entry for _, entry in queue if isinstance(entry, Communication)), None)
        if isinstance(head, Kernel):
            return f"    computation of {name[head.stream]} has not begun: {reason}"
        if first is None:
            return ""
        if first.stream != head.stream:
            reason = f"{name[head.stream]} stands before it in its queue, and there {reason}"
        return f"    {first.name} has not begun: {reason}. It was issued at\n{first.place}"


def _missing(entry: Communication | HostMeeting, devices: Sequence[_Device]) -> list[int]:
    """List the ranks whose part of an operation is not there."""
    return [rank for rank, key in entry.others if not devices[rank].has_begun(key)]


def deadlock(logs: Sequence[RankLog], budget: Budget) -> str:
    """Tell how devices of these limits hang in what was issued; empty if they do not."""
    devices = [_Device(log, budget) for log in logs]
    while True:
        moves = [device.issue(devices) | device.begin() for device in devices]
        if not any(moves) and not any([device.end(devices) for device in devices]):
            break
    stuck = [rank for rank, device in enumerate(devices) if not device.is_over]
    return "\n".join(devices[rank].report(rank, devices) for rank in stuck)


@contextmanager
def check_budgets(*budgets: Budget) -> Iterator[None]:
    """Log what is issued to the simulated device within the block, and run it at the end on devices
    of these limits. Collective: every rank of the world leaves it, or none does.

    Args:
        budgets: The limits, one device each; none: those of `Budget`.

    Raises:
        BudgetError: One of the devices can hang; on all ranks alike.
        RuntimeError: The accelerator is no simulated device.
    """
    scheduler = simulated_device("check_budgets").simulator.scheduler
    before = stream_collectives.num_issued()
    log = scheduler.log = IssueLog()
    try:
        yield
    finally:
        scheduler.log = None
    own = RankLog(log.entries, log.names, before, stream_collectives.num_issued())
    found = _first_deadlock(own, budgets or (Budget(),))
    if found:
        raise BudgetError(found)


def _first_deadlock(own: RankLog, budgets: Sequence[Budget]) -> str:
    """Find what to raise on all ranks; empty if there is nothing. One rank finds out for all."""
    logs, told = [own], [""]
    if dist.is_initialized():
        logs *= dist.get_world_size()
        dist.all_gather_object(logs, own)
    if not dist.is_initialized() or dist.get_rank() == 0:
        told = [next(filter(None, (_message(logs, budget) for budget in budgets)), "")]
    if dist.is_initialized():
        dist.broadcast_object_list(told, src=0)
    return told[0]


def _message(logs: Sequence[RankLog], budget: Budget) -> str:
    found = deadlock(logs, budget)
    return found and (
        f"a device with {budget.queues} hardware queues and {budget.processors} processors, of "
        f"which a message takes {budget.per_message} and a collective {budget.per_collective}, "
        f"can hang here:\n{found}\nPost fewer receives ahead of need, on fewer streams, and only "
        "when all that they depend on has been issued"
    )

"""Streams, events, and the order in which deferred work runs.

[Note: as late as possible]
A stream is a first-in first-out queue. Nothing runs when it is issued; something runs when the host
waits for it, and then only what the queue order and the waits between queues put before it. So a
producer that a consumer doesn't wait for has not run when the consumer does: the result is wrong,
each time. Schedules other than 0 run some ready work early, chosen by the seed, because a write
that comes too early is an error too.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from deepspeed.accelerator.sim.issue_log import IssueLog
from deepspeed.accelerator.stream_trace import StreamTracer

# Real devices hold about a thousand launches; a program that never waits may not use memory without
# limit here either.
MAX_QUEUED = 50_000
# How often a schedule other than 0 runs something early, and how much at most.
EXPLORE_PROBABILITY = 0.25
EXPLORE_RUN = 8


class Work(NamedTuple):
    """One operator in a queue; `waits_for_ranks`: other ranks may have to do something first."""

    operator: str
    run: Callable[[], None]
    waits_for_ranks: bool = False


class Wait(NamedTuple):
    """What stands behind it in a queue runs after the first `position` entries of `stream`."""

    stream: Stream
    position: int

    @property
    def passed(self) -> bool:
        return self.stream.done >= self.position


class Stream:
    """A queue of work with the interface of a device's stream; `issued` entries were put into it so
    far, and `done` of them have run. Each simulation makes a subclass with its `scheduler`.
    """

    scheduler: Scheduler

    def __init__(self, device: object = None, priority: int = 0, name: str | None = None) -> None:
        self.device = device
        self.priority = priority
        self.queue: deque[Work | Wait] = deque()
        self.issued = 0
        self.done = 0
        self.name = self.scheduler.register(self, name)
        self._outer: list[Stream] = []

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def wait_event(self, event: Event) -> None:
        if event.stream is None:
            return
        self.scheduler.trace(lambda tracer: tracer.event_waited(event, self))
        if event.stream is self:
            return
        if event.stream.done < event.position or self.scheduler.log is not None:
            self.scheduler.put(self, Wait(event.stream, event.position))

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        """Whether all work has run. Runs nothing itself: on a slow device the answer is no."""
        self.scheduler.refuse_while_capturing("stream.query")
        if self.done < self.issued:
            return False
        self.scheduler.trace(lambda tracer: tracer.stream_synchronized(self))
        return True

    def synchronize(self) -> None:
        self.scheduler.on_host_wait("stream.synchronize")
        self.scheduler.complete(self)

    def __enter__(self) -> Stream:
        self._outer.append(self.scheduler.current)
        self.scheduler.switch(self)
        return self

    def __exit__(self, *error: object) -> None:
        self.scheduler.switch(self._outer.pop())


class Event:
    """A position in a stream, as a device's event. Times are the host's at `record`."""

    _count = 0

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        Event._count += 1
        self.name = f"event {Event._count}"
        self.enable_timing = enable_timing
        self.blocking = blocking
        self.interprocess = interprocess
        self.stream: Stream | None = None
        self.position = 0
        self._recorded_at = 0.0

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or active_scheduler().current
        self.position = self.stream.issued
        self._recorded_at = time.perf_counter()
        recorded = self.stream
        recorded.scheduler.trace(lambda tracer: tracer.event_recorded(self, recorded))

    def wait(self, stream: Stream | None = None) -> None:
        (stream or active_scheduler().current).wait_event(self)

    def query(self) -> bool:
        """Whether the work has run; True if never recorded. Runs nothing itself."""
        has_passed = self.has_passed()
        if has_passed and self.stream is not None:
            # A host that has seen this knows as much as one that waited.
            self.stream.scheduler.trace(lambda tracer: tracer.event_synchronized(self))
        return has_passed

    def has_passed(self) -> bool:
        if self.stream is None:
            return True
        self.stream.scheduler.refuse_while_capturing("event.query")
        return self.stream.done >= self.position

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.scheduler.on_host_wait("event.synchronize")
            self.stream.scheduler.note_host_wait(self.stream, self.position)
            self.stream.scheduler.trace(lambda tracer: tracer.event_synchronized(self))
            self.stream.scheduler.drain(self.stream, self.position)

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds of host time from this event's record to that of `end_event`."""
        if self.stream is None or end_event.stream is None:
            raise RuntimeError("elapsed_time needs two recorded events; call record() on both")
        return (end_event._recorded_at - self._recorded_at) * 1e3


_active: list[Scheduler] = []


def active_scheduler() -> Scheduler:
    """The scheduler of the simulated device in use; RuntimeError if there is none."""
    if not _active:
        raise RuntimeError(
            "no simulated device is in use; set DS_ACCELERATOR=sim or enter "
            "deepspeed.accelerator.sim_accelerator.simulate()"
        )
    return _active[-1]


class Scheduler:
    """All streams of one simulated device and the one place that runs their work.

    `schedule` 0 runs everything as late as possible; every other number is another order that the
    program allows, chosen with `seed`. While `is_summing`, what is issued is autograd's sum of
    gradients of several streams, which keeps their memory until it was read. `on_host_wait` is
    called before the host waits, with by what; `on_device_wait` before it waits for the whole
    device, and may refuse.
    """

    def __init__(self, seed: int = 0, schedule: int = 0) -> None:
        self._random = random.Random(f"{seed}/{schedule}")
        self.schedule = schedule
        self.tracer: StreamTracer | None = None
        self.log: IssueLog | None = None
        self.on_switch: Callable[[Stream], None] = lambda stream: None
        self.on_host_wait: Callable[[str], None] = lambda kind: None
        self.on_device_wait: Callable[[], None] = lambda: None
        self.streams: list[Stream] = []
        self.stream_class: type[Stream] = type("Stream", (Stream,), {"scheduler": self})
        self.default: Stream = self.stream_class(name="default stream")
        self.current: Stream = self.default
        self.is_summing = False
        self.capturing: int | None = None  # which thread captures what it issues to a graph
        self.threads = {threading.get_ident()}  # that have said which device is theirs
        self._running = False
        self._in_progress: list[tuple[Stream, int]] = []

    def register(self, stream: Stream, name: str | None) -> str:
        self.streams.append(stream)
        return f"stream {len(self.streams) - 1}" if name is None else name

    def activate(self) -> None:
        _active.append(self)

    def deactivate(self) -> None:
        _active.remove(self)

    def switch(self, stream: Stream) -> None:
        self.current = stream
        self.on_switch(stream)

    def trace(self, tell: Callable[[StreamTracer], None]) -> None:
        if self.tracer is not None:
            tell(self.tracer)

    def refuse_while_capturing(self, what: str) -> None:
        """Raise, in any thread, while one captures: a device fails both then. Raise in a thread
        that has not said which device is its own: it would ask the first one.
        """
        if threading.get_ident() not in self.threads:
            name = threading.current_thread().name
            raise RuntimeError(
                f"{what} in thread {name}, whose device is the first one until it says otherwise: "
                "let the thread that issues ask, or call get_accelerator().set_device there before"
            )
        if self.capturing is not None and not self._running:
            raise RuntimeError(
                f"{what} in thread {threading.get_ident()} while thread {self.capturing} captures "
                "a graph, which is lost on a device: ask and wait before or after it"
            )

    def note_host_wait(self, stream: Stream, position: int) -> None:
        self.refuse_while_capturing("a wait for the device")
        if self.log is not None and not self._running:
            self.log.host_wait(stream, position)

    @contextmanager
    def unlogged(self) -> Iterator[IssueLog | None]:
        """Within it nothing is logged; whoever enters logs what it stands for."""
        log, self.log = self.log, None
        try:
            yield log
        finally:
            self.log = log

    # Issuing

    def put(self, stream: Stream, entry: Work | Wait) -> int:
        """Append to a queue; gives the position after it."""
        stream.queue.append(entry)
        stream.issued += 1
        position = stream.issued
        if self.log is not None and not self._running:
            if isinstance(entry, Wait):
                self.log.stream_wait(stream, position, entry.stream, entry.position)
            else:
                self.log.kernel(stream, position)
        if len(stream.queue) > MAX_QUEUED:
            self.drain(stream, stream.done + MAX_QUEUED // 2)
        if self.schedule and not self._running and self._random.random() < EXPLORE_PROBABILITY:
            self._explore()
        return position

    def _explore(self) -> None:
        # With all that it waits for and nothing else: a reader that forgot to wait then runs before
        # the write.
        stream = self._random.choice(self.streams)
        position = min(stream.issued, stream.done + self._random.randint(1, EXPLORE_RUN))
        if self.can_run(stream, position):
            self.drain(stream, position)

    # Running

    @property
    def is_running(self) -> bool:
        """Whether this is called by work that runs, and not by the program."""
        return self._running

    def synchronize(self, kind: str = "device synchronize") -> None:
        """Let the host wait for all work of all streams; `kind` says what makes it wait."""
        self.on_host_wait(kind)
        self.complete_all()

    def complete(self, stream: Stream) -> None:
        """Run all work of a stream: what the host learns by waiting, uncounted."""
        self.trace(lambda tracer: tracer.stream_synchronized(stream))
        self.note_host_wait(stream, stream.issued)
        self.drain(stream)

    def complete_all(self) -> None:
        self.trace(lambda tracer: tracer.device_synchronized())
        for stream in self.streams:
            self.note_host_wait(stream, stream.issued)
        for stream in self.streams:
            self.drain(stream)

    def drain(self, stream: Stream, position: int | None = None) -> None:
        """Run the first `position` entries of `stream` (all by default) and what they wait for."""
        end = stream.issued if position is None else position
        if stream.done >= end:
            return
        with self._executing():
            # An explicit stack: chains of waits between two streams are as long as a training step.
            goals = [(stream, end)]
            while goals:
                current, until = goals[-1]
                if current.done >= until:
                    goals.pop()
                elif not self._step(current):
                    goals.append(self._last_obstacle(current, until))

    def _last_obstacle(self, stream: Stream, until: int) -> tuple[Stream, int]:
        """The last of all that `stream` waits for up to there.

        Work behind a wait can't run, but what it will wait for can. Running that first lets a
        consumer (a reduction, waited for at the end) run before a producer that it should have
        waited for itself, and that somebody else waits for anyway.
        """
        entries = list(islice(stream.queue, until - stream.done))
        last = next(one for one in reversed(entries) if isinstance(one, Wait) and not one.passed)
        return last.stream, last.position

    def can_run(self, stream: Stream, position: int) -> bool:
        """Whether the first `position` entries can run without waiting for other ranks."""
        goals, seen = [(stream, position)], set()
        while goals:
            current, until = goals.pop()
            if any(busy is current and place <= until for busy, place in self._in_progress):
                return False
            for entry in islice(current.queue, max(0, until - current.done)):
                if isinstance(entry, Work):
                    if entry.waits_for_ranks:
                        return False
                elif entry not in seen:
                    seen.add(entry)
                    goals.append((entry.stream, entry.position))
        return True

    def _step(self, stream: Stream) -> bool:
        """Run the head of a queue; False if it is a wait that holds up."""
        head = stream.queue[0]
        if isinstance(head, Wait):
            if not head.passed:
                return False
            stream.queue.popleft()
            stream.done += 1
            return True
        # Removed first: work that fails is not run again, and work that looks at its own stream
        # finds itself done.
        stream.queue.popleft()
        stream.done += 1
        self._in_progress.append((stream, stream.done))
        try:
            head.run()
        except Exception as error:
            raise RuntimeError(f"{head.operator}, issued on {stream} before: {error}") from error
        finally:
            self._in_progress.pop()
        return True

    @property
    def _autocast(self) -> Any:
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
        return torch._C._ExcludeDispatchKeyGuard(keys)

    @contextmanager
    def _executing(self) -> Iterator[None]:
        """Run work as it was issued: below autograd, autocast and modes entered since."""
        outer, self._running = self._running, True
        try:
            with _disable_current_modes(), torch.no_grad(), self._autocast:
                yield
        finally:
            self._running = outer

"""Happens-before over streams: vector clocks for streams, events and the host, and what they leave
unordered.

Pure: no torch, no device. `StreamChecker` is a `StreamTracer`; a device tells it what the host
issues, in the host's order. What it takes for a race is told in docs/checking-internals.md.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Concatenate, NamedTuple, ParamSpec

from deepspeed.accelerator.call_stacks import Stack, capture
from deepspeed.accelerator.stream_trace import Access, HostLane
from deepspeed.verify.streams.accesses import AccessMap, IsOrdered, Launch, Use
from deepspeed.verify.streams.findings import ALLOCATION, Finding, Kind, StreamRaceError, report

Clock = dict[Hashable, int]  # stream -> position up to which (inclusive) its work is ordered before

SWEEP_INTERVAL = 8192  # launches between two sweeps that drop what the host has long waited for


class _Host:
    """Stands for the host where a stream is expected."""

    def __repr__(self) -> str:
        return "the host"


HOST = _Host()


def join(clock: Clock, other: Clock) -> None:
    """Let `clock` be the later of both, for every stream."""
    for stream, position in other.items():
        if clock.get(stream, 0) < position:
            clock[stream] = position


def ordered_before(clock: Clock) -> IsOrdered:
    """Make the test whether a launch is ordered before everything that `clock` stands for."""
    return lambda launch: launch.position <= clock.get(launch.stream, 0)


@dataclass(slots=True)
class _Memory:
    """One life of one storage; `stream` is None for memory that is older than the trace."""

    stream: Hashable | None = None
    is_shared: bool = False
    accesses: AccessMap = field(default_factory=AccessMap)
    recorded: set[Hashable] = field(default_factory=set)


class _Freed(NamedTuple):
    """Freed memory with uses that its allocation stream has not waited for."""

    uses: list[Use]
    freed_at: Stack


class _EventClocks:
    """What each event stands for; weakly kept, where the event allows it."""

    def __init__(self) -> None:
        self._weak: weakref.WeakKeyDictionary[Hashable, Clock] = weakref.WeakKeyDictionary()
        self._strong: dict[Hashable, Clock] = {}

    def set(self, event: Hashable, clock: Clock) -> None:
        try:
            self._weak[event] = clock
        except TypeError:
            self._strong[event] = clock

    def get(self, event: Hashable) -> Clock | None:
        try:
            return self._weak.get(event)
        except TypeError:
            return self._strong.get(event)


Arguments = ParamSpec("Arguments")


def _told(
    hear: Callable[Concatenate[StreamChecker, Arguments], None],
) -> Callable[Concatenate[StreamChecker, Arguments], None]:
    """Let a method of `StreamTracer` be run by one thread at a time, after the frees before it."""

    @functools.wraps(hear)
    def heard(self: StreamChecker, *args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        with self._lock:
            if self._dying:
                self._settle_frees()
            hear(self, *args, **kwargs)

    return heard


class StreamChecker:
    """Finds unordered accesses in what a device reports to its `StreamTracer`.

    Args:
        name_of: Names the memory at an address, for reports; None if it has no name.
    """

    def __init__(self, name_of: Callable[[int], str | None] = lambda address: None) -> None:
        # What was found so far; the same two places in the code are one finding with a count.
        self.findings: list[Finding] = []
        self._name_of = name_of
        self._by_places: dict[Hashable, Finding] = {}
        self._host: Clock = {}
        self._clocks: dict[Hashable, Clock] = {}
        self._caught_up: set[Hashable] = set()  # streams whose clock has all that the host knows
        self._events = _EventClocks()
        self._memory: dict[int, _Memory] = {}
        self._freed: dict[Hashable, list[_Freed]] = {}
        self._launches = 0
        # Memory dies whenever Python drops a reference or collects garbage, so also in the midst of
        # this class's own work; frees are noted here and take effect before whatever the device
        # reports next, which is the order in which they happened.
        self._dying: deque[tuple[int, Stack]] = deque()
        # Autograd's device threads report too.
        self._lock = threading.RLock()

    # What was found

    def report(self) -> str:
        """Tell all findings in words."""
        return report(self.findings)

    def raise_findings(self) -> None:
        """Raise StreamRaceError of what was found since the last call, if anything."""
        with self._lock:
            findings, self.findings, self._by_places = self.findings, [], {}
        if findings:
            raise StreamRaceError(findings)

    def _found(self, finding: Finding) -> None:
        known = self._by_places.setdefault(finding.places, finding)
        if known is finding:
            self.findings.append(finding)
        else:
            known.count += 1

    # What a tracer hears about accesses

    @_told
    def launched(self, operator: str, stream: Hashable, accesses: Sequence[Access]) -> None:
        launch = self._issue(operator, stream)
        is_ordered = ordered_before(self._clocks[stream])
        for access in accesses:
            self._access(Use(launch, access), is_ordered)
        self._launches += 1
        if self._launches % SWEEP_INTERVAL == 0:
            self._sweep()

    @_told
    def host_accessed(self, operator: str, accesses: Sequence[Access]) -> None:
        launch = Launch(operator, HOST, 0, capture())
        for access in accesses:
            self._check(Use(launch, access), ordered_before(self._host))

    def _issue(self, operator: str, stream: Hashable) -> Launch:
        clock = self._clock_of(stream)
        position = clock.get(stream, 0) + 1
        clock[stream] = position
        return Launch(operator, stream, position, capture())

    def _clock_of(self, stream: Hashable) -> Clock:
        """Return the clock of what the stream gets now: after all that the host knows done."""
        clock = self._clocks.setdefault(stream, {})
        if stream not in self._caught_up:
            join(clock, self._host)
            self._caught_up.add(stream)
        return clock

    def _host_waited(self, clock: Clock) -> None:
        join(self._host, clock)
        self._caught_up.clear()

    def _access(self, use: Use, is_ordered: IsOrdered) -> None:
        if use.access.start < use.access.end:
            self._check(use, is_ordered)
            memory = self._memory.get(use.access.storage)
            if memory is None:
                memory = self._memory[use.access.storage] = _Memory()
            if use.launch.stream != memory.stream:
                memory.is_shared = True
            memory.accesses.record(use, is_ordered)

    def _check(self, use: Use, is_ordered: IsOrdered) -> None:
        memory = self._memory.get(use.access.storage)
        if memory is None:
            return
        for earlier in memory.accesses.unordered(use.access, is_ordered):
            start = max(earlier.access.start, use.access.start)
            end = min(earlier.access.end, use.access.end)
            name = self._name_of(use.access.address + start - use.access.start)
            name = name or f"storage {use.access.storage}"
            older = self._waits_for_older(use, earlier)
            self._found(Finding(Kind.RACE, earlier, use, start, end, name, older))

    def _waits_for_older(self, later: Use, earlier: Use) -> bool:
        stream = later.launch.stream
        clock = self._host if stream is HOST else self._clocks[stream]
        return clock.get(earlier.launch.stream, 0) > 0

    # What a tracer hears about order

    @_told
    def event_recorded(self, event: Hashable, stream: Hashable) -> None:
        self._events.set(event, dict(self._clock_of(stream)))

    @_told
    def event_waited(self, event: Hashable, stream: Hashable) -> None:
        join(self._clock_of(stream), self._events.get(event) or {})

    @_told
    def event_synchronized(self, event: Hashable) -> None:
        self._host_waited(self._events.get(event) or {})

    @_told
    def stream_synchronized(self, stream: Hashable) -> None:
        self._host_waited(self._clocks.get(stream, {}))

    @_told
    def device_synchronized(self) -> None:
        for stream, clock in self._clocks.items():
            if not isinstance(stream, HostLane):
                self._host_waited(clock)
        self._sweep()

    # What a tracer hears about memory

    @_told
    def allocated(self, storage: int, nbytes: int, stream: Hashable) -> None:
        """Check it as a write of the whole block."""
        launch = self._issue(ALLOCATION, stream)
        use = Use(launch, Access(storage, 0, nbytes, True, 0))
        is_ordered = ordered_before(self._clocks[stream])
        for freed in self._freed.pop(stream, ()):
            for last in freed.uses:
                if not is_ordered(last.launch):
                    self._found_lifetime(last, use, freed.freed_at)
        self._memory[storage] = _Memory(stream)
        self._access(use, is_ordered)

    def _found_lifetime(self, last: Use, allocation: Use, freed_at: Stack) -> None:
        older = self._waits_for_older(allocation, last)
        name = f"storage {last.access.storage}"
        start, end = last.access.start, last.access.end
        self._found(Finding(Kind.LIFETIME, last, allocation, start, end, name, older, freed_at))

    def freed(self, storage: int) -> None:
        """Note that memory dies. May be called at any time, by any thread."""
        memory = self._memory.get(storage)
        # Nobody asks where memory was freed that only its own stream has used.
        self._dying.append((storage, capture() if memory is not None and memory.is_shared else ()))

    @_told
    def stream_recorded(self, storage: int, stream: Hashable) -> None:
        self._memory.setdefault(storage, _Memory()).recorded.add(stream)

    def _settle_frees(self) -> None:
        while self._dying:
            storage, freed_at = self._dying.popleft()
            memory = self._memory.pop(storage, None)
            if memory is None or memory.stream is None:
                continue
            # What the allocator waits for by itself: the allocation stream's order, and recorded
            # streams up to here.
            streams = (memory.stream, *memory.recorded)
            excused = [ordered_before(self._clock_of(stream)) for stream in streams]
            uses = memory.accesses.uses()
            left = [use for use in uses if not any(done(use.launch) for done in excused)]
            if left:
                self._freed.setdefault(memory.stream, []).append(_Freed(left, freed_at))

    def _sweep(self) -> None:
        """Drop what the host knows to be done: everything that is still to come runs after it."""
        is_done = ordered_before(self._host)
        for memory in self._memory.values():
            memory.accesses.forget(is_done)
        for stream, pending in self._freed.items():
            kept = [one for one in pending if not all(is_done(use.launch) for use in one.uses)]
            self._freed[stream] = kept

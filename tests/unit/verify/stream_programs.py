"""Small programs of streams, and two judges of them: the stream checker, and brute force over all
orders a device may choose.

A program is what a host issues, in order. Brute force knows nothing of clocks: it builds the graph
of what must come before what, runs every order that the graph allows on symbolic values, and every
choice of freed memory that an allocation may take, and looks whether two orders differ in anything
that an operator saw or left behind.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from deepspeed.accelerator.stream_trace import Access
from deepspeed.verify.streams.checker import StreamChecker

NBYTES = 4
STREAMS = 3
EVENTS = 2


class Range(NamedTuple):
    """A view: bytes of one of the memories that live at that moment (index modulo their number)."""

    memory: int
    start: int
    end: int


class Op(NamedTuple):
    """An operator that reads one view and writes another; either may be missing."""

    stream: int
    read: Range | None
    write: Range | None


class HostAccess(NamedTuple):
    view: Range
    writes: bool


class Record(NamedTuple):
    event: int
    stream: int


class Wait(NamedTuple):
    event: int
    stream: int


class SyncEvent(NamedTuple):
    event: int


class SyncStream(NamedTuple):
    stream: int


class SyncDevice(NamedTuple):
    pass


class Free(NamedTuple):
    memory: int


class Alloc(NamedTuple):
    stream: int


class RecordStream(NamedTuple):
    memory: int
    stream: int


Touch = Op | HostAccess
Order = Record | Wait | SyncEvent | SyncStream | SyncDevice
Release = Free | RecordStream
Step = Touch | Order | Release | Alloc


class Event:
    """A key that can be weakly referenced, as devices' events are."""


def touched(step: Touch) -> list[tuple[Range, bool]]:
    """Views and whether they are written."""
    if isinstance(step, HostAccess):
        return [(step.view, step.writes)]
    views = ((step.read, False), (step.write, True))
    return [(view, writes) for view, writes in views if view is not None]


class Reader(ABC):
    """Goes through a program; subclasses say what becomes of its steps.

    A memory of each of two streams lives at the start; a step on memory does nothing when none is.
    """

    def __init__(self) -> None:
        self.live = [0, 1]
        self.made = 2

    def read(self, program: list[Step]) -> None:
        for step in program:
            if isinstance(step, Touch):
                if self.live:
                    self.touch(step, [(self.storage(view), view, w) for view, w in touched(step)])
            elif isinstance(step, Release):
                if self.live:
                    self.release(step, self.storage(step))
            elif isinstance(step, Alloc):
                self.live.append(self.made)
                self.made += 1
                self.alloc(step, self.live[-1])
            else:
                self.order(step)

    def storage(self, of: Range | Release) -> int:
        """The memory that is meant."""
        return self.live[of.memory % len(self.live)]

    @abstractmethod
    def touch(self, step: Touch, views: list[tuple[int, Range, bool]]) -> None:
        """An operator or the host's: storages, ranges of them, whether they are written."""

    @abstractmethod
    def release(self, step: Release, storage: int) -> None: ...

    @abstractmethod
    def alloc(self, step: Alloc, storage: int) -> None: ...

    @abstractmethod
    def order(self, step: Order) -> None: ...


class Issuer(Reader):
    """Issues a program to a checker."""

    def __init__(self) -> None:
        super().__init__()
        self.checker = StreamChecker()
        self.events = [Event() for _ in range(EVENTS)]
        for storage in self.live:
            self.alloc(Alloc(storage), storage)
        self.checker.device_synchronized()

    def order(self, step: Order) -> None:
        if isinstance(step, Record):
            self.checker.event_recorded(self.events[step.event], step.stream)
        elif isinstance(step, Wait):
            self.checker.event_waited(self.events[step.event], step.stream)
        elif isinstance(step, SyncEvent):
            self.checker.event_synchronized(self.events[step.event])
        elif isinstance(step, SyncStream):
            self.checker.stream_synchronized(step.stream)
        else:
            self.checker.device_synchronized()

    def touch(self, step: Touch, views: list[tuple[int, Range, bool]]) -> None:
        accesses = [Access(storage, v.start, v.end, writes, 0) for storage, v, writes in views]
        if isinstance(step, Op):
            self.checker.launched("op", step.stream, accesses)
        else:
            self.checker.host_accessed("op", accesses)

    def release(self, step: Release, storage: int) -> None:
        if isinstance(step, Free):
            self.live.remove(storage)
            self.checker.freed(storage)
        else:
            self.checker.stream_recorded(storage, step.stream)

    def alloc(self, step: Alloc, storage: int) -> None:
        self.checker.allocated(storage, NBYTES, step.stream)


def checked(program: list[Step]) -> StreamChecker:
    """What the checker says."""
    issuer = Issuer()
    issuer.read(program)
    return issuer.checker


@dataclass
class Node:
    """Something with an effect: an operator, a host access or an allocation.

    Attributes:
        before: Nodes (indices) that every order puts before it.
        views: (storage, start, end, writes).
        takes: Of an allocation: storages whose memory it may take, each with the nodes that then
            come before it.
    """

    before: frozenset[int]
    views: list[tuple[int, int, int, bool]]
    takes: list[tuple[int, frozenset[int]]] = field(default_factory=list)


@dataclass
class Graph:
    """What precedes what; a cursor is the set of nodes that precede whatever comes next there."""

    nodes: list[Node] = field(default_factory=list)
    streams: list[frozenset[int]] = field(default_factory=lambda: [frozenset()] * STREAMS)
    host: frozenset[int] = frozenset()
    events: dict[int, frozenset[int]] = field(default_factory=dict)
    # Storage, its stream, whom it waits for.
    freed: list[tuple[int, int, frozenset[int]]] = field(default_factory=list)

    def add(
        self, before: frozenset[int], views: list[tuple[int, int, int, bool]]
    ) -> frozenset[int]:
        """A node; returns the cursor behind it."""
        self.nodes.append(Node(before, views))
        return before | {len(self.nodes) - 1}

    def tail(self, stream: int) -> frozenset[int]:
        """What precedes the next thing issued on a stream."""
        return self.streams[stream] | self.host


class GraphBuilder(Reader):
    """Makes the graph of a program; steps without an effect are folded into their successors."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = Graph()
        self.owner = {0: 0, 1: 1}
        self.recorded: dict[int, set[int]] = {0: set(), 1: set()}

    def order(self, step: Order) -> None:
        graph = self.graph
        if isinstance(step, Record):
            graph.events[step.event] = graph.tail(step.stream)
        elif isinstance(step, Wait):
            waited = graph.events.get(step.event, frozenset())
            graph.streams[step.stream] = graph.tail(step.stream) | waited
        elif isinstance(step, SyncEvent):
            graph.host |= graph.events.get(step.event, frozenset())
        elif isinstance(step, SyncStream):
            graph.host |= graph.streams[step.stream]
        else:
            graph.host = graph.host.union(*graph.streams)

    def touch(self, step: Touch, views: list[tuple[int, Range, bool]]) -> None:
        graph = self.graph
        cells = [(storage, view.start, view.end, writes) for storage, view, writes in views]
        if isinstance(step, Op):
            graph.streams[step.stream] = graph.add(graph.tail(step.stream), cells)
        else:
            graph.host = graph.add(graph.host, cells)

    def release(self, step: Release, storage: int) -> None:
        if isinstance(step, RecordStream):
            self.recorded[storage].add(step.stream)
            return
        self.live.remove(storage)
        waits = frozenset[int]().union(*map(self.graph.tail, self.recorded[storage]))
        self.graph.freed.append((storage, self.owner[storage], waits))

    def alloc(self, step: Alloc, storage: int) -> None:
        graph = self.graph
        self.owner[storage], self.recorded[storage] = step.stream, set()
        views = [(storage, 0, NBYTES, True)]
        graph.streams[step.stream] = graph.add(graph.tail(step.stream), views)
        freed = graph.freed
        graph.nodes[-1].takes = [(old, waits) for old, s, waits in freed if s == step.stream]


def graph_of(program: list[Step]) -> Graph:
    """The graph of a program."""
    builder = GraphBuilder()
    builder.read(program)
    return builder.graph


def choices(
    graph: Graph, index: int = 0, taken: frozenset[int] = frozenset()
) -> Iterator[dict[int, tuple[int, frozenset[int]]]]:
    """For each allocation: whose freed memory it takes, and what that adds before it."""
    if index == len(graph.nodes):
        yield {}
        return
    yield from choices(graph, index + 1, taken)
    for storage, waits in graph.nodes[index].takes:
        if storage not in taken:
            for rest in choices(graph, index + 1, taken | {storage}):
                yield {index: (storage, waits), **rest}


def orders_differ(program: list[Step]) -> bool:
    """Whether two orders that the device may choose differ in what an operator saw or left."""
    graph = graph_of(program)
    return any(_differs(graph, choice) for choice in choices(graph))


def _differs(graph: Graph, choice: dict[int, tuple[int, frozenset[int]]]) -> bool:
    """Run all orders at once, as sets of finished nodes reached with one outcome."""
    block: dict[int, int] = {}
    before = [node.before for node in graph.nodes]
    for index, node in enumerate(graph.nodes):
        if index in choice:
            old, waits = choice[index]
            block[node.views[0][0]] = block.get(old, old)
            before[index] |= waits
    # (finished nodes) -> (memory by (block, byte), what each saw); equal terms: equal values.
    level: dict[frozenset[int], Hashable] = {frozenset(): (frozenset(), frozenset())}
    while level:
        following: dict[frozenset[int], Hashable] = {}
        for done, state in level.items():
            for index in range(len(graph.nodes)):
                if index in done or not before[index] <= done:
                    continue
                outcome = _run(graph.nodes[index], index, block, state)
                if following.setdefault(done | {index}, outcome) != outcome:
                    return True
        level = following
    return False


def _run(node: Node, index: int, block: dict[int, int], state: Hashable) -> Hashable:
    assert isinstance(state, tuple)
    memory, seen = dict(state[0]), state[1]
    cells = [
        ((block.get(s, s), byte), writes)
        for s, start, end, writes in node.views
        for byte in range(start, end)
    ]
    # A write also notices what it overwrites; hashes of terms stand for terms.
    term = hash((index, tuple(memory.get(cell, 0) for cell, _ in cells)))
    for cell, writes in cells:
        if writes:
            memory[cell] = term
    return frozenset(memory.items()), seen | {(index, term)}

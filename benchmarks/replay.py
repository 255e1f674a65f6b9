"""How much communication is not hidden: what a program issues to the simulated device, run again
on a device that only counts time.

    with logged() as log:
        train()
    exposed([log], Device())

[Note: the time of a step]
An entry begins when what is before it in its stream is over, when that for which its stream waits
has happened, and when the entry before it in its hardware queue has begun. A collective begins when
it has on all ranks, and goes on for its duration on its communicator's stream, beside computation,
of which it takes nothing. The host is never late but where it waits for the device. Exposed is by
how much a step is longer than with collectives that take no time.

[Note: assumed durations]
An H100 SXM multiplies in bf16 at 989 TFLOP/s, without sparsity, and has 3.35 TB/s of memory (its
data sheet); half of the first is what good training reaches, four fifths of the second what copies
do. A kernel takes at least 3 microseconds. NVLink 4 has 450 GB/s each way; eight adapters of NDR
InfiniBand, 400 Gb/s each, give a node 400 GB/s, at which eight rings over nodes go together. NCCL
gets about 80 % of either for large messages. An all-gather or a reduce-scatter of S bytes over N
ranks takes S (N - 1) / N at that rate, an all-reduce twice as long, and each of them 20
microseconds and one per rank besides.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from deepspeed.accelerator.sim.issue_log import (
    Communication,
    HostMeeting,
    HostWait,
    IssueLog,
    Kernel,
    StreamWait,
)
from deepspeed.accelerator.sim_accelerator import simulated_device
from deepspeed.accelerator.stream_trace import Access

COMPUTE_STREAM = "<default stream>"
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"


class Work(NamedTuple):
    """An operator, and the bytes of each tensor that it touches."""

    operator: str
    sizes: tuple[int, ...]


class Mark(NamedTuple):
    """The computation issued before is a part of the step by itself."""

    name: str


class WorkLog(IssueLog):
    """A log of what is issued that keeps every kernel, and the work of each entry."""

    def __init__(self) -> None:
        super().__init__()
        self.work: dict[tuple[int, int], Work] = {}  # by stream and position
        self.launched: Work | None = None  # what comes next into the log

    def mark(self, name: str) -> None:
        """End a part of the step here."""
        self.entries.append(Mark(name))  # type: ignore[arg-type]  # for whoever replays it

    def kernel(self, stream: Hashable, position: int) -> None:
        """Nothing is merged; what no operator launched takes no time."""
        self.entries.append(Kernel(self._number(stream), position))
        self._take()

    def communication(self, *args: Any, **kwargs: Any) -> None:
        """With its work."""
        super().communication(*args, **kwargs)
        self._take()

    def _take(self) -> None:
        if self.launched is not None:
            entry: Any = self.entries[-1]
            self.work[entry.stream, entry.position] = self.launched
        self.launched = None

    def communicated(self, device: Device) -> dict[str, list[float]]:
        """How long each communication takes, by name."""
        found: dict[str, list[float]] = defaultdict(list)
        for entry in self.entries:
            if isinstance(entry, Communication):
                work = self.work[entry.stream, entry.position]
                found[work.operator].append(device.communication(work, entry))
        return found


class Launches:
    """A tracer that tells a log what is launched."""

    def __init__(self, log: WorkLog) -> None:
        self._log = log

    def launched(self, operator: str, stream: Hashable, accesses: Sequence[Access]) -> None:
        """An operator or a collective."""
        sizes: dict[tuple[int, bool], int] = defaultdict(int)
        for access in accesses:
            sizes[access.storage, access.writes] += access.end - access.start
        self._log.launched = Work(operator, tuple(sizes.values()))

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None  # nothing else matters


@contextmanager
def logged() -> Iterator[WorkLog]:
    """Log what this rank issues to its simulated device within the block."""
    accelerator = simulated_device("replay")
    scheduler, log = accelerator.simulator.scheduler, WorkLog()
    scheduler.log = log
    try:
        with accelerator.trace_streams(Launches(log)):
            yield log
    finally:
        scheduler.log = None
        log._numbers.clear()  # streams stay here; the log may go to other ranks


# Durations


@dataclass(frozen=True)
class Device:
    """Seconds that work takes; see [Note: assumed durations].

    Attributes:
        length: How often each length of what is logged is to be taken.
        node: Ranks that NVLink joins; ranks of one node have consecutive numbers.
        element: Bytes of what is multiplied.
        heads: Of attention, which count once.
    """

    length: int = 1
    flops: float = 0.5 * 989e12
    memory: float = 0.8 * 3.35e12
    kernel: float = 3e-6
    nvlink: float = 0.8 * 450e9
    network: float = 0.8 * 400e9
    node: int = 8
    start: float = 20e-6
    hop: float = 1e-6
    element: int = 2
    heads: int = 32

    def computation(self, work: Work) -> float:
        """Of a kernel; what touches nothing is none."""
        if not work.sizes:
            return 0.0
        numbers = [size / self.element for size in work.sizes]
        moved = sum(work.sizes) * self.length**2 / self.memory
        flops = 0.0
        if work.operator.split(".")[0] in PRODUCTS:
            # [m, k], [k, n] and [m, n] have the product (m k n) ** 2.
            flops = 2 * math.sqrt(math.prod(sorted(numbers)[-3:]))
        elif work.operator.startswith(ATTENTION):
            # Causal: half of all pairs. The least tensor has one fp32 per head and position.
            positions = min(work.sizes) / 4 / self.heads
            products = 5 if "backward" in work.operator else 2
            flops = products * positions * max(numbers)
        return max(self.kernel, moved, flops * self.length**3 / self.flops)

    def communication(self, work: Work, entry: Communication) -> float:
        """Of a collective, or of a message."""
        ranks = len(entry.others) + 1
        size = max(work.sizes, default=0) * self.length**2
        rate = self.nvlink if ranks <= self.node else min(self.nvlink, self.network)
        if entry.is_message:
            return self.start + size / rate
        twice = 2 if work.operator.startswith("all_reduce") else 1
        return self.start + self.hop * ranks + twice * size * (ranks - 1) / ranks / rate


# Replay


class _Node:
    """Something that takes a while when all that it waits for is over, or has `begun`."""

    __slots__ = ("begin", "begun", "duration", "ends", "is_known")

    def __init__(self, ends: list[_Node], begun: list[_Node], duration: float = 0.0) -> None:
        self.ends, self.begun, self.duration = ends, begun, duration
        self.begin, self.is_known = 0.0, False

    @property
    def end(self) -> float:
        """When it is over."""
        return self.begin + self.duration

    def settle(self) -> None:
        """Compute when it begins, and before that when all does that it waits for."""
        stack = [self]
        on_the_way: set[int] = set()
        while stack:
            node = stack[-1]
            waits = [one for one in (*node.ends, *node.begun) if not one.is_known]
            if node.is_known or not waits:
                times = [*(one.end for one in node.ends), *(one.begin for one in node.begun)]
                node.begin, node.is_known = max(times, default=0.0), True
                stack.pop()
                continue
            if id(node) in on_the_way:
                raise RuntimeError("what was issued can hang on such a device; see check_budgets")
            on_the_way.add(id(node))
            stack += waits


Times = dict[str, float]


def replayed(
    logs: Sequence[WorkLog], device: Device, queues: int = 8, communicates: bool = True
) -> list[Times]:
    """When each rank's computation is over before each mark, and everything (`end`).

    Args:
        logs: Of all ranks, by rank; one alone stands for all.
        device: What takes how long.
        queues: Hardware queues; streams take them in turn.
        communicates: False: what goes between ranks takes no time.
    """
    arrived: dict[tuple[int, Any], _Node] = {}
    joined: list[tuple[_Node, list[tuple[int, Any]]]] = []
    ranks = [
        _nodes(rank, log, device, queues, communicates, arrived, joined)
        for rank, log in enumerate(logs)
    ]
    for node, keys in joined:
        node.ends += [arrived[key] for key in keys if key in arrived]
    found = []
    for marks in ranks:
        times = {}
        for name, nodes in marks.items():
            for node in nodes:
                node.settle()
            times[name] = max((node.end for node in nodes), default=0.0)
        found.append(times)
    return found


def _nodes(
    rank: int,
    log: WorkLog,
    device: Device,
    queues: int,
    communicates: bool,
    arrived: dict[tuple[int, Any], _Node],
    joined: list[tuple[_Node, list[tuple[int, Any]]]],
) -> dict[str, list[_Node]]:
    """Make the nodes of one rank, and find those that marks stand behind."""
    host = _Node([], [])
    positions: dict[int, list[int]] = defaultdict(list)
    nodes: dict[int, list[_Node]] = defaultdict(list)
    heads: dict[int, _Node] = {}
    marks: dict[str, list[_Node]] = {}

    def until(stream: int, position: int) -> list[_Node]:
        place = bisect_right(positions[stream], position)
        return [nodes[stream][place - 1]] if place else []

    def issue(entry: Any, ends: list[_Node], duration: float = 0.0) -> _Node:
        queue = entry.stream % queues
        behind = [heads[queue]] if queue in heads else []
        node = heads[queue] = _Node([host, *nodes[entry.stream][-1:], *ends], behind, duration)
        positions[entry.stream].append(entry.position)
        nodes[entry.stream].append(node)
        return node

    def meet(begun: _Node, entry: Any, duration: float = 0.0) -> _Node:
        arrived[rank, entry.own] = begun
        over = _Node([begun], [], duration)
        joined.append((over, list(entry.others)))
        return over

    entry: Any
    for entry in log.entries:
        if isinstance(entry, Kernel):
            work = log.work.get((entry.stream, entry.position))
            issue(entry, [], device.computation(work) if work else 0.0)
        elif isinstance(entry, StreamWait):
            issue(entry, until(entry.other, entry.until))
        elif isinstance(entry, Communication):
            work = log.work[entry.stream, entry.position]
            takes = device.communication(work, entry) if communicates else 0.0
            nodes[entry.stream][-1] = meet(issue(entry, []), entry, takes)
        elif isinstance(entry, HostWait):
            host = _Node([host, *until(entry.stream, entry.until)], [])
        elif isinstance(entry, HostMeeting):
            host = meet(host, entry)
        else:
            streams = [i for i, name in enumerate(log.names) if name == COMPUTE_STREAM]
            marks[entry.name] = [node for i in streams for node in nodes[i][-1:]]
    marks["end"] = [of[-1] for of in nodes.values()]
    return marks


def exposed(logs: Sequence[WorkLog], device: Device, queues: int = 8) -> list[Times]:
    """Of each rank, by how much communication makes the step longer up to each mark."""
    with_all = replayed(logs, device, queues)
    without = replayed(logs, device, queues, communicates=False)
    return [
        {name: times[name] - other[name] for name in times}
        for times, other in zip(with_all, without, strict=True)
    ]

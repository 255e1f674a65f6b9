"""A map of byte intervals: who touched which bytes of one piece of memory last.

Pure bookkeeping: what is ordered before what is asked of the caller. For each interval the last
write is kept, and the reads since then that no later read is ordered after; whatever else was there
is ordered before one of these, so an access that is ordered after these is ordered after all. That
is also what bounds the memory: one write and one read per stream and interval.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import NamedTuple

from deepspeed.accelerator.call_stacks import Stack
from deepspeed.accelerator.stream_trace import Access


@dataclass(slots=True, eq=False)
class Launch:
    """One operator on one stream."""

    operator: str  # its name
    stream: Hashable  # where it was issued
    position: int  # how many operators that stream had then, this one included
    stack: Stack  # where in the code


class Use(NamedTuple):
    """One access of one launch."""

    launch: Launch
    access: Access


IsOrdered = Callable[[Launch], bool]  # whether a launch is ordered before the one in question


@dataclass(slots=True)
class Segment:
    """Bytes `[start, end)` whose last accesses are the same."""

    start: int
    end: int
    write: Use | None
    reads: tuple[Use, ...]

    def conflicts(self, writes: bool) -> tuple[Use, ...]:
        """List what an access must be ordered after: the last write; a write, later reads too."""
        last = () if self.write is None else (self.write,)
        return last + self.reads if writes else last


class AccessMap:
    """The segments of one storage, disjoint and in order."""

    def __init__(self) -> None:
        self._segments: list[Segment] = []

    def __len__(self) -> int:
        return len(self._segments)

    def uses(self) -> list[Use]:
        """Return every access that is still remembered, once."""
        kept = (use for segment in self._segments for use in segment.conflicts(writes=True))
        return list({id(use): use for use in kept}.values())

    def unordered(self, access: Access, is_ordered: IsOrdered) -> list[Use]:
        """List remembered accesses that conflict with `access` and are not ordered before it."""
        found: dict[int, Use] = {}
        index = self._index(access.start)
        while index < len(self._segments) and self._segments[index].start < access.end:
            for use in self._segments[index].conflicts(access.writes):
                if not is_ordered(use.launch):
                    found[id(use)] = use
            index += 1
        return list(found.values())

    def _index(self, position: int) -> int:
        """Find the index of the first segment that ends after `position`."""
        segments = self._segments
        if not segments or segments[0].end > position:
            return 0
        return bisect_right(segments, position, key=lambda segment: segment.end)

    def record(self, use: Use, is_ordered: IsOrdered) -> None:
        """Remember `use`; forget what it makes superfluous."""
        start, end = use.access.start, use.access.end
        index = self._index(start)
        same = self._segments[index] if index < len(self._segments) else None
        if same is not None and (same.start, same.end) == (start, end):
            # Nearly always: the same tensor again.
            if use.access.writes:
                same.write, same.reads = use, ()
            else:
                same.reads = (*[read for read in same.reads if not is_ordered(read.launch)], use)
            return
        first, last = self._cut(start), self._cut(end)
        if use.access.writes:
            self._segments[first:last] = [Segment(start, end, use, ())]
            return
        replaced: list[Segment] = []
        position = start
        for segment in [*self._segments[first:last], Segment(end, end, None, ())]:
            if position < segment.start:
                _append(replaced, Segment(position, segment.start, None, (use,)))
            if segment.start < end:
                reads = tuple(read for read in segment.reads if not is_ordered(read.launch))
                _append(replaced, Segment(segment.start, segment.end, segment.write, (*reads, use)))
            position = segment.end
        self._segments[first:last] = replaced

    def _cut(self, position: int) -> int:
        """Cut the segment that crosses `position` in two; return the first index at or after it."""
        index = self._index(position)
        if index < len(self._segments) and self._segments[index].start < position:
            whole = self._segments[index]
            self._segments.insert(index + 1, Segment(position, whole.end, whole.write, whole.reads))
            whole.end = position
            return index + 1
        return index

    def forget(self, is_ordered: IsOrdered) -> None:
        """Drop what is ordered before everything that is still to come."""
        kept: list[Segment] = []
        for segment in self._segments:
            write = segment.write
            if write is not None and is_ordered(write.launch):
                write = None
            reads = tuple(read for read in segment.reads if not is_ordered(read.launch))
            if write is not None or reads:
                _append(kept, Segment(segment.start, segment.end, write, reads))
        self._segments = kept


def _append(segments: list[Segment], segment: Segment) -> None:
    """Append, joined with the last one where nothing tells them apart."""
    last = segments[-1] if segments else None
    if last is None or last.end != segment.start:
        segments.append(segment)
    elif last.write is segment.write and last.reads == segment.reads:
        last.end = segment.end
    else:
        segments.append(segment)

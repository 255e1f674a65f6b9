"""What the stream checker found, in words: both accesses, memory, and the missing wait."""

from __future__ import annotations

import enum
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from deepspeed.accelerator.call_stacks import Stack, describe
from deepspeed.verify.streams.accesses import Use

ALLOCATION = "allocation"  # operator name of the moment in which memory was handed out


class Kind(enum.Enum):
    """What kind of order is missing."""

    RACE = "race"  # two accesses to the same life of the memory
    LIFETIME = "use after free"  # the last use, and the allocation that may take the freed memory


@dataclass(slots=True)
class Finding:
    """Two accesses of which at least one writes and that nothing orders."""

    kind: Kind
    earlier: Use  # the access that was issued first
    # The one that does not wait for it. Of `Kind.LIFETIME`: the allocation that may take the
    # memory.
    later: Use
    start: int  # first byte that both touch, counted from the beginning of the storage
    end: int  # one past the last
    memory: str  # name of the memory
    # Whether the later stream waits for some of the earlier one's work, only not for this.
    waits_for_older: bool
    freed_at: Stack = ()  # of `Kind.LIFETIME`: where the last reference was dropped
    count: int = 1  # how often the same two places in the code met

    @property
    def edge(self) -> str:
        """The missing edge: who does not wait for whom, and what that one did."""
        waiting, waited = self.later.launch.stream, self.earlier.launch.stream
        did = "wrote" if self.earlier.access.writes else "read"
        place = f"bytes {self.start}..{self.end} of {self.memory}"
        what = f"which {did} {place}"
        if self.kind is Kind.LIFETIME:
            what += ", before that memory, freed in the meantime, is handed out again"
        elif self.earlier.launch.operator == ALLOCATION:
            what = (
                f"for which {place} was allocated: work of the memory's former owner may still be "
                "under way there"
            )
        older = f" (it waits for earlier work of {waited!r} only)" if self.waits_for_older else ""
        return f"{waiting!r} never waits for {waited!r}, {what}{older}"

    @property
    def places(self) -> Hashable:
        """Findings with equal places are the same mistake, met again."""
        return (self.kind, *(place(use) for use in (self.earlier, self.later)))

    def describe(self) -> str:
        """Tell the missing edge, then each side with its stack, in several lines."""
        again = f" (met {self.count} times)" if self.count > 1 else ""
        lines = [f"{self.kind.value}: {self.edge}{again}", *self._side(self.earlier)]
        if self.kind is Kind.LIFETIME:
            lines.append("  freed, when its last reference was dropped:")
            lines += describe(self.freed_at, "    ")
        return "\n".join(lines + self._side(self.later))

    def __str__(self) -> str:
        return self.describe()

    def _side(self, use: Use) -> list[str]:
        launch, access = use
        verb = "writes" if access.writes else "reads"
        what = f"{verb} bytes {access.start}..{access.end}"
        if launch.operator == ALLOCATION:
            what = "hands the memory out"
        return [f"  {launch.operator} on {launch.stream!r} {what}", *describe(launch.stack, "    ")]


def place(use: Use) -> Hashable:
    """Tell where in the code, by what operator and on which stream."""
    launch = use.launch
    lines = tuple((code.co_filename, code.co_name, line) for code, line in launch.stack)
    return launch.operator, repr(launch.stream), lines


def report(findings: Sequence[Finding]) -> str:
    """Tell all findings, numbered; a sentence when there is none."""
    if not findings:
        return "no stream races: every conflicting pair of accesses is ordered"
    head = f"{len(findings)} stream {'hazard' if len(findings) == 1 else 'hazards'}"
    told = [f"[{number}] {one.describe()}" for number, one in enumerate(findings, start=1)]
    return "\n".join([head, *told])


class StreamRaceError(RuntimeError):
    """Accesses to the same memory were left unordered; the message is the report."""

    def __init__(self, findings: Sequence[Finding], message: str | None = None) -> None:
        super().__init__(report(findings) if message is None else message)
        self.findings = list(findings)  # what was found on this rank

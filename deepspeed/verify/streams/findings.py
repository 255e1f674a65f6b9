"""What the stream checker found, in words: both accesses, the memory, and the wait that is
missing.
"""

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
        waiting, waited = self.later.launch, self.earlier.launch
        did = "wrote" if self.earlier.access.writes else "read"
        older = (
            f" (it waits for earlier work of {waited.stream!r} only)"
            if self.waits_for_older
            else ""
        )
        if self.kind is Kind.LIFETIME:
            return (
                f"{waiting.stream!r} never waits for {waited.stream!r}, which {did} {self._bytes}, "
                f"before that memory, freed in the meantime, is handed out again{older}"
            )
        if waited.operator == ALLOCATION:
            return (
                f"{waiting.stream!r} never waits for {waited.stream!r}, for which {self._bytes} "
                "was allocated: work of the memory's former owner may still be under way "
                f"there{older}"
            )
        return (
            f"{waiting.stream!r} never waits for {waited.stream!r}, which {did} "
            f"{self._bytes}{older}"
        )

    @property
    def _bytes(self) -> str:
        return f"bytes {self.start}..{self.end} of {self.memory}"

    @property
    def places(self) -> Hashable:
        """Findings with equal places are the same mistake, met again."""
        return (self.kind, *(place(use) for use in (self.earlier, self.later)))

    def describe(self) -> str:
        """Several lines: the missing edge, then each side with its stack."""
        again = f" (met {self.count} times)" if self.count > 1 else ""
        lines = [f"{self.kind.value}: {self.edge}{again}", *self._side(self.earlier)]
        if self.kind is Kind.LIFETIME:
            lines += [
                "  freed, when its last reference was dropped:",
                *describe(self.freed_at, "    "),
            ]
        return "\n".join(lines + self._side(self.later))

    def __str__(self) -> str:
        return self.describe()

    def _side(self, use: Use) -> list[str]:
        launch, access = use
        verb = "writes" if access.writes else "reads"
        what = (
            "hands the memory out"
            if launch.operator == ALLOCATION
            else f"{verb} bytes {access.start}..{access.end}"
        )
        return [f"  {launch.operator} on {launch.stream!r} {what}", *describe(launch.stack, "    ")]


def place(use: Use) -> Hashable:
    """Where in the code, by what operator and on which stream."""
    launch = use.launch
    return (
        launch.operator,
        repr(launch.stream),
        tuple((code.co_filename, code.co_name, line) for code, line in launch.stack),
    )


def report(findings: Sequence[Finding]) -> str:
    """All findings, numbered; a sentence when there is none."""
    if not findings:
        return "no stream races: every conflicting pair of accesses is ordered"
    head = f"{len(findings)} stream {'hazard' if len(findings) == 1 else 'hazards'}"
    return "\n".join(
        [
            head,
            *(
                f"[{number}] {finding.describe()}"
                for number, finding in enumerate(findings, start=1)
            ),
        ]
    )


class StreamRaceError(RuntimeError):
    """Accesses to the same memory were left unordered; the message is the report."""

    def __init__(self, findings: Sequence[Finding], message: str | None = None) -> None:
        super().__init__(report(findings) if message is None else message)
        self.findings = list(findings)  # what was found on this rank

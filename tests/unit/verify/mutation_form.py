"""What a row of the mutation table is."""

from __future__ import annotations

from dataclasses import dataclass

from unit.mutation.table.fault import Fault


@dataclass(frozen=True)
class Mutation:
    """A fault and how it comes to light.

    Attributes:
        name: What goes wrong.
        file: Which file is changed, relative to the repository.
        changes: Pairs of the exact text, which occurs once in the file, and its replacement.
        scenario: Of `scenarios.SCENARIOS`; its first word is the guard.
        names: What one of the findings must say, as a regular expression over its lines.
    """

    name: str
    file: str
    changes: tuple[tuple[str, str], ...]
    scenario: str
    names: str

    @property
    def guard(self) -> str:
        """Which tool must find it."""
        return self.scenario.partition(":")[0]

    @property
    def fault(self) -> Fault:
        """The change of the text alone."""
        return Fault(self.name, self.file, self.changes, test=self.scenario)

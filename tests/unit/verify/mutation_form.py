"""What a row of the mutation table is."""

from __future__ import annotations

from dataclasses import dataclass

from unit.mutation.table.fault import Fault


@dataclass(frozen=True)
class Mutation(Fault):
    """A fault and how it comes to light: `test` is one of `scenarios.SCENARIOS`, whose first word
    is the guard.

    Attributes:
        names: What one of the findings must say, as a regular expression over its lines.
    """

    names: str

    @property
    def guard(self) -> str:
        """Which tool must find it."""
        return self.test.partition(":")[0]

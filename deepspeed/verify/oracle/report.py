"""What a check has found, as data: the rows of the table, notes and curves."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any


class Verdict(str, Enum):
    """What a row says."""

    PASS = "PASS"
    FAIL = "FAIL"
    NOT_RUN = "NOT RUN"  # not asked for, or of what this configuration does not have
    LEFT_OUT = "LEFT OUT"  # of what the engine does, and not possible; the row says why


@dataclass
class Row:
    """One line of the table.

    Attributes:
        check: What was checked.
        family: Which parameters, `*` standing for numbers; empty for all.
        verdict: See `Verdict`.
        gradient: Largest error of a gradient, as a share of what is allowed.
        parameter: The same for parameters after the step.
        relative: Largest error of a gradient relative to its norm.
        divisor: Measured divisor, where it is measured.
        detail: In words.
        parameters: Names of those that failed.
    """

    check: str
    verdict: Verdict
    detail: str = ""
    family: str = ""
    gradient: float | None = None
    parameter: float | None = None
    relative: float | None = None
    divisor: float | None = None
    parameters: list[str] = field(default_factory=list)


@dataclass
class Report:
    """The whole result.

    Attributes:
        rows: The table.
        notes: What was changed for the check, or cannot be compared.
        curves: Per run: losses (mean over ranks), norms, and per step the largest gradient and
            parameter error as a share of what is allowed.
        settings: Arguments of the check.
    """

    rows: list[Row]
    notes: list[str]
    curves: dict[str, dict[str, list[Any]]]
    settings: dict[str, Any]

    @property
    def passed(self) -> bool:
        """Whether no row failed."""
        return not any(row.verdict is Verdict.FAIL for row in self.rows)

    @property
    def left_out(self) -> list[str]:
        """Checks of what the engine does that were not possible."""
        return list(
            dict.fromkeys(row.check for row in self.rows if row.verdict is Verdict.LEFT_OUT)
        )

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "passed": self.passed,
            "left_out": self.left_out,
            "culprits": culprits(self),
            "settings": self.settings,
            "rows": [asdict(row) for row in self.rows],
            "notes": self.notes,
            "curves": self.curves,
        }


def culprits(report: Report) -> list[str]:
    """Parameters to look at first: those of the first failing check that names some, since later
    ones follow from it.
    """
    naming = [row for row in report.rows if row.verdict is Verdict.FAIL and row.parameters]
    return sorted(
        {name for row in naming if row.check == naming[0].check for name in row.parameters}
    )

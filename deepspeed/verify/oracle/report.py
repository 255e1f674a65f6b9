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
    """One line of the table."""

    check: str
    verdict: Verdict
    detail: str = ""
    family: str = ""  # which parameters, `*` standing for numbers; empty for all
    gradient: float | None = None  # largest error of a gradient, as a share of what is allowed
    parameter: float | None = None  # the same for parameters after the step
    relative: float | None = None  # largest error of a gradient relative to its norm
    divisor: float | None = None  # measured divisor, where it is measured
    parameters: list[str] = field(default_factory=list)  # names of those that failed


@dataclass
class Report:
    """The whole result."""

    rows: list[Row]
    notes: list[str]  # what was changed for the check, or cannot be compared
    # Per run: losses (mean over ranks), norms, and per step the largest gradient and parameter
    # error as a share of what is allowed.
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
    """Name the parameters of the first failing check that names some; later ones follow from it."""
    naming = [row for row in report.rows if row.verdict is Verdict.FAIL and row.parameters]
    return sorted(
        {name for row in naming if row.check == naming[0].check for name in row.parameters}
    )

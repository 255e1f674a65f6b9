"""What a check has found: the rows of the table, notes and curves, and the table as text."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

WIDTH = 132
COLUMNS = ("check", "parameters", "gradient", "relative", "parameter", "divisor", "")


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
    verdict: Verdict = Verdict.PASS
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
    not_covered: list[str] = field(default_factory=list)  # what no row says anything of

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
        said = {"passed": self.passed, "left_out": self.left_out, "culprits": culprits(self)}
        return {**said, **asdict(self)}


def culprits(report: Report) -> list[str]:
    """Name the parameters of the first failing check that names some; later ones follow from it."""
    naming = [row for row in report.rows if row.verdict is Verdict.FAIL and row.parameters]
    return sorted({n for row in naming if row.check == naming[0].check for n in row.parameters})


# In the terminal


def share(value: float | None) -> str:
    """An error as a share of what is allowed."""
    if value is None:
        return ""
    if value == 0:
        return "exact"
    return f"{value:.2f}" if 0.005 <= value < 1000 else f"{value:.0e}"


def cells(row: Row) -> list[str]:
    """Write the numbers of a row as texts."""
    relative = "" if row.relative is None else f"{row.relative:.1e}"
    divisor = "" if row.divisor is None else f"{row.divisor:.4g}"
    numbers = [share(row.gradient), relative, share(row.parameter), divisor]
    return [row.check, row.family, *numbers, row.verdict.value]


def render(report: Report) -> str:
    """The table, its notes and a summary."""
    table = [list(COLUMNS), *(cells(row) for row in report.rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(COLUMNS))]
    lines = [_line(table[0], widths), "-" * (sum(widths) + 2 * (len(widths) - 1))]
    for row, entry in zip(report.rows, table[1:], strict=True):
        lines.append(_line(entry, widths))
        if row.detail and (row.verdict is not Verdict.PASS or not row.family):
            lines += _wrapped(row.detail)
    lines += [
        "",
        "gradient, parameter: largest error as a share of what rounding allows; relative: of the "
        "gradient's own norm.",
    ]
    lines += [f"note: {note}" for note in report.notes]
    if report.not_covered:
        lines += textwrap.wrap(f"not covered: {'; '.join(report.not_covered)}", WIDTH)
    return "\n".join([*lines, "", summary(report)])


def _line(entry: list[str], widths: list[int]) -> str:
    left = [text.ljust(width) for text, width in zip(entry[:2], widths, strict=False)]
    right = [text.rjust(width) for text, width in zip(entry[2:-1], widths[2:], strict=False)]
    return "  ".join([*left, *right, entry[-1]]).rstrip()


def _wrapped(text: str) -> list[str]:
    wrapper = textwrap.TextWrapper(WIDTH - 4, break_long_words=False, drop_whitespace=False)
    found = [part for line in text.splitlines() for part in wrapper.wrap(line) or [""]]
    return [f"    {line}" for line in found]


def summary(report: Report) -> str:
    """One sentence."""
    counts = {verdict: sum(row.verdict is verdict for row in report.rows) for verdict in Verdict}
    named = culprits(report)
    passed, failed, not_run, left_out = (f"{counts[v]} {v.value.lower()}" for v in Verdict)
    text = f"{passed}ed, {failed}ed, {not_run}"
    if report.left_out:
        text += f", {left_out}: {', '.join(report.left_out)}"
    if named:
        text += f"; parameters: {', '.join(named[:8])}{', ...' if len(named) > 8 else ''}"
    verdict = "FAIL" if not report.passed else "INCOMPLETE" if report.left_out else "PASS"
    return f"{verdict}: {text}"

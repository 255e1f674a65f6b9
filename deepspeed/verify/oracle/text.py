"""The report as a table in the terminal."""

from __future__ import annotations

import textwrap

from deepspeed.verify.oracle.report import Report, Row, Verdict, culprits

WIDTH = 132
COLUMNS = ("check", "parameters", "gradient", "relative", "parameter", "divisor", "")


def share(value: float | None) -> str:
    """An error as a share of what is allowed."""
    if value is None:
        return ""
    if value == 0:
        return "exact"
    return f"{value:.2f}" if 0.005 <= value < 1000 else f"{value:.0e}"


def cells(row: Row) -> list[str]:
    """The numbers of a row, as texts."""
    relative = "" if row.relative is None else f"{row.relative:.1e}"
    divisor = "" if row.divisor is None else f"{row.divisor:.4g}"
    return [
        row.check,
        row.family,
        share(row.gradient),
        relative,
        share(row.parameter),
        divisor,
        row.verdict.value,
    ]


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
    return "\n".join([*lines, "", summary(report)])


def _line(entry: list[str], widths: list[int]) -> str:
    left = [text.ljust(width) for text, width in zip(entry[:2], widths, strict=False)]
    right = [text.rjust(width) for text, width in zip(entry[2:-1], widths[2:], strict=False)]
    return "  ".join([*left, *right, entry[-1]]).rstrip()


def _wrapped(text: str) -> list[str]:
    found: list[str] = []
    for line in text.splitlines():
        found += textwrap.wrap(line, WIDTH - 4, break_long_words=False, drop_whitespace=False) or [
            ""
        ]
    return [f"    {line}" for line in found]


def summary(report: Report) -> str:
    """One sentence."""
    counts = {verdict: sum(row.verdict is verdict for row in report.rows) for verdict in Verdict}
    named = culprits(report)
    text = (
        f"{counts[Verdict.PASS]} passed, {counts[Verdict.FAIL]} failed, {counts[Verdict.NOT_RUN]} "
        "not run"
    )
    if report.left_out:
        text += f", {counts[Verdict.LEFT_OUT]} left out: {', '.join(report.left_out)}"
    blame = (
        f"; parameters: {', '.join(named[:8])}{', ...' if len(named) > 8 else ''}" if named else ""
    )
    verdict = "FAIL" if not report.passed else "INCOMPLETE" if report.left_out else "PASS"
    return f"{verdict}: {text}{blame}"

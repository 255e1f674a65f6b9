"""The document that says with which versions the suite was run: read, merged and written."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

OLDEST, BETWEEN, NEWEST = "oldest", "between", "newest"
NOT_RUN = "not run yet"

_TITLE = """\
# Supported versions

For those who have other versions than the tests are pinned to. `make campaign NAME=versions` makes
a virtual environment for each version, runs the tests in it and writes this page;
`ARGS="--only torch=2.6.0"` runs one row again. For torch and Python it is the whole suite
(`tests/unit`); for accelerate and transformers, with the torch that the tests are pinned to, the
tests of all clients (`tests/unit/clients`); for lightning, trl and peft the scenarios of that
library (`tests/unit/clients/matrix`). *oldest* is the oldest version that the requirements accept,
*newest* the newest that there was on that day. Errors count as failures. What was skipped needs a
device or a program that the machine lacked, or something that this torch does not have.
"""
_HEAD = """\
| version | which | with | date | passed | failed | skipped |
| --- | --- | --- | --- | --- | --- | --- |
"""


@dataclass(frozen=True)
class Counts:
    """How many tests ended how."""

    passed: int
    failed: int
    skipped: int


@dataclass(frozen=True)
class Row:
    """What is known of one version of one package.

    Attributes:
        version: As installed; "" if it has not been run.
        which: `OLDEST`, `BETWEEN` or `NEWEST` of those that are claimed, or "".
        beside: The versions that were installed with it.
        counts: What came out; None if it has not been run.
    """

    package: str
    version: str
    which: str = ""
    beside: str = ""
    date: str = ""
    counts: Counts | None = None

    def line(self) -> str:
        """The row as it stands in the document."""
        if self.counts is None:
            cells = [self.version, self.which, "", NOT_RUN, "", "", ""]
        else:
            numbers = (self.counts.passed, self.counts.failed, self.counts.skipped)
            cells = [self.version, self.which, self.beside, self.date, *map(str, numbers)]
        return "| " + " | ".join(cells) + " |"


def parse_counts(log: str) -> Counts:
    """What the closing line of pytest says; a ValueError if there is none or no test was run."""
    scenarios = re.findall(r"^(\d+) of (\d+) passed", log, re.MULTILINE)
    if scenarios:  # of the clients' matrix
        passed, count = map(int, scenarios[-1])
        log = f"{passed} passed, {count - passed} failed in 0s"
    closing = [line for line in log.splitlines() if re.search(r"\b\d+ \w+.* in [\d.:]+s", line)]
    if not closing:
        raise ValueError("pytest wrote no closing line: it did not come to its end")
    numbers = {word: int(number) for number, word in re.findall(r"(\d+) ([a-z]+)", closing[-1])}
    failed = sum(numbers.get(word, 0) for word in ("failed", "error", "errors", "xpassed"))
    counts = Counts(numbers.get("passed", 0), failed, numbers.get("skipped", 0))
    if counts.passed + counts.failed == 0:
        raise ValueError(f"pytest ran no test: {closing[-1]!r}")
    return counts


def parse(document: str) -> list[Row]:
    """The rows that were run, from a document that `render` wrote."""
    rows, package = [], ""
    for line in document.splitlines():
        if line.startswith("## "):
            package = line.removeprefix("## ").strip()
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not package or len(cells) != 7 or not cells[4].isdigit():
            continue
        version, which, beside, date, *numbers = cells
        rows.append(Row(package, version, which, beside, date, Counts(*map(int, numbers))))
    return rows


def merge(old: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """``old`` with ``new`` in the place of rows of the same version; one is oldest or newest."""
    merged = list(old)
    for row in new:
        kept = []
        for other in merged:
            if other.package == row.package:
                if other.version == row.version:
                    continue
                if row.which and other.which == row.which:
                    other = replace(other, which="")
            kept.append(other)
        merged = [*kept, row]
    return merged


def numbers_of(version: str) -> list[int]:
    """To compare versions by: 2.6 is 2.6.0, and older than 2.13; of a build only its version."""
    numbers = [int(number) for number in re.findall(r"\d+", version.split("+")[0])]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return numbers


def _place(row: Row) -> tuple[bool, list[int]]:
    # The newest that has not been run has no version yet: it comes last.
    return not row.version, numbers_of(row.version)


def render(rows: Sequence[Row], claimed: Sequence[Row]) -> str:
    """The document: ``rows``, and of ``claimed`` those of which there is none."""
    pages = [_TITLE]
    for package in dict.fromkeys(claim.package for claim in claimed):
        mine = [row for row in rows if row.package == package]
        run = [row.which for row in mine]
        mine += [row for row in claimed if row.package == package and row.which not in run]
        lines = [row.line() for row in sorted(mine, key=_place)]
        pages.append(f"## {package}\n\n{_HEAD}" + "\n".join(lines) + "\n")
    return "\n".join(pages)

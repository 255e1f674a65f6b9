"""The table of docs/fixes/README.md: what each release has, and what was proved on it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import own_tests
from fix import ALREADY, APPLIED, Outcome
from runs import Counts

BEGIN = "<!-- releases: begin (make upstream-patches) -->"
END = "<!-- releases: end -->"
_HEAD = """\
| patch | | without it | with it alone | with all |
| --- | --- | --- | --- | --- |"""
_SAME = "The rows are those of {}."


@dataclass(frozen=True)
class Row:
    """One fix on one release.

    Attributes:
        name: Of the patch.
        outcome: What its program did.
        before: The regression test on the release as it is.
        alone: With this fix only; None if there is nothing to apply.
        together: With all fixes.
    """

    name: str
    outcome: Outcome
    before: Counts = Counts()
    alone: Counts | None = None
    together: Counts | None = None

    @property
    def shown(self) -> bool:
        """Applied, and the test fails without and passes with it; or there, and the test passes."""
        if self.outcome.what == ALREADY:
            return self.before.good
        passes = self.alone is not None and self.alone.good
        return self.outcome.what == APPLIED and self.before.bad and passes

    @property
    def good(self) -> bool:
        """Shown, and the test passes with all fixes too."""
        passes = self.together is not None and self.together.good
        return self.shown and (passes or self.outcome.what == ALREADY)

    def line(self) -> str:
        """The row as it stands in the document."""
        counts = [str(c) if c is not None else "" for c in (self.before, self.alone, self.together)]
        what = self.outcome.what if self.good else f"**not proved** ({self.outcome.what})"
        return "| " + " | ".join([self.name, what, *counts]) + " |"


@dataclass(frozen=True)
class Section:
    """One release.

    Attributes:
        release: Its version, and what kind of tree it was.
        date: When this was run.
        beside: With which torch.
        rows: One per fix.
        orders: In how many orders the patches gave the same tree.
        smoke: The trainings with all fixes.
        own: The tree's own tests before and after; None if there are none.
    """

    release: str
    date: str
    beside: str
    rows: tuple[Row, ...]
    orders: int
    smoke: Counts
    own: own_tests.Compared | None = None

    @property
    def good(self) -> bool:
        """Whether everything was proved, and nothing of upstream's fails by it."""
        proved = all(row.good for row in self.rows) and self.smoke.good
        return proved and (self.own is None or self.own.good)

    def text(self) -> str:
        """The section as it stands in the document."""
        count = sum(row.outcome.what == APPLIED for row in self.rows)
        summary = (
            f"{self.date}, {self.beside}. {count} patches; {self.orders} orders of `git am` give "
            f"the same tree. Trainings with all of them: {self.smoke}."
        )
        if self.own is not None:
            summary += f"\n\n{self.own.text()}"
        return "\n".join(
            [f"### {self.release}", "", summary, "", _HEAD, *(row.line() for row in self.rows)]
        )


def numbers(release: str) -> tuple[list[int], str]:
    """To sort releases by."""
    return [int(number) for number in re.findall(r"\d+", release)], release


def merged(document: str, section: Section) -> str:
    """``document`` with ``section`` in the place of an older one of the same release.

    Raises:
        ValueError: The document has no place for it.
    """
    if document.count(BEGIN) != 1 or document.count(END) != 1:
        raise ValueError(f"the document wants one line {BEGIN!r} and one {END!r}")
    head, _, rest = document.partition(BEGIN)
    old, _, tail = rest.partition(END)
    sections: dict[str, str] = {}
    for text in old.split("### ")[1:]:
        release = text.split("\n", 1)[0].strip()
        for other, known in sections.items():
            text = text.replace(_SAME.format(other), _rows(known))
        sections[release] = f"### {text.strip()}"
    sections[section.release] = section.text()
    shown: dict[str, str] = {}
    for release in sorted(sections, key=numbers):
        rows = _rows(sections[release])
        first = shown.setdefault(rows, release)
        if first != release:
            sections[release] = sections[release].replace(rows, _SAME.format(first))
    ordered = [sections[release] for release in sorted(sections, key=numbers)]
    return f"{head}{BEGIN}\n\n" + "\n\n".join(ordered) + f"\n\n{END}{tail}"


def _rows(text: str) -> str:
    return text[text.index(_HEAD) :].rstrip()


def write(path: Path, section: Section) -> None:
    """Put ``section`` into the document at ``path``."""
    path.write_text(merged(path.read_text(encoding="utf-8"), section), encoding="utf-8")

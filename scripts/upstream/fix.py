"""What a fix is, and how its program is run on its own."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trees import AlreadyFixed, PlaceNotFound, Tree

REGRESSIONS = Path(__file__).resolve().parent / "regressions"

APPLIED, ALREADY, FAILED = "applied", "already fixed", "place not found"


@dataclass(frozen=True)
class Fix:
    """One fix of upstream, as one commit.

    Attributes:
        name: Of the program, and of the patch.
        subject: First line of the commit's message.
        hazard: What goes wrong without it.
        change: What it changes.
        test: Its regression test, a file of `REGRESSIONS`.
        folder: Where that goes in upstream's tree.
        edit: Edits a tree. Raises `AlreadyFixed` if the tree has it, and `PlaceNotFound`.
    """

    name: str
    subject: str
    hazard: str
    change: str
    test: str
    folder: str
    edit: Callable[[Tree], None]

    @property
    def test_path(self) -> str:
        """Where the regression test goes, below the root of upstream's tree."""
        return f"{self.folder}/{self.test}"

    def message(self) -> str:
        """The commit's message, without the sign-off: why, what, and how it was tested, which a
        description of the pull request can begin with.
        """
        parts = (
            f"Why: {self.hazard}",
            f"What: {self.change}",
            "How tested: this test fails without the change and passes with it. It needs no device, "
            "but a host that is told how many ranks it is for:",
        )
        command = f"    DS_ACCELERATOR=cpu LOCAL_SIZE=2 pytest \\\n    {self.test_path}"
        return "\n\n".join([self.subject, *map(_wrap, parts), command]) + "\n"


@dataclass(frozen=True)
class Outcome:
    """What a program did to a tree.

    Attributes:
        what: `APPLIED`, `ALREADY` or `FAILED`.
        why: What showed that the tree has the fix, or what was not found.
        files: What was written.
        notes: What was found elsewhere than expected.
    """

    what: str
    why: str = ""
    files: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [f"{self.what}: {self.why or ', '.join(self.files)}", *self.notes]
        return "; ".join(parts)


def _wrap(text: str) -> str:
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > 72:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}".strip()
    return "\n".join([*lines, line])


def apply(fix: Fix, root: Path) -> Outcome:
    """Edit the tree at ``root`` and put the regression test there. Nothing is written unless all
    places were found.
    """
    tree = Tree(root)
    try:
        fix.edit(tree)
    except AlreadyFixed as error:
        return Outcome(ALREADY, str(error), notes=tuple(tree.notes))
    except PlaceNotFound as error:
        return Outcome(FAILED, str(error), notes=tuple(tree.notes))
    files = tree.write()
    put_test(fix, root)
    return Outcome(APPLIED, files=tuple(files), notes=tuple(tree.notes))


def put_test(fix: Fix, root: Path) -> None:
    """Copy the regression test into the tree at ``root``."""
    path = root / fix.test_path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text((REGRESSIONS / fix.test).read_text(encoding="ascii"), encoding="ascii")


def program(fix: Fix) -> int:
    """Run one program: its argument is the folder of an upstream tree. Returns the exit code."""
    parser = argparse.ArgumentParser(description=fix.subject)
    parser.add_argument("tree", type=Path, help="folder of an upstream source tree")
    outcome = apply(fix, parser.parse_args().tree)
    print(f"{fix.name}: {outcome}")
    return int(outcome.what == FAILED)

"""What a planted fault is."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[4]


@dataclass(frozen=True)
class Fault:
    """A change of the package's text that one test must notice.

    Attributes:
        name: What goes wrong.
        file: Which file is changed, relative to the repository.
        changes: Pairs of the exact text, which occurs once in the file, and its replacement.
        test: Test file that must fail.
        select: pytest's `-k` expression; empty is the whole file.
    """

    name: str
    file: str
    changes: tuple[tuple[str, str], ...]
    test: str
    select: str = ""

    def apply(self, root: Path) -> tuple[str, str]:
        """The text of `file` below `root` before and after.

        Raises:
            ValueError: If a text doesn't occur exactly once.
        """
        before = (root / self.file).read_text(encoding="utf-8")
        after = before
        for old, new in self.changes:
            if after.count(old) != 1:
                raise ValueError(
                    f"{self.name}: {self.file} has this text {after.count(old)} times, not "
                    f"once:\n{old}"
                )
            after = after.replace(old, new)
        return before, after

    def patch(self, root: Path) -> str:
        """The change as a unified diff."""
        before, after = (text.splitlines(keepends=True) for text in self.apply(root))
        return "".join(difflib.unified_diff(before, after, f"a/{self.file}", f"b/{self.file}"))

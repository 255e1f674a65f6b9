"""Runs pytest on trees, each in a process that has imported torch but not deepspeed: that import is
most of the time of a small test.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent

NOT_RUN = "did not run"
TIMEOUT_S = "240"
"""After that ranks are given up: machines may be busy."""


@dataclass(frozen=True)
class Counts:
    """How many tests of one file ended how."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __str__(self) -> str:
        words = [
            f"{number} {word}"
            for number, word in (
                (self.failed, "failed"),
                (self.passed, "passed"),
                (self.skipped, "skipped"),
            )
            if number
        ]
        return ", ".join(words) or NOT_RUN

    @property
    def good(self) -> bool:
        """Whether something passed and nothing failed."""
        return self.passed > 0 and self.failed == 0


class Tally:
    """A pytest plugin that counts by file."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: object) -> None:
        """Keep the worst of setup, call and teardown."""
        nodeid, outcome = report.nodeid, report.outcome  # type: ignore[attr-defined]  # pytest's
        if report.when == "call" or outcome != "passed":  # type: ignore[attr-defined]  # pytest's
            if self.outcomes.get(nodeid) != "failed":
                self.outcomes[nodeid] = outcome

    def pytest_collectreport(self, report: object) -> None:
        """A file that cannot be imported has failed."""
        if report.outcome == "failed":  # type: ignore[attr-defined]  # pytest's
            self.outcomes[report.nodeid] = "failed"  # type: ignore[attr-defined]  # pytest's


@dataclass(frozen=True)
class Run:
    """Test files to be run on the package of a tree.

    Attributes:
        tree: Root of an upstream source tree.
        files: What pytest runs; nothing but imports the package.
        log: File for what is printed.
    """

    tree: Path
    files: tuple[Path, ...]
    log: Path

    @property
    def results(self) -> Path:
        """Where the child leaves the counts."""
        return self.log.with_suffix(".json")

    def counts(self) -> dict[str, Counts]:
        """By file name; zeros if the child did not come to its end."""
        found = json.loads(self.results.read_text()) if self.results.exists() else {}
        return {file.name: Counts(**found.get(file.name, {})) for file in self.files}


def run_all(runs: Sequence[Run], jobs: int) -> None:
    """Run all of them, ``jobs`` at a time."""
    # startup: children inherit what is imported here.
    import numpy  # noqa: F401
    import pydantic  # noqa: F401
    import pytest  # noqa: F401
    import torch  # noqa: F401

    children: set[int] = set()
    for one in runs:
        one.log.parent.mkdir(parents=True, exist_ok=True)
        one.results.unlink(missing_ok=True)
        if len(children) >= jobs:
            children.discard(os.wait()[0])
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = _in_child(one)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
        children.add(child)
    while children:
        children.discard(os.wait()[0])


def _in_child(one: Run) -> int:
    import pytest

    tree = one.tree
    output = os.open(one.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", DS_UNITTEST_TIMEOUT=TIMEOUT_S)
    os.chdir(tree)
    own_harness = (tree / "tests" / "unit" / "common.py").is_file()
    harness = [] if own_harness else ["-p", "harness"]
    sys.path[:0] = [str(tree)] if own_harness else [str(tree), str(ROOT / "tests"), str(HERE)]
    if not one.files:
        import deepspeed

        print(deepspeed.__file__)
        return 0
    tally = Tally()
    code = pytest.main(
        ["-q", "-rf", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(tree)]
        + [*harness, *map(str, one.files)],
        plugins=[tally],
    )
    counts: dict[str, dict[str, int]] = {}
    for nodeid, outcome in tally.outcomes.items():
        name = Path(nodeid.split("::")[0]).name
        numbers = counts.setdefault(name, {"passed": 0, "failed": 0, "skipped": 0})
        numbers[outcome] += 1
    one.results.write_text(json.dumps(counts))
    return int(code)

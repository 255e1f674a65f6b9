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


def run(tree: Path, files: Sequence[Path], log: Path, timeout_s: int = 240) -> dict[str, Counts]:
    """Run test files on the package of ``tree``. Returns the counts by file name.

    Args:
        tree: Root of an upstream source tree.
        files: What pytest runs.
        log: File for what it prints.
        timeout_s: After that many seconds ranks are given up.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    results = log.with_suffix(".json")
    results.unlink(missing_ok=True)
    # startup: children inherit what is imported here.
    import numpy  # noqa: F401
    import pydantic  # noqa: F401
    import pytest  # noqa: F401
    import torch  # noqa: F401

    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = _in_child(tree, files, log, results, timeout_s)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.waitpid(child, 0)
    if not results.exists():
        return {file.name: Counts() for file in files}
    found = {name: Counts(**counts) for name, counts in json.loads(results.read_text()).items()}
    return {file.name: found.get(file.name, Counts()) for file in files}


def _in_child(tree: Path, files: Sequence[Path], log: Path, results: Path, timeout_s: int) -> int:
    import pytest

    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", DS_UNITTEST_TIMEOUT=str(timeout_s))
    os.chdir(tree)
    own_harness = (tree / "tests" / "unit" / "common.py").is_file()
    harness = [] if own_harness else ["-p", "harness"]
    sys.path[:0] = [str(tree)] if own_harness else [str(tree), str(ROOT / "tests"), str(HERE)]
    tally = Tally()
    code = pytest.main(
        ["-q", "-rf", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(tree)]
        + [*harness, *map(str, files)],
        plugins=[tally],
    )
    counts: dict[str, dict[str, int]] = {}
    for nodeid, outcome in tally.outcomes.items():
        name = Path(nodeid.split("::")[0]).name
        numbers = counts.setdefault(name, {"passed": 0, "failed": 0, "skipped": 0})
        numbers[outcome] += 1
    results.write_text(json.dumps(counts))
    return int(code)

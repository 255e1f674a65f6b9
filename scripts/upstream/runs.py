"""Runs pytest on trees, each in a process that has imported torch but not deepspeed: that import is
most of the time of a small test. What a file has shown is kept, so that a run that was ended goes
on where it was.

The harness is this project's, also where a tree has one: upstream's skips on a host that does not
say how many ranks it is for, and finds nothing in files that are not below its own folder. The
tests run from where they are kept, therefore, and import nothing of the tree but its package.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent

NOT_RUN = "did not run"
TIMEOUT_S = "3600"
"""After that ranks are given up: machines may be busy, and no test waits for this limit, with or
without its fix. Beside fifteen other processes on two cores none took a minute.
"""
ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "DS_UNITTEST_TIMEOUT": TIMEOUT_S,
    # Upstream compiles the gate of experts; a C++ compiler for each rank takes minutes.
    "TORCH_COMPILE_DISABLE": "1",
}
HARNESS = (
    HERE / "harness.py",
    ROOT / "tests" / "unit" / "common.py",
    ROOT / "tests" / "unit" / "rank_server.py",
)
"""What a result depends on beside the tree and the test file."""


@dataclass(frozen=True)
class Counts:
    """How many tests of one file ended how. Ranks that were given up show nothing, neither a fault
    nor its absence: a busy machine does that too.
    """

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    given_up: int = 0

    def __str__(self) -> str:
        words = [
            f"{number} {word}"
            for number, word in (
                (self.given_up, "given up"),
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
        return self.passed > 0 and self.failed == self.given_up == 0

    @property
    def bad(self) -> bool:
        """Whether something failed and every test came to its end."""
        return self.failed > 0 and self.given_up == 0


@dataclass(frozen=True)
class Run:
    """Test files to be run on the package of a tree.

    Attributes:
        tree: Root of an upstream source tree.
        files: What pytest runs; nothing but imports the package.
        log: File for what is printed.
        label: What the progress calls it.
        state: What the tree is; a result counts for the same state and the same test only.
    """

    tree: Path
    files: tuple[Path, ...]
    log: Path
    label: str = ""
    state: str = ""

    @property
    def results(self) -> Path:
        """Where the child leaves the counts."""
        return self.log.with_suffix(".json")

    def key(self, file: Path) -> str:
        """Of a result: changes with everything that a test file's result depends on."""
        parts = [self.state, sys.version, importlib.metadata.version("torch")]
        parts += [path.read_text(encoding="utf-8") for path in (file, *HARNESS)]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def known(self) -> dict[str, dict[str, Any]]:
        """What has been found before, by file name, with the key that it was found under."""
        if not self.results.exists():
            return {}
        known: dict[str, dict[str, Any]] = json.loads(self.results.read_text(encoding="ascii"))
        return known

    def keep(self, file: Path, counts: dict[str, int]) -> None:
        """Keep what a file has shown."""
        entry = {"key": self.key(file), "counts": counts}
        partial = self.results.with_suffix(".partial")
        text = json.dumps({**self.known(), file.name: entry}, indent=1)
        partial.write_text(text, encoding="ascii")
        partial.rename(self.results)

    def counts(self) -> dict[str, Counts]:
        """By file name; zeros for those that have not come to their end."""
        known, found = self.known(), {}
        for file in self.files:
            entry = known.get(file.name, {})
            kept = entry.get("counts", {}) if entry.get("key") == self.key(file) else {}
            found[file.name] = Counts(**kept)
        return found

    def missing(self) -> tuple[Path, ...]:
        """The files that are to be run: without a result, or with ranks that were given up."""
        counts = self.counts()
        return tuple(
            file
            for file in self.files
            if counts[file.name] == Counts() or counts[file.name].given_up
        )


class Progress:
    """Says what has been done, one line each, from whichever process has done it.

    Args:
        total: Test files to be run.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = multiprocessing.get_context("fork").Value("i", 0)
        self._begin = time.monotonic()
        sys.stdout.flush()
        # What a child prints goes into its log.
        self._output = os.dup(1)

    def say(self, text: str) -> None:
        """Print a line."""
        os.write(self._output, f"{text}\n".encode())

    def file(self, where: str, file: Path, counts: dict[str, int]) -> None:
        """A file has come to its end."""
        with self._done.get_lock():
            self._done.value += 1
            done = self._done.value
        minutes, seconds = divmod(round(time.monotonic() - self._begin), 60)
        at = f"[{done} of {self._total}, {minutes}:{seconds:02}]"
        self.say(f"{at} {where}: {file.name}: {Counts(**counts)}")


def run_all(runs: Sequence[Run], jobs: int) -> None:
    """Run what is missing of all of them, ``jobs`` at a time, and say how far that is."""
    os.environ.update(ENVIRONMENT)
    # startup: children inherit what is imported here.
    import numpy  # noqa: F401
    import pydantic  # noqa: F401
    import pytest  # noqa: F401
    import torch  # noqa: F401

    progress = Progress(sum(len(one.missing()) for one in runs))
    children: set[int] = set()
    for one in runs:
        if one.files and not one.missing():
            continue
        one.log.parent.mkdir(parents=True, exist_ok=True)
        if len(children) >= jobs:
            children.discard(os.wait()[0])
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = _in_child(one, progress)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
        children.add(child)
    while children:
        children.discard(os.wait()[0])


def _in_child(one: Run, progress: Progress) -> int:
    import pytest
    from tally import Tally

    output = os.open(one.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(one.tree)
    # Whatever upstream compiles when it is first used: not beside what other runs or people compile.
    os.environ["TORCH_EXTENSIONS_DIR"] = str(one.log.with_suffix(".extensions"))
    sys.path[:0] = [str(one.tree), str(ROOT / "tests"), str(HERE)]
    if not one.files:
        import deepspeed

        print(deepspeed.__file__)
        return 0

    def keep(file: Path, counts: dict[str, int]) -> None:
        one.keep(file, counts)
        progress.file(one.label, file, counts)

    def tell(test: str, outcome: str, seconds: float) -> None:
        progress.say(f"  {one.label}: {test}: {outcome} ({seconds:.0f} s)")

    return int(
        pytest.main(
            ["-v", "-rf", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(HERE)]
            + ["--continue-on-collection-errors", "-p", "harness", *map(str, one.missing())],
            plugins=[Tally(keep, tell)],
        )
    )

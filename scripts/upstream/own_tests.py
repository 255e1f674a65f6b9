"""Upstream's own unit tests of the files that the fixes touch, before and after, under the checkout's
own harness: a difference is what a fix has changed beside what it is for. The regression tests run
there, too.

All of it happens in one folder, one branch after the other, so that what upstream compiles when it
is first used is compiled once, for this folder, and before any test has a time limit: a build that
is killed leaves a lock, for which later starts would wait for ever.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fix import APPLIED, Fix, Outcome
from runs import ENVIRONMENT, HERE, NOT_RUN, Counts

FOLDER = "tests/unit"
STUCK_S = 2 * 3600.0
"""Without the beginning or the end of a test for so long, a file is given up. Longer than the limit
of the checkout's harness, which says more than this one can.
"""
COMPILE = """
import importlib, sys
if sys.argv[1] == "shared memory":
    # By name: an attribute of the same name is torch.
    vars(importlib.import_module("deepspeed.comm.torch"))["build_shm_op"]()
else:
    from deepspeed.accelerator import get_accelerator
    get_accelerator().create_op_builder(sys.argv[1]).load()
"""
OPS = {"shared memory": "", "FusedAdamBuilder": "Adam", "CPUAdamBuilder": "Adam"}
"""What upstream compiles when it is first used, by the word in a test file that leads to it: the op
of every process group on one host, and those of the usual optimizer.
"""


def _names_one_of(text: str, modules: Sequence[str]) -> bool:
    for module in modules:
        parent, _, last = module.rpartition(".")
        imported = rf"from\s+{re.escape(parent)}\s+import\s+(?:\([^)]*|[^\n(]*)\b{last}\b"
        if re.search(rf"\b{re.escape(module)}\b|{imported}", text):
            return True
    return False


def chosen(tree: Path, fixes: Sequence[tuple[Fix, Outcome]]) -> tuple[str, ...]:
    """The test files of ``tree`` that are about what the fixes touch: first those that name a touched
    module, then the others in the folders of these modules and of the regression tests.
    """
    applied = [(one, outcome) for one, outcome in fixes if outcome.what == APPLIED]
    touched = sorted({file for _, outcome in applied for file in outcome.files})
    modules = [file.removesuffix(".py").replace("/", ".") for file in touched]
    folders = {one.folder for one, _ in applied}
    folders |= {str(Path(FOLDER, *Path(file).parts[1:-1])) for file in touched}
    naming, beside = [], []
    for path in sorted((tree / FOLDER).rglob("test_*.py")):
        name = path.relative_to(tree).as_posix()
        if _names_one_of(path.read_text(encoding="utf-8", errors="replace"), modules):
            naming.append(name)
        elif path.parent.relative_to(tree).as_posix() in folders:
            beside.append(name)
    return (*naming, *beside)


@dataclass
class Shown:
    """What one test file has shown on one branch.

    Attributes:
        tests: Outcome by name of the test.
        whole: Whether it has come to its end.
    """

    tests: dict[str, str] = field(default_factory=dict)
    whole: bool = False


@dataclass(frozen=True)
class Compared:
    """The tests of a checkout, before and after.

    Attributes:
        before: Outcome by test, without any fix.
        after: The same with all fixes, of the tests that have ended before.
        again: The outcomes (before, after) of those that differed, when they ran a second time.
        regressions: The regression tests under the checkout's harness, with all fixes.
        files: How many files these tests are in.
        left: How many files did not come to their end: for lack of time, or because their harness
            has ended the run.
    """

    before: Mapping[str, str]
    after: Mapping[str, str]
    again: Mapping[str, tuple[str, str]]
    regressions: Counts
    files: int
    left: int = 0

    @property
    def lasting(self) -> dict[str, tuple[str, str]]:
        """The outcomes of tests that differ, and did so both times."""
        pairs = {test: (how, self.after.get(test, NOT_RUN)) for test, how in self.before.items()}
        return {
            test: (old, new)
            for test, (old, new) in pairs.items()
            if old != new and self.again.get(test) == (old, new)
        }

    @property
    def good(self) -> bool:
        """Whether nothing that passes before does not after."""
        return all(old != "passed" for old, _ in self.lasting.values())

    def text(self) -> str:
        """A few sentences for people."""
        after = "the same"
        if self.lasting:
            changes = (f"{test} ({old}, then {new})" for test, (old, new) in self.lasting.items())
            after = f"{_counts(self.after)}; different: {'; '.join(sorted(changes))}"
        parts = [
            f"Upstream's own tests of the files touched ({self.files} files): {_counts(self.before)} "
            f"before; after: {after}."
        ]
        if unsteady := len(self.again) - len(self.lasting):
            parts.append(f"{unsteady} differed once, and not again.")
        if self.left:
            parts.append(f"{self.left} files did not come to their end.")
        parts.append(f"The regression tests under the checkout's harness: {self.regressions}.")
        return " ".join(parts)


class Suite:
    """The test suite of a checkout.

    Args:
        tree: A copy of the checkout; it is switched between branches.
        logs: Where output and results are kept.
        extensions: Where upstream's ops are compiled.
        say: Prints a line.
    """

    def __init__(
        self, tree: Path, logs: Path, extensions: Path, say: Callable[[str], None]
    ) -> None:
        self._tree = tree
        self._logs = logs
        self._extensions = extensions
        self._say = say
        self._results = logs / "own-tests.json"
        self._key = ""
        self._built: set[str] = set()
        self._known: dict[str, dict[str, Shown]] = {}
        self._environment = {
            **os.environ,
            **ENVIRONMENT,
            # How many ranks upstream's harness takes a host for.
            "LOCAL_SIZE": "2",
            "TORCH_EXTENSIONS_DIR": str(extensions),
            "PYTHONPATH": os.pathsep.join(map(str, (tree, tree / "tests", HERE))),
            "PYTHONUNBUFFERED": "1",
        }
        logs.mkdir(parents=True, exist_ok=True)
        if self._results.exists():
            stored = json.loads(self._results.read_text(encoding="utf-8"))
            self._known = {
                key: {file: Shown(**entry) for file, entry in files.items()}
                for key, files in stored.items()
            }

    def switch(self, branch: str, state: str) -> None:
        """Check out ``branch``, whose tree git calls ``state``."""
        git = ["git", "-C", str(self._tree), "checkout", "--quiet", "--force", branch]
        subprocess.run(git, check=True)
        versions = (sys.version, importlib.metadata.version("torch"))
        self._key = hashlib.sha256("\0".join((state, *versions)).encode()).hexdigest()

    def run(
        self, files: Mapping[str, Sequence[str]], label: str, seconds: float = float("inf")
    ) -> dict[str, Shown]:
        """Run test files on the branch that is checked out, or take what is known of them. Of a file
        with names only these tests run. The progress and the log are named by ``label``. After
        ``seconds`` no test begins.
        """
        end = time.monotonic() + seconds
        known = self._known.setdefault(self._key, {})
        for number, (file, only) in enumerate(files.items()):
            shown = known.get(file, Shown())
            if shown.whole or (only and shown.tests.keys() >= set(only)):
                continue
            # No file takes the time of all that follow.
            share = (end - time.monotonic()) / (len(files) - number)
            if share <= 0:
                break
            self._say(f"[{number + 1} of {len(files)}] {label}: {file}")
            known[file] = self.once(file, only, label, share)
            known[file].whole &= not only
            self._keep()
        return {file: known.get(file, Shown()) for file in files}

    def _keep(self) -> None:
        partial = self._results.with_suffix(".partial")
        partial.write_text(json.dumps(self._known, indent=1, default=vars), encoding="utf-8")
        partial.rename(self._results)

    def _compile(self, file: str) -> None:
        """Build the ops that ``file`` may need and this command has not built, without a limit."""
        self._extensions.mkdir(parents=True, exist_ok=True)
        for lock in self._extensions.rglob("lock"):
            # Of something that was killed while it built; nothing else uses the folder.
            lock.unlink()
        text = (self._tree / file).read_text(encoding="utf-8", errors="replace")
        log = self._logs / "compile.log"
        for op, word in OPS.items():
            if word in text and op not in self._built:
                self._built.add(op)
                self._say(f"building upstream's op {op!r} once; output: {log}")
                with log.open("a", encoding="utf-8") as output:
                    # Upstream trains without what cannot be built.
                    subprocess.run(
                        [sys.executable, "-c", COMPILE, op],
                        cwd=self._tree,
                        env=self._environment,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )

    def once(
        self, file: str, only: Sequence[str], label: str, seconds: float = float("inf")
    ) -> Shown:
        """Run one file, in a process of its own, whatever is known of it."""
        self._compile(file)
        record = self._logs / "own-tests.record"
        record.write_text("", encoding="utf-8")
        tests = self._tree / "tests"
        # Without settings of its own pytest would find those of the folders above, which are ours.
        settings = tests / "pytest.ini" if (tests / "pytest.ini").is_file() else os.devnull
        command = [sys.executable, "-m", "pytest", "-v", "-rf", "-p", "no:cacheprovider"]
        command += ["-c", str(settings), "--rootdir", str(tests)]
        command += ["-p", "record", str(Path(file).relative_to("tests"))]
        asked = {"UPSTREAM_RECORD": str(record), "UPSTREAM_ONLY": json.dumps(list(only))}
        with (self._logs / f"own-tests-{label}.log").open("a", encoding="utf-8") as output:
            child = subprocess.Popen(
                command,
                cwd=tests,
                env={**self._environment, **asked, "UPSTREAM_SECONDS": str(seconds)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # What a harness starts ends with it.
                start_new_session=True,
            )
        try:
            return self._watch(child, record, label)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()

    def _watch(self, child: subprocess.Popen[bytes], record: Path, label: str) -> Shown:
        """Read what the plugin writes, until the run has ended or is stuck."""
        tests: dict[str, str] = {}
        running, last, ended, rest = "", time.monotonic(), False, ""
        with record.open(encoding="utf-8") as file:
            while not ended and time.monotonic() - last < STUCK_S:
                # Asked first: what was written before the end is read after it.
                ended = child.poll() is not None
                *lines, rest = (rest + file.read()).split("\n")
                for test, *end in map(json.loads, lines):
                    last, running = time.monotonic(), "" if end else test
                    if end:
                        tests[test] = end[0]
                        self._say(f"  {label}: {test}: {end[0]} ({end[1]:.0f} s)")
                time.sleep(0 if ended else 0.2)
        if running:
            # The harness has ended pytest, or hangs: the test shows nothing.
            tests[running] = "given_up"
        # pytest's codes for: all passed, some failed, none there. A run out of time has another.
        return Shown(tests, ended and child.returncode in (0, 1, 5) and not running)


def compare(
    suite: Suite,
    fixes: Sequence[tuple[Fix, Outcome]],
    files: Sequence[str],
    base: tuple[str, str],
    every: tuple[str, str],
    minutes: float,
) -> Compared:
    """Run ``files`` on two branches, each given by its name and the state of its tree, and the
    regression tests of the applied fixes on the second. After so many minutes no other test begins
    on the first branch; the second runs what has run on the first.
    """
    suite.switch(*base)
    before = suite.run(dict.fromkeys(files, ()), "before", minutes * 60)
    ran = {file: tuple(shown.tests) for file, shown in before.items() if shown.tests}
    suite.switch(*every)
    after = suite.run(ran, "after")
    added = [one.test_path for one, outcome in fixes if outcome.what == APPLIED]
    regressions = suite.run(dict.fromkeys(added, ()), "regressions")
    old, new = _outcomes(before.values()), _outcomes(after.values())
    twice = {
        file: [test for test in tests if old[test] != new.get(test, NOT_RUN)]
        for file, tests in ran.items()
    }
    twice = {file: tests for file, tests in twice.items() if tests}
    new_again = _outcomes([suite.once(file, twice[file], "after-again") for file in twice])
    suite.switch(*base)
    old_again = _outcomes([suite.once(file, twice[file], "before-again") for file in twice])
    again = {
        test: (old_again.get(test, NOT_RUN), new_again.get(test, NOT_RUN))
        for tests in twice.values()
        for test in tests
    }
    left = sum(not shown.whole for shown in before.values())
    return Compared(old, new, again, _counts(_outcomes(regressions.values())), len(ran), left)


def _outcomes(shown: Iterable[Shown]) -> dict[str, str]:
    return {test: outcome for one in shown for test, outcome in one.tests.items()}


def _counts(outcomes: Mapping[str, str]) -> Counts:
    return Counts(**Counter(outcomes.values()))

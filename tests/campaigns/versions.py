"""Which versions are truly supported: the suite with the oldest, a middle and the newest torch and
Python, the clients' tests with the oldest and newest of each library. Each has an environment,
into which the version in question goes first; all else is as `make test` pins it.
"""

import argparse
import datetime
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from campaigns import support_table
from campaigns.campaign import RESULTS, ROOT, Campaign, run_and_keep
from campaigns.support_table import BETWEEN, NEWEST, OLDEST, Row, numbers_of

DOCUMENT = ROOT / "docs" / "support.md"
PINS = ROOT / "requirements" / "requirements-ci.txt"
# Where the claim of each package stands, and the tests that are run for it.
CLAIMED_IN = {
    "torch": "requirements.txt",
    **dict.fromkeys(("accelerate", "transformers"), "requirements-transformers.txt"),
    **dict.fromkeys(("lightning", "trl", "peft"), "requirements-clients.txt"),
}
PYTHON = "python"
PYTHONS = {OLDEST: "3.10", BETWEEN: "3.11", NEWEST: "3.13"}
PACKAGES = (PYTHON, *CLAIMED_IN)
# What `python -m` runs, and the library's pages and scenarios where they are no tests of pytest.
WHOLE, OF_CLIENTS = "pytest tests/unit", "pytest tests/unit/clients"
SUITES = {
    **dict.fromkeys((PYTHON, "torch"), WHOLE),
    **dict.fromkeys(("accelerate", "transformers"), OF_CLIENTS),
    "lightning": "unit.clients.matrix lightning fabric",
    **{package: f"unit.clients.matrix {package}" for package in ("trl", "peft")},
}
# Of the tools; its pins ask for a newer packaging than the oldest clients take.
NOT_FOR_TESTS = ("pre-commit",)
# What a client's oldest version imports and does not ask for.
ALSO = {"trl": ("requests",)}
TORCH_BETWEEN = "2.9.1"


@dataclass(frozen=True)
class Target:
    """One version to run; `NEWEST` is the index's newest, of `PYTHON` an interpreter's."""

    package: str
    version: str

    def __str__(self) -> str:
        return f"{self.package}-{self.version}"

    @property
    def interpreter(self) -> str:
        """What makes the environment."""
        return f"python{self.version}" if self.package == PYTHON else sys.executable

    @property
    def requirement(self) -> str:
        """What pip is asked for; of `PYTHON` the pinned torch."""
        if self.package == PYTHON:
            return f"torch=={pins(PINS.read_text(encoding='ascii'))['torch']}"
        return self.package if self.version == NEWEST else f"{self.package}=={self.version}"


def floor(package: str) -> str:
    """The oldest version that the requirements accept; a ValueError if they name none."""
    text = (ROOT / "requirements" / CLAIMED_IN[package]).read_text(encoding="ascii")
    found = re.search(rf"^{package}>=([\d.]+)", text, re.MULTILINE)
    if found is None:
        raise ValueError(f"requirements/{CLAIMED_IN[package]}: no line '{package}>=VERSION'")
    return found.group(1)


def pins(text: str) -> dict[str, str]:
    """Version by name of a requirements file or of what `pip freeze` prints."""
    found = re.findall(r"^([A-Za-z0-9._-]+)==([^\s;]+)", text, re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}


def constraints(pinned: dict[str, str], installed: dict[str, str]) -> str:
    """What pip must keep to: what is installed stays, the rest comes as it is pinned."""
    return "".join(f"{name}=={version}\n" for name, version in sorted((pinned | installed).items()))


def claims() -> list[Row]:
    """What is claimed, as rows that have not been run."""
    rows = [Row(PYTHON, version, which) for which, version in PYTHONS.items()]
    rows.append(Row("torch", TORCH_BETWEEN, BETWEEN))
    for package in CLAIMED_IN:
        rows += [Row(package, floor(package), OLDEST), Row(package, "", NEWEST)]
    return sorted(rows, key=lambda row: PACKAGES.index(row.package))


def targets(only: Sequence[str]) -> list[Target]:
    """What to run: the versions that ``only`` names (``PACKAGE=VERSION``), or all claimed."""
    if not only:
        return [Target(row.package, row.version or NEWEST) for row in claims()]
    found = []
    for word in only:
        package, _, version = word.partition("=")
        if package not in PACKAGES or not version:
            one_of = f"PACKAGE one of {', '.join(PACKAGES)}, VERSION a version or '{NEWEST}'"
            raise ValueError(f"--only {word}: write PACKAGE=VERSION, {one_of}")
        found.append(Target(package, version))
    return found


def _is_same(claimed: str, version: str, package: str) -> bool:
    """Whether this version is the claimed one; of Python any release of it."""
    found = numbers_of(version)
    return numbers_of(claimed) == (found[:2] if package == PYTHON else found)


def _which(target: Target, version: str) -> str:
    if target.version == NEWEST and target.package != PYTHON:
        return NEWEST
    mine = [row for row in claims() if row.package == target.package]
    same = (row.which for row in mine if _is_same(row.version, version, target.package))
    return next(same, "")


class Environment:
    """The virtual environment of one target in ``folder``, made by `install`."""

    def __init__(self, folder: Path, pip_args: Sequence[str]) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        self._pip = [str(self.python), "-m", "pip", "--disable-pip-version-check"]
        self._install = [*self._pip, "install", "--quiet", *pip_args]

    def variables(self) -> dict[str, str]:
        """The environment of a command that uses it: its programs first, and no other code."""
        kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
        path = f"{self.folder / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        tests = {"PYTHONPATH": str(ROOT / "tests")}
        return {**kept, **tests, "PATH": path, "OMP_NUM_THREADS": "1"}

    def steps(
        self, target: Target, constraint_file: Path, also: Sequence[str] = ()
    ) -> tuple[list[list[str]], list[list[str]]]:
        """The commands before and after ``constraint_file`` is written."""
        folder = ROOT / "requirements"
        tools = (folder / "requirements-dev.txt").read_text(encoding="ascii").split()
        first = [[target.interpreter, "-m", "venv", str(self.folder)]]
        wanted = [target.requirement, *also]
        if target.package not in ("torch", PYTHON):
            # torch alone before it: no other package's requirement may choose its build.
            pinned = f"torch=={pins(PINS.read_text(encoding='ascii'))['torch']}"
            first.append([*self._install, pinned])
            wanted.append(pinned)
        first.append([*self._install, *wanted])
        rest = [*self._install, "-c", str(constraint_file), "setuptools"]
        rest += ["-r", str(folder / "requirements.txt")]
        rest += [tool for tool in tools if tool not in NOT_FOR_TESTS]
        package = [*self._install, "--no-deps", "--no-build-isolation", "-e", str(ROOT)]
        return first, [rest, package]

    def installed(self) -> dict[str, str]:
        """Version by name of all that is installed, `PYTHON` among them."""
        told = "import platform; print(f'python=={platform.python_version()}')"
        version = self._call([str(self.python), "-c", told], capture=True)
        return pins(version + self._call([*self._pip, "freeze"], capture=True))

    def install(self, target: Target, also: Sequence[str] = ()) -> None:
        """Make it, with the newest of the packages ``also``; raises what a command raises."""
        constraint_file = self.folder / "constraints.txt"
        first, rest = self.steps(target, constraint_file, also)
        for command in first:
            self._call(command)
        text = PINS.read_text(encoding="ascii")
        if target.package != PYTHON:  # for another Python, as the file says it
            kept = {name: at for name, at in self.installed().items() if name != PYTHON}
            text = constraints(pins(text), kept)
        constraint_file.write_text(text, encoding="ascii")
        for command in rest:
            self._call(command)

    def _call(self, command: Sequence[str], capture: bool = False) -> str:
        print("+", shlex.join(command), flush=True)
        kept = subprocess.PIPE if capture else None
        done = subprocess.run(command, env=self.variables(), check=True, text=True, stdout=kept)
        return done.stdout or ""


def run_target(target: Target, venvs: Path, arguments: argparse.Namespace) -> Row:
    """Install, run the tests, remove the environment; returns the row."""
    environment = Environment(venvs / str(target), arguments.pip_args)
    try:
        environment.install(target, ALSO.get(target.package, ()))
        installed = environment.installed()
        version = installed[target.package].split("+")[0]
        log = RESULTS / "versions" / f"{target.package}-{version}.log"
        tests = [str(environment.python), "-m", *_tests(target, arguments)]
        run_and_keep(tests, log, environment.variables())
    finally:
        if not arguments.keep:
            shutil.rmtree(environment.folder, ignore_errors=True)
    others = [name for name in PACKAGES if name != target.package]
    beside = ", ".join(f"{name} {installed[name]}" for name in others if name in installed)
    counts = support_table.parse_counts(log.read_text(encoding="utf-8", errors="replace"))
    today = datetime.date.today().isoformat()
    return Row(target.package, version, _which(target, version), beside, today, counts)


def _tests(target: Target, arguments: argparse.Namespace) -> list[str]:
    tests = f"pytest {arguments.tests}" if arguments.tests else SUITES[target.package]
    return shlex.split(tests)


def add_pip_arguments(parser: argparse.ArgumentParser) -> None:
    """What environments hand to pip."""
    flags = "flags for pip, in one word"
    parser.add_argument("--pip-args", type=shlex.split, default=[], help=flags)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The campaign's own arguments."""
    several = "this version instead of all that are claimed; may be given several times"
    word = "PACKAGE=VERSION"
    parser.add_argument("--only", action="append", default=[], metavar=word, help=several)
    of_pytest = "what pytest runs, instead of the suite or what the client has"
    parser.add_argument("--tests", help=of_pytest)
    folder = "folder of the environments (default: a temporary one)"
    parser.add_argument("--venvs", type=Path, help=folder)
    parser.add_argument("--keep", action="store_true", help="leave the environments there")
    add_pip_arguments(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the commands only")


def run(arguments: argparse.Namespace) -> int:
    """Run the versions one after the other; the document is written after each."""
    if arguments.tests and arguments.output == DOCUMENT and not arguments.dry_run:
        told = f"{DOCUMENT.relative_to(ROOT)} holds results of whole suites only"
        told += "; name another file with --output"
        print(f"--tests {arguments.tests}: {told}", file=sys.stderr)
        return 2
    try:
        wanted = targets(arguments.only)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if arguments.dry_run:
        return _print_commands(wanted, arguments)
    failures = 0
    with tempfile.TemporaryDirectory(prefix="versions-") as temporary:
        for target in wanted:
            try:
                row = run_target(target, arguments.venvs or Path(temporary), arguments)
            except (subprocess.CalledProcessError, ValueError) as error:
                print(f"{target}: no result: {error}", file=sys.stderr)
                failures += 1
                continue
            failures += row.counts is not None and row.counts.failed > 0
            write(arguments.output, [row])
            print(f"{target}: {row.line()}", flush=True)
    return 1 if failures else 0


def write(document: Path, rows: Sequence[Row]) -> None:
    """Merge ``rows`` into ``document``, which need not be there."""
    old = support_table.parse(document.read_text(encoding="utf-8")) if document.exists() else []
    document.parent.mkdir(parents=True, exist_ok=True)
    merged = support_table.merge(old, rows)
    document.write_text(support_table.render(merged, claims()), encoding="utf-8")


def _print_commands(wanted: Sequence[Target], arguments: argparse.Namespace) -> int:
    for target in wanted:
        folder = (arguments.venvs or Path("VENVS")) / str(target)
        environment = Environment(folder, arguments.pip_args)
        also = ALSO.get(target.package, ())
        first, rest = environment.steps(target, folder / "constraints.txt", also)
        tests = [str(environment.python), "-m", *_tests(target, arguments)]
        print(f"# {target}", *(shlex.join(command) for command in [*first, *rest, tests]), sep="\n")
    return 0


SUMMARY = "the suite with other versions of Python and torch, and each client library's tests"
CAMPAIGN = Campaign("versions", f"{SUMMARY} (hours)", add_arguments, run, DOCUMENT)

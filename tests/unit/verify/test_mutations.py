"""The mutation table: each fault put into a copy of the package is found by the tool that users
run, which names the right place.

    make campaign NAME=mutations        prints the table

Kills: a guard that is switched off, blind, or says "something is wrong somewhere".
"""

from __future__ import annotations

import ast
import compileall
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from py_compile import PycInvalidationMode

import pytest

from unit.mutation.table import REPOSITORY, UNDO_FIXES
from unit.verify.faults import MUTATIONS
from unit.verify.mutants import MutantRunner
from unit.verify.mutation_form import Mutation
from unit.verify.scenarios import NAN_OVER_SEEDS, SCENARIOS, world_of

TABLE_ENV = "DS_MUTATION_TABLE"


@pytest.fixture(scope="module")
def runner() -> Iterator[MutantRunner]:
    """Runs scenarios against copies of the package."""
    started = MutantRunner()
    yield started
    started.close()


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a copy of the package; each test puts its fault in and takes it out."""
    root = tmp_path_factory.mktemp("mutants")
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
    shutil.copytree(REPOSITORY / "deepspeed", root / "deepspeed", ignore=ignore)
    shutil.copytree(REPOSITORY / "op_builder", root / "op_builder", ignore=ignore)
    shutil.copy(REPOSITORY / "version.txt", root)
    # A fault may be as long as what it replaces, and its file as old.
    compileall.compile_dir(root, quiet=1, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
    return root


@pytest.fixture(scope="module")
def table() -> Iterator[list[str]]:
    """Rows of the table that `make campaign NAME=mutations` prints."""
    rows: list[str] = []
    yield rows
    if TABLE_ENV in os.environ:
        Path(os.environ[TABLE_ENV]).write_text("\n".join(rows) + "\n", encoding="utf-8")


def what_it_says(found: list[str]) -> str:
    """The first finding in one short line: the second line of an error whose first one only
    announces it.
    """
    lines = re.sub(r"^rank \d+: |\S*/(?=deepspeed/)", "", found[0]).splitlines() if found else ["-"]
    announces = lines[0].endswith((":", ".")) and len(lines) > 1
    return (f"{lines[0].partition(':')[0]}: {lines[1].strip()}" if announces else lines[0])[:160]


@pytest.mark.parametrize(
    "mutation", MUTATIONS, ids=lambda mutation: mutation.name.replace(" ", "-")
)
def test_the_guard_finds_the_fault(
    mutation: Mutation, runner: MutantRunner, package: Path, table: list[str]
) -> None:
    """It does, and one finding names the place."""
    before, after = mutation.fault.apply(package)
    ast.parse(after, mutation.file)
    (package / mutation.file).write_text(after, encoding="utf-8")
    try:
        found = runner.run(package, mutation.scenario, world_of(mutation.scenario))
    finally:
        (package / mutation.file).write_text(before, encoding="utf-8")
    table.append(f"{mutation.guard:8} {mutation.name:50} {what_it_says(found)}")
    assert found, f"{mutation.guard} was silent about: {mutation.name}"
    assert any(re.search(mutation.names, finding) for finding in found), "\n".join(found)[:4000]


def test_the_nan_of_issue_8061_appears_without_fix_1(runner: MutantRunner, package: Path) -> None:
    """In every one of 20 runs, and under the default schedule already. With the fix in none: the
    control below runs it too.
    """
    fix1 = UNDO_FIXES[0]
    before, after = fix1.apply(package)
    (package / fix1.file).write_text(after, encoding="utf-8")
    try:
        found = runner.run(package, NAN_OVER_SEEDS)
    finally:
        (package / fix1.file).write_text(before, encoding="utf-8")
    runs = {re.sub(r"^rank \d+: |: the gradient.*$", "", finding) for finding in found}
    assert {f"seed {seed}, schedule 0" for seed in range(20)} <= runs, sorted(runs)
    assert len(runs) > 0.9 * 20 * 8, sorted(runs)


@pytest.mark.parametrize(
    "scenario", SCENARIOS, ids=lambda scenario: re.sub(r"[ :,]+", "-", scenario)
)
def test_without_a_fault_the_guard_is_silent(
    scenario: str, runner: MutantRunner, package: Path, table: list[str]
) -> None:
    """The control: it is the fault that is found."""
    found = runner.run(package, scenario, world_of(scenario))
    table.append(
        f"{scenario.partition(':')[0]:8} (no fault){scenario.partition(':')[2]:40} "
        f"{what_it_says(found)}"
    )
    assert not found, "\n".join(found)[:4000]

"""`ds_verify` finds faults of the package, and its table names the place.

Kills: a check, or a size of a check, that leaves a path of an engine out. `make campaign
NAME=command-faults` runs the command itself with every fault, as users do.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path

import pytest

from unit.mutation.table import REPOSITORY
from unit.verify.command_faults import COMMAND_FAULTS, SAMPLE, SETUPS, failing_rows, run_command
from unit.verify.faults import Mutation
from unit.verify.mutants import findings

TABLE_ENV = "DS_COMMAND_FAULTS_TABLE"
LIMIT_S = 900.0


def put_in_table(setup: str, fault: str, row: str, began: float) -> None:
    """One line of what `make campaign NAME=command-faults` prints."""
    if TABLE_ENV in os.environ:
        line = f"{setup:26} {fault:68} {time.monotonic() - began:4.0f} s  {row[:200]}"
        with Path(os.environ[TABLE_ENV]).open("a", encoding="utf-8") as table:
            table.write(line.rstrip() + "\n")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package, with the bytecode that is there: making it takes many seconds."""
    folder = tmp_path_factory.mktemp("package")
    for name in ("deepspeed", "op_builder"):
        shutil.copytree(REPOSITORY / name, folder / name)
    shutil.copy(REPOSITORY / "version.txt", folder)
    return folder


def ids(fault: Mutation) -> str:
    return f"{fault.test}: {fault.name}".replace(" ", "-")


@pytest.mark.contract
@pytest.mark.parametrize("fault", COMMAND_FAULTS, ids=ids)
def test_the_command_finds_the_fault(fault: Mutation, root: Path) -> None:
    began, changed = time.monotonic(), fault.apply(REPOSITORY)
    for file, (_, mutated) in changed.items():
        (root / file).write_text(mutated, encoding="utf-8")
    code, said = run_command(root, fault.test, LIMIT_S)
    for file, (before, _) in changed.items():
        (root / file).write_text(before, encoding="utf-8")
    rows = failing_rows(said)
    named = [row for row in rows if re.search(fault.names, row)]
    put_in_table(fault.test, fault.name, (*named, "NOT NAMED" if rows else "NOT FOUND")[0], began)
    assert code == 1 and named, f"{code}\n{said[-6000:]}"


@pytest.mark.contract
@pytest.mark.parametrize("setup", SETUPS)
def test_without_a_fault_the_command_passes(setup: str, root: Path) -> None:
    """The control: it is the fault that is found."""
    began = time.monotonic()
    code, said = run_command(root, setup, LIMIT_S)
    put_in_table(setup, "(no fault)", *(failing_rows(said) or ["PASS"])[:1], began)
    assert code == 0, said[-6000:]


@pytest.mark.parametrize("fault", [f for f in COMMAND_FAULTS if f.name in SAMPLE], ids=ids)
def test_what_the_command_runs_finds_the_fault(fault: Mutation) -> None:
    """On ranks that are there, with a few of the runs."""
    found = findings(f"command: {fault.test}", 2, fault)
    assert any(re.search(fault.names, finding) for finding in found), "\n".join(found)[:4000]

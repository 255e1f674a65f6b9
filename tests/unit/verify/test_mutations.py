"""Each fault put into the package is found by the tool that users run, which names the place.

Kills: a guard that is off or blind. `make campaign NAME=mutations` prints the table.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from unit.mutation.table import UNDO_FIXES
from unit.verify.faults import MUTATIONS, Mutation
from unit.verify.mutants import findings
from unit.verify.scenarios import NAN_OVER_SEEDS, SCENARIOS, world_of

TABLE_ENV = "DS_MUTATION_TABLE"


@pytest.fixture(scope="module")
def table() -> Iterator[list[str]]:
    """Rows of the table that `make campaign NAME=mutations` prints."""
    rows: list[str] = []
    yield rows
    if TABLE_ENV in os.environ:
        Path(os.environ[TABLE_ENV]).write_text("\n".join(rows) + "\n", encoding="utf-8")


def what_it_says(found: list[str]) -> str:
    """The first finding in one short line: the second of an error whose first announces it."""
    lines = re.sub(r"^rank \d+: |\S*/(?=deepspeed/)", "", found[0]).splitlines() if found else ["-"]
    announces = lines[0].endswith((":", ".")) and len(lines) > 1
    return (f"{lines[0].partition(':')[0]}: {lines[1].strip()}" if announces else lines[0])[:160]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_the_guard_finds_the_fault(mutation: Mutation, table: list[str]) -> None:
    found = findings(mutation.test, world_of(mutation.test), mutation)
    table.append(f"{mutation.guard:8} {mutation.name:50} {what_it_says(found)}")
    assert found, f"{mutation.guard} was silent about: {mutation.name}"
    assert any(re.search(mutation.names, finding) for finding in found), "\n".join(found)[:4000]


def test_the_nan_of_issue_8061_appears_without_fix_1() -> None:
    """With every one of 7 seeds, under the default schedule; the fix's control is below."""
    found = findings(NAN_OVER_SEEDS, 2, UNDO_FIXES[0])
    runs = {re.sub(r"^rank \d+: |: the gradient.*$", "", finding) for finding in found}
    assert {f"seed {seed}, schedule 0" for seed in range(7)} <= runs, sorted(runs)
    assert len(runs) > 0.9 * 7 * 2, sorted(runs)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda name: re.sub(r"[ :,]+", "-", name))
def test_without_a_fault_the_guard_is_silent(scenario: str, table: list[str]) -> None:
    """The control: it is the fault that is found."""
    found = findings(scenario, world_of(scenario))
    guard, _, name = scenario.partition(":")
    table.append(f"{guard:8} (no fault){name:40} {what_it_says(found)}")
    assert not found, "\n".join(found)[:4000]

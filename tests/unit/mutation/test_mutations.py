"""Every guard guards: a copy of the package with one fault in it fails the test that is named.

By default the fixes of docs/fixes/ are undone, each as a whole; the campaign `contract` runs the
single faults too.
"""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from unit.mutation.table import FAULTS, REPOSITORY, UNDO_FIXES, Fault
from unit.verify.faults import MUTATIONS

# pytest's exit status when tests ran and some failed; a mutant that cannot even be imported ends
# otherwise or shows as such.
TESTS_FAILED = 1
LIMIT_S = 240


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A directory with a copy of the package."""
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
    shutil.copytree(REPOSITORY / "deepspeed", tmp_path / "deepspeed", ignore=ignore)
    shutil.copytree(REPOSITORY / "op_builder", tmp_path / "op_builder", ignore=ignore)
    shutil.copy(REPOSITORY / "version.txt", tmp_path)
    return tmp_path


def run_tests(root: Path, targets: list[str], select: str) -> subprocess.CompletedProcess[str]:
    """Run test files of the repository against the package below `root`."""
    path = os.pathsep.join([str(root), str(REPOSITORY / "tests")])
    # A rank that waits for a collective that a fault removed is given up early.
    early = {"OMP_NUM_THREADS": "1", "DS_UNITTEST_TIMEOUT": "30"}
    environment = {**os.environ, **early, "PYTHONPATH": path}
    options = "-m pytest -x -q --tb=short -p no:cacheprovider".split()
    command = [sys.executable, *options, "--rootdir", str(REPOSITORY)]
    command += ["-c", str(REPOSITORY / "pyproject.toml"), "-k", select]
    command += [str(REPOSITORY / "tests" / "unit" / target) for target in targets]
    how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": LIMIT_S}
    return subprocess.run(command, cwd=root, env=environment, **how)


def check(fault: Fault, package: Path) -> None:
    for file, (_, mutated) in fault.apply(REPOSITORY).items():
        (package / file).write_text(mutated, encoding="utf-8")
    test, _, select = fault.test.partition(" -k ")
    run = run_tests(package, [test], select)
    assert run.returncode == TESTS_FAILED, (
        f"{fault.name}: {fault.test} did not notice\n{run.stdout[-3000:]}{run.stderr[-1000:]}"
    )
    assert "ImportError" not in run.stdout and "NameError" not in run.stdout, run.stdout[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("fault", UNDO_FIXES, ids=lambda fault: fault.name)
def test_undoing_a_fix_is_noticed(fault: Fault, package: Path) -> None:
    check(fault, package)


@pytest.mark.contract
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_a_fault_is_noticed(fault: Fault, package: Path) -> None:
    check(fault, package)


@pytest.mark.contract
def test_a_copy_without_fault_passes(package: Path) -> None:
    """The control: it is the fault that fails, not the copy."""
    targets = sorted({fault.test.partition(" -k ")[0] for fault in (*UNDO_FIXES, *FAULTS)})
    run = run_tests(package, targets, "")
    assert run.returncode == 0, run.stdout[-3000:]


def test_every_fault_fits_the_code() -> None:
    """What it changes is found exactly once, and what it makes of the file is Python."""
    wrong = []
    for fault in (*UNDO_FIXES, *FAULTS, *MUTATIONS):
        try:
            for before, after in fault.apply(REPOSITORY).values():
                assert ast.dump(ast.parse(before)) != ast.dump(ast.parse(after))
        except ValueError as error:
            wrong.append(str(error))
    assert not wrong, "\n\n".join(wrong)

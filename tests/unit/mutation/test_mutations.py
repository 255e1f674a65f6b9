"""Every guard guards: a copy of the package with one fault in it fails the test that is named.

By default the fixes of docs/fixes/ are undone, each as a whole; the campaign `contract` runs the
single faults too.
"""

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from unit.mutation.table import FAULTS, REPOSITORY, UNDO_FIXES, Fault
from unit.mutation.table.fault import tree_of
from unit.verify.command_faults import COMMAND_FAULTS
from unit.verify.faults import MUTATIONS

# pytest's exit status when tests ran and some failed; a mutant that cannot even be imported ends
# otherwise or shows as such.
TESTS_FAILED = 1
LIMIT_S = 240


# Tests of each copy of the package in a process that has imported what is not of it.
RUN = """
import json, os, sys
import pytest, torch, torch._dynamo
assert "deepspeed" not in sys.modules
for root, *arguments in json.loads(sys.argv[1]):
    if not (child := os.fork()):
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(f"{root}/{name}", os.O_WRONLY | os.O_CREAT), number)
        os.chdir(root)
        sys.path[:0] = [root, sys.argv[2]]
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
        code = int(pytest.main(arguments))
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def package(folder: Path) -> Path:
    """The directory, with a copy of the package."""
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
    shutil.copytree(REPOSITORY / "deepspeed", folder / "deepspeed", ignore=ignore)
    shutil.copytree(REPOSITORY / "op_builder", folder / "op_builder", ignore=ignore)
    shutil.copy(REPOSITORY / "version.txt", folder)
    return folder


def run_tests(*runs: tuple[Path, list[str], str]) -> list[tuple[int, str]]:
    """Run test files of the repository against packages: in each folder, the files, which tests of
    them. Returns exit codes and what was said.
    """
    tests = REPOSITORY / "tests"
    options = "-x -q --tb=short -p no:cacheprovider --rootdir".split()
    options += [str(REPOSITORY), "-c", str(REPOSITORY / "pyproject.toml"), "-k"]
    calls = [
        [str(root), *options, select, *(str(tests / "unit" / target) for target in targets)]
        for root, targets, select in runs
    ]
    # A rank that waits for a collective that a fault removed is given up early.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_UNITTEST_TIMEOUT": "30"}
    environment.pop("PYTHONPATH", None)
    how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": LIMIT_S * len(runs)}
    command = [sys.executable, "-c", RUN, json.dumps(calls), str(tests)]
    run = subprocess.run(command, cwd=runs[0][0], env=environment, **how)
    codes = list(map(int, run.stdout.split()))
    assert len(codes) == len(runs), run.stderr
    said = [(root / "stdout").read_text() for root, _, _ in runs]
    return list(zip(codes, said, strict=True))


def check(folder: Path, *faults: Fault) -> None:
    runs = []
    for number, fault in enumerate(faults):
        root = package(folder / str(number))
        for file, (_, mutated) in fault.apply(REPOSITORY).items():
            (root / file).write_text(mutated, encoding="utf-8")
        test, _, select = fault.test.partition(" -k ")
        runs.append((root, [test], select))
    for fault, (code, said) in zip(faults, run_tests(*runs), strict=True):
        silent = f"{fault.name}: {fault.test} did not notice\n{said[-3000:]}"
        assert code == TESTS_FAILED, silent
        assert "ImportError" not in said and "NameError" not in said, said[-3000:]


@pytest.mark.slow
def test_undoing_a_fix_is_noticed(tmp_path: Path) -> None:
    check(tmp_path, *UNDO_FIXES)


@pytest.mark.contract
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_a_fault_is_noticed(fault: Fault, tmp_path: Path) -> None:
    check(tmp_path, fault)


@pytest.mark.contract
def test_a_copy_without_fault_passes(tmp_path: Path) -> None:
    """The control: it is the fault that fails, not the copy."""
    targets = sorted({fault.test.partition(" -k ")[0] for fault in (*UNDO_FIXES, *FAULTS)})
    [(code, said)] = run_tests((package(tmp_path), targets, ""))
    assert code == 0, said[-3000:]


def statements(block: Any, line: int) -> Iterator[ast.stmt]:
    """Those that end after a line, of a class that has begun before it those in it."""
    for node in block.body:
        if isinstance(node, ast.ClassDef) and node.body[0].lineno <= line:
            yield from statements(node, line)
        elif node.end_lineno > line:
            yield node


def are_other_programs(before: str, after: str) -> bool:
    """Whether the syntax trees of two texts differ, looked at from where the texts do."""
    lines = enumerate(zip(before.splitlines(), after.splitlines(), strict=False))
    same = next((number for number, (one, other) in lines if one != other), 0)
    parts = (statements(tree, same) for tree in (tree_of(before), ast.parse(after)))
    pairs = zip_longest(*parts, fillvalue=ast.Pass())
    return any(ast.dump(one) != ast.dump(other) for one, other in pairs)


def test_every_fault_fits_the_code() -> None:
    """What it changes is found exactly once, and what it makes of the file is Python."""
    wrong = []
    for fault in (*UNDO_FIXES, *FAULTS, *MUTATIONS, *COMMAND_FAULTS):
        try:
            for before, after in fault.apply(REPOSITORY).values():
                assert are_other_programs(before, after), f"{fault.name} changes nothing"
        except ValueError as error:
            wrong.append(str(error))
    assert not wrong, "\n\n".join(wrong)

"""Campaigns that are a selection of tests: pytest runs more of what the suite runs a share of."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from campaigns.campaign import Campaign, run_and_keep

Environment = Callable[[argparse.Namespace], dict[str, str]]


def _nothing(arguments: argparse.Namespace) -> dict[str, str]:
    return {}


def _add_pytest_arguments(parser: argparse.ArgumentParser) -> None:
    handed = "after --: handed to pytest"
    parser.add_argument("pytest_arguments", nargs="*", metavar="PYTEST_ARG", help=handed)


def _pytest(arguments: argparse.Namespace, selection: tuple[str, ...]) -> list[str]:
    return [sys.executable, "-m", "pytest", *selection, *arguments.pytest_arguments]


def printed(
    name: str, summary: str, *selection: str, environment: Environment = _nothing
) -> Campaign:
    """A campaign whose result is what pytest prints of ``selection``."""

    def run(arguments: argparse.Namespace) -> int:
        variables = {**os.environ, **environment(arguments)}
        return run_and_keep(_pytest(arguments, selection), arguments.output, variables)

    return Campaign(name, summary, _add_pytest_arguments, run)


def tabled(name: str, summary: str, variable: str, *selection: str) -> Campaign:
    """A campaign whose tests write a table to the file that ``variable`` names, failed ones too."""

    def run(arguments: argparse.Namespace) -> int:
        table: Path = arguments.output
        table.parent.mkdir(parents=True, exist_ok=True)
        table.unlink(missing_ok=True)
        log = table.with_name(f"{table.name}.log")
        variables = {**os.environ, variable: str(table)}
        code = run_and_keep(_pytest(arguments, selection), log, variables)
        if table.exists():
            print(table.read_text(encoding="utf-8"))
        return code

    return Campaign(name, summary, _add_pytest_arguments, run)


def corrupt_checkpoints() -> Campaign:
    """The campaign of bit flips: how many of each file is an argument."""

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        flips = "random flips of each file, beside those at its start, middle and end"
        words = f"{flips} (default: %(default)s)"
        parser.add_argument("--rounds", type=int, default=200, help=words)
        _add_pytest_arguments(parser)

    tests = printed(
        "corrupt-checkpoints",
        "bit flips in every file of checkpoints, and how many loading found (minutes)",
        *("-s", "tests/unit/v1/checkpoint/test_corruption.py"),
        environment=lambda arguments: {"DS_CORRUPTIONS": str(arguments.rounds)},
    )
    return Campaign(tests.name, tests.summary, add_arguments, tests.run)


CAMPAIGNS = (
    printed(
        "contract",
        "every combination of the contract suite",
        *("tests/unit", "-m", "contract", "-k", "not Stage3Product"),
    ),
    printed(
        "stage3",
        "every combination of the contract of ZeRO stage 3 (an hour)",
        *("tests/unit/v1/contract/test_stage3.py", "-m", "contract"),
    ),
    printed(
        "offload",
        "every combination of offload, equal bit for bit to none on 1 to 3 ranks (minutes)",
        *("tests/unit/v1/offload/test_product.py", "-m", "contract", "-s", "-n", "0"),
    ),
    tabled(
        "reshard-matrix",
        "checkpoints of every division of ranks loaded into every other (minutes)",
        "DS_RESHARD_MATRIX",
        *(f"tests/unit/v1/checkpoint/test_{name}.py" for name in ("matrix", "ways")),
    ),
    corrupt_checkpoints(),
    printed(
        "elastic",
        "nodes of an elastic job go and come, compared bit by bit with launches one by one",
        "tests/unit/elasticity/test_elastic_training.py",
        environment=lambda _: {"ELASTIC_CAMPAIGN": "1"},
    ),
    tabled(
        "mutations",
        "faults put into the library on purpose, and what the checks say about each",
        "DS_MUTATION_TABLE",
        "tests/unit/verify/test_mutations.py",
    ),
    tabled(
        "command-faults",
        "faults of stage 3, parallel engines, offload; what ds_verify says of each (two hours)",
        "DS_COMMAND_FAULTS_TABLE",
        *("tests/unit/verify/test_command_faults.py", "-n", "0", "-m", "contract"),
    ),
    # pdsh, MPI and Slurm come from the system; each test that lacks its tool says so.
    printed(
        "multinode",
        "the launcher on real hosts, made of network namespaces (root)",
        "tests/multinode",
    ),
)

"""Client libraries, unmodified, in virtual environments of their own outside the tree."""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from campaigns.campaign import RESULTS, ROOT, Campaign, run_and_keep
from campaigns.support_table import NEWEST
from campaigns.versions import Environment, Target, add_pip_arguments

# `evaluate` is what the tests that come with accelerate import.
LIBRARIES = ("accelerate", "transformers", "lightning", "trl[peft]", "evaluate")
# Of the suite, the programs of their pages among them.
TESTS = ("tests/unit/clients", "-n", "0", "-rs")


def _add_environment_arguments(parser: argparse.ArgumentParser) -> None:
    folder = "folder of the environment, used as it is if it is there"
    parser.add_argument("--venv", type=Path, help=folder)
    add_pip_arguments(parser)


def _in_environment(
    arguments: argparse.Namespace,
    name: str,
    libraries: Sequence[str],
    commands: Sequence[tuple[Sequence[str], Path]],
) -> int:
    """Run commands of Python in an environment with these libraries; returns 0 if none failed."""
    with tempfile.TemporaryDirectory(prefix=f"{name}-") as temporary:
        folder = arguments.venv or Path(temporary) / "venv"
        environment = Environment(folder.absolute(), arguments.pip_args)
        if not environment.python.exists():
            try:
                environment.install(Target(libraries[0], NEWEST), libraries[1:])
            except subprocess.CalledProcessError as error:
                print(f"{name}: no result: {error}", file=sys.stderr)
                return 1
        variables = {**environment.variables(), "PYTHONPATH": str(ROOT / "tests")}
        python = str(environment.python)
        codes = [run_and_keep([python, *words], output, variables) for words, output in commands]
        return int(any(codes))


def _add_client_arguments(parser: argparse.ArgumentParser) -> None:
    several = "only this one; may be given several times"
    parser.add_argument("--client", action="append", default=[], help=several)
    parser.add_argument("--row", help="only scenarios whose NAME@STAGE contains this")
    _add_environment_arguments(parser)


def _run_clients(arguments: argparse.Namespace) -> int:
    """The scenarios of all clients, and unless some are chosen the tests of the suite."""
    matrix = ["-m", "unit.clients.matrix", *arguments.client]
    commands = [(matrix, arguments.output)]
    if arguments.row:
        matrix += ["--row", arguments.row]
    elif not arguments.client:
        tests = RESULTS / "clients-tests.txt"
        commands.insert(0, (["-m", "pytest", *TESTS], tests))
    return _in_environment(arguments, "clients", LIBRARIES, commands)


def _add_trl_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kind", help="only this trainer")
    _add_environment_arguments(parser)


def _run_trl(arguments: argparse.Namespace) -> int:
    command = ["-m", "unit.clients.zero3_trl"]
    if arguments.kind:
        command += ["--kind", arguments.kind]
    return _in_environment(arguments, "trl", ("trl[peft]",), [(command, arguments.output)])


CAMPAIGNS = (
    Campaign(
        "clients",
        "trainers of accelerate, transformers, Lightning, trl, peft at every stage (half an hour)",
        _add_client_arguments,
        _run_clients,
    ),
    Campaign(
        "trl",
        "trainers of trl at stage 3, each resumed, in an environment of their own",
        _add_trl_arguments,
        _run_trl,
    ),
)

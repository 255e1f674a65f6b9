"""Trainers of trl at stage 3, in a virtual environment of its own outside the tree."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from campaigns.campaign import ROOT, Campaign, run_and_keep
from campaigns.support_table import NEWEST
from campaigns.versions import Environment, Target

TRL = Target("trl[peft]", NEWEST)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The campaign's own arguments."""
    parser.add_argument("--kind", help="only this trainer")
    parser.add_argument(
        "--venv", type=Path, help="folder of the environment, used as it is if it is there"
    )
    parser.add_argument(
        "--pip-args", type=shlex.split, default=[], help="flags for pip, in one word"
    )


def run(arguments: argparse.Namespace) -> int:
    """Make the environment and train in it."""
    with tempfile.TemporaryDirectory(prefix="trl-") as temporary:
        folder = arguments.venv or Path(temporary) / "venv"
        environment = Environment(folder.absolute(), arguments.pip_args)
        if not environment.python.exists():
            try:
                environment.install(TRL)
            except subprocess.CalledProcessError as error:
                print(f"trl: no result: {error}", file=sys.stderr)
                return 1
        command = [str(environment.python), "-m", "unit.clients.zero3_trl"]
        if arguments.kind:
            command += ["--kind", arguments.kind]
        variables = {**environment.variables(), "PYTHONPATH": str(ROOT / "tests")}
        return run_and_keep(command, arguments.output, variables)


CAMPAIGN = Campaign(
    "trl",
    "trainers of trl at stage 3, each resumed, in an environment of their own",
    add_arguments,
    run,
)

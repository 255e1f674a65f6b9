"""What a campaign is, and how it runs a command and keeps what the command printed."""

import argparse
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "build" / "campaigns"


@dataclass(frozen=True)
class Campaign:
    """One campaign.

    Attributes:
        run: Runs it; returns the exit code, 0 if nothing failed.
        output: Where ``--output`` points by default; None: a file of its own below `RESULTS`.
    """

    name: str
    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    output: Path | None = None

    def fill(self, parser: argparse.ArgumentParser) -> None:
        """Give ``parser`` the arguments of all campaigns and those of this one."""
        place = self.output or RESULTS / f"{self.name}.txt"
        found = "file for what was found (default: %(default)s)"
        parser.add_argument("--output", type=Path, default=place, help=found)
        self.add_arguments(parser)


def run_and_keep(
    command: Sequence[str], output: Path, environment: Mapping[str, str], folder: Path = ROOT
) -> int:
    """Run ``command`` in ``folder``, keep what it prints in ``output`` too; returns its code."""
    output.parent.mkdir(parents=True, exist_ok=True)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    how = {"cwd": folder, "env": dict(environment), **pipes}
    with output.open("wb") as file, subprocess.Popen(command, **how) as process:
        assert process.stdout is not None, "stdout=PIPE"
        while piece := process.stdout.read1():
            file.write(piece)
            sys.stdout.buffer.write(piece)
            sys.stdout.flush()
    return process.returncode

"""The command `ds_checkpoint`: look after checkpoint folders without a model and without ranks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from deepspeed.checkpoint.verification import FULL, SIZES, verify_checkpoint


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: Of the command line; None takes them from there.

    Returns:
        0 if all is well, 1 if a checkpoint is not as it was written. Wrong arguments exit with 2.
    """
    parser = argparse.ArgumentParser(prog="ds_checkpoint", description="Look after checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)
    verify = commands.add_parser(
        "verify", help="hold a checkpoint against its manifest and list what is wrong"
    )
    verify.add_argument("load_dir", help="folder of all checkpoints of a run, or of one")
    verify.add_argument("--tag", help="which checkpoint; the one that 'latest' names if not given")
    verify.add_argument(
        "--level", choices=(FULL, SIZES), default=FULL, help="'sizes' does not read the content"
    )
    options = parser.parse_args(arguments)
    problems = verify_checkpoint(options.load_dir, options.tag, options.level)
    lines = problems or [f"{options.load_dir}: the checkpoint is as it was written"]
    sys.stdout.writelines(f"{line}\n" for line in lines)
    return 1 if problems else 0

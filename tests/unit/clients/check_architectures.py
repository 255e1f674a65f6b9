"""Holds one architecture to plain torch on a launcher's ranks; rank 0 writes what differs."""

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import deepspeed
from unit.clients.architecture_checks import check
from unit.clients.scripts import tell


def differences(arguments: Namespace) -> list[dict[str, Any]]:
    """One architecture with several seeds."""
    deepspeed.init_distributed("gloo")
    name, *seeds = arguments.words
    return [check(name, int(seed), arguments.out) for seed in seeds]


if __name__ == "__main__":
    tell(differences, "the architecture, and seeds")

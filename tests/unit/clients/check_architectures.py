"""Holds one architecture to plain torch on a launcher's ranks; rank 0 writes what differs."""

import argparse
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import deepspeed
from unit.clients.architecture_checks import check


def main() -> None:
    """One architecture with several seeds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("name")
    parser.add_argument("seeds", type=int, nargs="+")
    parser.add_argument("--local_rank", type=int, help="the launcher gives it")
    arguments = parser.parse_args()
    deepspeed.init_distributed("gloo")
    found = [check(arguments.name, seed, arguments.out) for seed in arguments.seeds]
    if torch.distributed.get_rank() == 0:
        (arguments.out / "result.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

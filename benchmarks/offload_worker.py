"""One rank of one system of `offload_step.py`, under the interpreter of the deepspeed that it
measures. See `serving`.
"""

from __future__ import annotations

import argparse
import json

import torch
from serving import serve, start_distributed, take_stdout
from systems import Workload, build_offload


def main() -> None:
    """Build the system and serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", required=True, help="JSON of systems.Workload")
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--vertical", action="store_true")
    arguments = parser.parse_args()
    protocol = take_stdout()
    torch.set_num_threads(1)
    versions = start_distributed(with_deepspeed=True)
    work = Workload(**json.loads(arguments.workload))
    serve(protocol, versions, build_offload(work, arguments.stage, arguments.vertical))


if __name__ == "__main__":
    main()

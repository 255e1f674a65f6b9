"""One rank of one pipeline of `pipeline.py`, under the interpreter of the deepspeed that it
measures. See `serving`.
"""

from __future__ import annotations

import argparse
import json

import torch
from pipeline_systems import TORCH_SCHEDULES, Workload, build_step
from serving import serve, start_distributed, take_stdout


def main() -> None:
    """Build the system and serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--system", required=True)
    parser.add_argument("--workload", required=True, help="JSON of pipeline_systems.Workload")
    arguments = parser.parse_args()
    protocol = take_stdout()
    torch.set_num_threads(1)
    versions = start_distributed(arguments.system not in TORCH_SCHEDULES)
    serve(
        protocol,
        versions,
        {"": build_step(Workload(**json.loads(arguments.workload)), arguments.system)},
    )


if __name__ == "__main__":
    main()

"""One rank of one system of `train_step.py`, under the interpreter of the deepspeed that it
measures. See `serving`.
"""

from __future__ import annotations

import argparse
import json

import torch
from serving import serve, start_distributed, take_stdout
from systems import Workload, build_step


def main() -> None:
    """Build the system and serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--system", required=True)
    parser.add_argument("--workload", required=True, help="JSON of systems.Workload")
    parser.add_argument("--torch-adam", action="store_true")
    arguments = parser.parse_args()
    protocol = take_stdout()
    torch.set_num_threads(1)
    versions = start_distributed(arguments.system.startswith("zero"))
    step = build_step(
        Workload(**json.loads(arguments.workload)), arguments.system, arguments.torch_adam
    )
    serve(protocol, versions, {"": step})


if __name__ == "__main__":
    main()

"""One rank of one system: builds it, then trains blocks of steps when told to, and reports how long each step took.

Started by `train_step.py`, under the interpreter of the deepspeed that it measures. Protocol: one JSON line on stdout when
ready; then for each line `N` on stdin, N steps and one JSON line with a list of (seconds, processor seconds); `profile N` writes a
cProfile report to stderr; end of input ends the process. While it waits it uses no processor time.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import os
import pstats
import sys
import time
from typing import Any, TextIO

import torch
import torch.distributed as dist
from systems import Step, Workload, build_step


def take_stdout() -> TextIO:
    """Keep stdout for the protocol: what libraries print goes to stderr."""
    protocol = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return protocol


def start_distributed(variant: str) -> dict[str, Any]:
    """Initialize gloo; returns what identifies the software."""
    versions: dict[str, Any] = {"torch": torch.__version__}
    if variant.startswith("zero"):
        import deepspeed  # optional: torch's own systems run without it

        deepspeed.init_distributed(dist_backend="gloo")
        return {**versions, "deepspeed": deepspeed.__version__, "path": os.path.dirname(deepspeed.__file__)}
    dist.init_process_group("gloo")
    return versions


def time_steps(step: Step, count: int) -> list[tuple[float, float]]:
    """Seconds and processor seconds of each of `count` steps. Ranks begin together; garbage is collected before, not within."""
    gc.collect()
    dist.barrier()
    times = []
    for _ in range(count):
        start, cpu_start = time.perf_counter(), time.process_time()
        step()
        times.append((time.perf_counter() - start, time.process_time() - cpu_start))
    return times


def profile_steps(step: Step, count: int) -> None:
    """Where the host's time goes, to stderr."""
    profile = cProfile.Profile()
    dist.barrier()
    profile.enable()
    for _ in range(count):
        step()
    profile.disable()
    for key in ("tottime", "cumulative"):
        pstats.Stats(profile, stream=sys.stderr).sort_stats(key).print_stats(35)


def main() -> None:
    """Serve until stdin ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--system", required=True)
    parser.add_argument("--workload", required=True, help="JSON of systems.Workload")
    parser.add_argument("--torch-adam", action="store_true")
    arguments = parser.parse_args()
    protocol = take_stdout()
    torch.set_num_threads(1)
    versions = start_distributed(arguments.system)
    step = build_step(Workload(**json.loads(arguments.workload)), arguments.system, arguments.torch_adam)
    step()
    print(json.dumps(versions), file=protocol, flush=True)
    for line in sys.stdin:
        command, _, count = line.strip().rpartition(" ")
        if command == "profile":
            profile_steps(step, int(count))
            print("[]", file=protocol, flush=True)
        else:
            print(json.dumps(time_steps(step, int(count))), file=protocol, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

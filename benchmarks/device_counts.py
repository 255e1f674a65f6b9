"""How many collectives, host waits and streams a training step takes: this project, torch DDP,
FSDP2 and, given its interpreter, upstream DeepSpeed.

    python benchmarks/device_counts.py
    python benchmarks/device_counts.py --upstream-python /path/to/python

Each system runs in a process of its own as rank 0 of a process group, and on a device, that only
pretend (`pretended`); neither a GPU nor other ranks are needed, and nothing is timed. The model is
a small GPT in bf16, trained with AdamW and clipping. What decides how many collectives there are is
scaled with it: buckets, and the sizes of stage 3, are in proportion to the model what the defaults
are to one of 7e9 parameters. Everything else is the default.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
UPSTREAM_PREFIX = "upstream-"
OWN = ("zero0", "zero1", "zero2", "zero3")
TORCHS = ("ddp-fused", "fsdp2-fused")
# The first steps agree on buckets, make buffers and learn the order of modules.
WARM_UP = 6
STEPS = 10


def count(system: str, accumulation: int, layers: int, world: int) -> dict[str, Any]:
    """Counts of this process's steps, per step: by kind, and under "streams" how many in all."""
    import pretended
    from systems import Workload, build_step

    pretended.install()
    pretended.start_group(world)
    if system.startswith("zero"):
        pretended.install_accelerator()
    work = Workload("gpt", "bf16", layers, 1, 8, accumulation, 1.0, False, width=64, scaled=True)
    with pretended.watch:
        step = build_step(work, system, os.environ.get("COUNTED") == "upstream")
        for _ in range(WARM_UP):
            step()
        with pretended.counting() as counts:
            for _ in range(STEPS):
                step()
    for place, number in pretended.places.most_common():
        print(f"{system}: {number / STEPS:g} {place}", file=sys.stderr)
    per_step = {name: number / STEPS for name, number in counts.items()}
    return {**per_step, "streams": len(pretended.Device.used)}


def measure(system: str, accumulation: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """`count` in a process of its own.

    Raises:
        RuntimeError: It failed; with the end of what it wrote.
    """
    is_upstream = system.startswith(UPSTREAM_PREFIX)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "RANK": "0", "LOCAL_RANK": "0"}
    environment["COUNTED"] = "upstream" if is_upstream else "own"
    if not is_upstream:
        environment["PYTHONPATH"] = str(HERE.parent)
    options = [system.removeprefix(UPSTREAM_PREFIX), str(accumulation)]
    run = subprocess.run(
        [
            arguments.upstream_python if is_upstream else sys.executable,
            str(HERE / "device_counts.py"),
            *("--layers", str(arguments.layers), "--world", str(arguments.world)),
            *("--one", *options),
        ],
        env=environment | {"WORLD_SIZE": str(arguments.world)},
        # Not the checkout: its deepspeed must not shadow upstream's.
        cwd=tempfile.gettempdir(),
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith("COUNTS ")]
    if not lines:
        raise RuntimeError(f"{system}: {run.stderr[-3000:]}")
    if arguments.places:
        marked = [line for line in run.stderr.splitlines() if line.startswith(options[0] + ": ")]
        print("\n".join(marked), file=sys.stderr)
    found: dict[str, Any] = json.loads(lines[0].removeprefix("COUNTS "))
    return found


def kinds(counts: dict[str, Any], prefix: str) -> str:
    """The total of what begins with `prefix`, and in brackets what it consists of."""
    parts = Counter(
        {name.removeprefix(prefix): n for name, n in counts.items() if name.startswith(prefix)}
    )
    if not parts:
        return "0"
    listed = ", ".join(f"{number:g} {name}" for name, number in sorted(parts.items()))
    return f"{parts.total():g} ({listed})"


def main() -> None:
    """Count every system with and without accumulation and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--world", type=int, default=8)
    parser.add_argument("--accumulation", type=int, default=4, help="beside 1")
    parser.add_argument("--systems", help="comma-separated choice")
    parser.add_argument("--upstream-python", help="interpreter with upstream DeepSpeed installed")
    parser.add_argument("--jobs", type=int, default=1, help="how many processes at a time")
    parser.add_argument("--places", action="store_true", help="write where hosts wait to stderr")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        system, accumulation = arguments.one
        found = count(system, int(accumulation), arguments.layers, arguments.world)
        print("COUNTS " + json.dumps(found))
        return
    upstreams = [UPSTREAM_PREFIX + name for name in OWN] if arguments.upstream_python else []
    systems = arguments.systems.split(",") if arguments.systems else [*OWN, *TORCHS, *upstreams]
    cases = [(system, n) for system in systems for n in sorted({1, arguments.accumulation})]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        results = list(pool.map(lambda case: measure(*case, arguments), cases))
    print("| system | micro-batches | collectives | host waits | side streams |")
    print("|---|---|---|---|---|")
    for (system, micro_batches), counts in zip(cases, results, strict=True):
        collectives, waits = kinds(counts, "collective "), kinds(counts, "wait ")
        print(f"| {system} | {micro_batches} | {collectives} | {waits} | {counts['streams']} |")


if __name__ == "__main__":
    main()

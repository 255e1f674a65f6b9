"""First hour on a device, in minutes: the tests that need one, then time, peak memory and overlap
of a training step of stages 0 to 3 beside plain torch, DDP and FSDP2.

    python benchmarks/device.py
    python benchmarks/device.py --first               (one device, ten minutes: first_device.py)
    DS_ACCELERATOR=sim python benchmarks/device.py     (no device: same paths, numbers mean nothing)

All devices that this process sees take part, one rank each. As in `train_step.py` every system has
processes of its own, which take turns; a ratio is taken within a round, and reported is its median.
All keep fp32 masters: torch's own under bf16 autocast or FSDP2's bf16 policy, the stages as bf16
models; all use fused AdamW. Several steps are timed as one, with one wait for the device at their
end.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

import first_device
import torch
from turns import HERE, Ranks, median_ms, paired_ratios, print_log, run_turns

BASELINE = "ddp"
# Options of the systems by precision.
SYSTEMS = {
    "bf16": {
        "torch": "torch-fused-autocast",
        "ddp": "ddp-fused-autocast",
        "fsdp2": "fsdp2-fused",
    },
    "fp32": {"torch": "torch-fused", "ddp": "ddp-fused", "fsdp2": "fsdp2-fused"},
}
STAGES = ("zero0", "zero1", "zero2", "zero1-overlap", "zero2-overlap", "zero3")
TEST_SECONDS = 240
# A simulated step takes long; its size only has to reach all paths.
SIMULATED = {"layers": 2, "width": 64, "micro_batch": 2, "context": 32}
# 1.2 billion parameters, whose state takes 22 GB.
FIRST = {"layers": 24, "width": 2048, "heads": 16, "micro_batch": 4, "context": 1024}
MIB = 2**20


@dataclass(frozen=True)
class Result:
    """One line of the table.

    Attributes:
        system: Its name.
        median_ms: Median time of a step.
        ratio: Median over rounds of the ratio to DDP.
        peak_mib: What tensors take at most during a step, of the rank that takes most; None where
            nobody counts.
        hidden: Part of the side streams' work that is behind the computation; None without any.
    """

    system: str
    median_ms: float
    ratio: float
    peak_mib: float | None
    hidden: float | None


def table(results: list[Result]) -> str:
    """The results as a Markdown table."""
    lines = [
        "| system | median step (ms) | x DDP | peak memory (MiB) | hidden |",
        "|---|---:|---:|---:|---:|",
    ]
    for result in results:
        peak = "-" if result.peak_mib is None else f"{result.peak_mib:.0f}"
        hidden = "-" if result.hidden is None else f"{result.hidden:.0%}"
        lines.append(
            f"| {result.system} | {result.median_ms:.2f} | {result.ratio:.2f} | {peak} | {hidden} |"
        )
    return "\n".join(lines)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--precision", choices=sorted(SYSTEMS), default="bf16")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768, help="features of the GPT")
    parser.add_argument("--micro-batch", type=int, default=8, help="sequences per rank")
    parser.add_argument("--context", type=int, default=512, help="bytes per sequence")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--clip", type=float, default=1.0, help="largest gradient norm (0: none)")
    parser.add_argument("--systems", help="comma-separated choice (ddp is always run)")
    parser.add_argument("--ranks", type=int, help="default: as many as there are devices")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10, help="steps that are timed as one")
    parser.add_argument("--no-tests", action="store_true", help="only the benchmark")
    parser.add_argument("--json", help="file for all times")
    parser.add_argument("--first", action="store_true", help="all that one device shows, instead")
    parser.add_argument("--looks", help="comma-separated choice of those of --first")
    return parser.parse_args(argv)


def run_tests() -> int:
    """Run the tests that need a device; returns pytest's exit code, or 124 out of time."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/unit"]
    print("+", " ".join(command[1:]), flush=True)
    try:
        return subprocess.run(command, cwd=HERE.parent, timeout=TEST_SECONDS).returncode
    except subprocess.TimeoutExpired:
        print(f"the tests were not done after {TEST_SECONDS} s", file=sys.stderr)
        return 124


@dataclass(frozen=True)
class Place:
    """Where the benchmark runs.

    Attributes:
        accelerator: `DS_ACCELERATOR` of the processes.
        device: Type of torch's device.
        backend: Of the collectives.
        ranks: How many processes.
    """

    accelerator: str
    device: str
    backend: str
    ranks: int


def find_place(ranks: int | None) -> Place:
    """The devices that there are.

    Raises:
        RuntimeError: There are none, and DS_ACCELERATOR does not ask for the simulated one.
    """
    if os.environ.get("DS_ACCELERATOR") == "sim":
        return Place("sim", "cpu", "gloo", ranks or 2)
    if not torch.cuda.is_available():
        raise RuntimeError(
            "no CUDA device: set DS_ACCELERATOR=sim for a run of the same paths without one"
        )
    return Place("cuda", "cuda", "nccl", ranks or torch.cuda.device_count())


def workload(arguments: argparse.Namespace, place: Place) -> dict[str, Any]:
    """Fields of `systems.Workload`."""
    sizes = {key: getattr(arguments, key) for key in SIMULATED}
    return {
        "model": "gpt",
        "precision": arguments.precision,
        "accumulation": arguments.accumulation,
        "clip": arguments.clip,
        "wide_products": False,
        "device": place.device,
        **(SIMULATED if place.accelerator == "sim" else sizes),
    }


def chosen_systems(arguments: argparse.Namespace) -> dict[str, str]:
    """Names in the table and what `systems.build_step` knows them by."""
    names = {**SYSTEMS[arguments.precision], **{stage: stage for stage in STAGES}}
    if not arguments.systems:
        return names
    wanted = [BASELINE, *arguments.systems.split(",")]
    unknown = set(wanted) - names.keys()
    if unknown:
        raise ValueError(f"--systems {min(unknown)}: choose from {', '.join(names)}")
    return {name: names[name] for name in dict.fromkeys(wanted)}


def start(
    arguments: argparse.Namespace, place: Place, ranks: dict[str, Ranks], stderr: IO[str]
) -> None:
    """Start the systems one after the other, into `ranks`, so that the caller can end them if one
    fails.
    """
    for name, system in chosen_systems(arguments).items():
        # Plain torch has no peer to wait for.
        count = 1 if name == "torch" else place.ranks
        options = ["--system", system, "--workload", json.dumps(workload(arguments, place))]
        options += ["--backend", place.backend, "--steps", str(arguments.steps)]
        command = [sys.executable, "device_worker.py", *options]
        ranks[name] = Ranks(name, command, count, stderr, place.accelerator)
        ranks[name].wait_until_ready()
        print(f"ready: {name} {ranks[name].versions}", file=sys.stderr)


def measure(arguments: argparse.Namespace, place: Place, stderr: IO[str]) -> list[Result]:
    """Run all rounds, then each system's memory and overlap; no process is left."""
    ranks: dict[str, Ranks] = {}
    try:
        start(arguments, place, ranks, stderr)
        run_turns(list(ranks.values()), arguments.rounds, 1, 1)
        peaks = {name: system.tell("peak one 2") for name, system in ranks.items()}
        hidden = {name: system.tell("hidden one 2")[0] for name, system in ranks.items()}
    finally:
        for system in ranks.values():
            system.close()
    base = ranks[BASELINE].rounds
    results = []
    for name, system in ranks.items():
        ratios = sorted(paired_ratios(system.rounds, base))
        known = [peak for peak in peaks[name] if peak is not None]
        results.append(
            Result(
                name,
                median_ms(system.rounds) / arguments.steps,
                ratios[len(ratios) // 2],
                max(known) / MIB if known else None,
                hidden[name],
            )
        )
    return results


def main(argv: list[str] | None = None) -> int:
    """Run tests and benchmark; returns the exit code."""
    arguments = parse_arguments(argv)
    try:
        place = find_place(arguments.ranks)
        chosen_systems(arguments)
    except (RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    if arguments.first:
        sizes = {**workload(arguments, place), **(FIRST if place.accelerator != "sim" else {})}
        place = replace(place, ranks=arguments.ranks or 1)
        looks = arguments.looks.split(",") if arguments.looks else first_device.LOOKS
        record = Path(arguments.json or "first-device.json")
        return first_device.run(place, sizes, arguments.steps, record, looks)
    failed = 0 if arguments.no_tests else run_tests()
    with tempfile.TemporaryFile("w+") as stderr:
        try:
            results = measure(arguments, place, stderr)
        except RuntimeError as error:
            print_log(stderr, error)
            return 1
    print(f"\n{json.dumps(workload(arguments, place))}, {place.ranks} ranks, {place.backend}\n")
    print(table(results))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps([asdict(result) for result in results]) + "\n")
    return failed


if __name__ == "__main__":
    sys.exit(main())

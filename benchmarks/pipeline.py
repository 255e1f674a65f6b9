"""Time of a pipeline step: this project's schedules, upstream's engine and
torch.distributed.pipelining, in turns.

    python benchmarks/pipeline.py --peer-python /path/to/python

The same GPT, parts, micro-batches, data and optimizer in all systems, on 2 and then on 4 ranks over
gloo, one thread each. Systems take turns (see turns.py); a ratio is taken within a round, against
`1f1b`; reported is its median. Without `--peer-python`, the interpreter of an environment with
upstream DeepSpeed, upstream is left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import asdict
from typing import IO, Any

from pipeline_systems import DEEPSPEED_SCHEDULES, TORCH_SCHEDULES, Workload
from turns import (
    UPSTREAM_PREFIX,
    Ranks,
    median_ms,
    middle_half,
    paired_ratios,
    print_log,
    run_turns,
)

BASELINE = "1f1b"
UPSTREAM = UPSTREAM_PREFIX + "1f1b"


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer-python", help="interpreter with upstream DeepSpeed installed")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument(
        "--blocks", type=int, default=Workload.blocks, help="a multiple of twice the ranks"
    )
    parser.add_argument("--width", type=int, default=Workload.width)
    parser.add_argument("--micro-batch", type=int, default=Workload.micro_batch)
    parser.add_argument("--micro-batches", type=int, default=Workload.micro_batches)
    parser.add_argument("--context", type=int, default=Workload.context)
    parser.add_argument("--zero-stage", type=int, choices=(0, 1), default=0)
    parser.add_argument("--systems", help=f"comma-separated choice ({BASELINE} is always run)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="timed steps per block")
    parser.add_argument(
        "--warmup", type=int, default=1, help="untimed steps at the start of each block"
    )
    parser.add_argument(
        "--profile", metavar="SYSTEM", help="profile this system alone instead, all ranks"
    )
    return parser.parse_args(argv)


def workload(arguments: argparse.Namespace) -> Workload:
    """What is trained."""
    return Workload(
        blocks=arguments.blocks,
        width=arguments.width,
        micro_batch=arguments.micro_batch,
        context=arguments.context,
        micro_batches=arguments.micro_batches,
        precision=arguments.precision,
        zero_stage=arguments.zero_stage,
    )


def chosen_systems(arguments: argparse.Namespace) -> list[str]:
    """Names of the systems to run, the baseline first."""
    names = [*DEEPSPEED_SCHEDULES, *([UPSTREAM] if arguments.peer_python else []), *TORCH_SCHEDULES]
    if arguments.systems:
        names = [BASELINE, *(name for name in arguments.systems.split(",") if name != BASELINE)]
    return names


def start_ranks(
    name: str, work: Workload, num_ranks: int, peer_python: str | None, stderr: IO[str]
) -> Ranks:
    """Processes of one system.

    Raises:
        ValueError: For upstream without its interpreter.
    """
    upstream = name.startswith(UPSTREAM_PREFIX)
    if upstream and not peer_python:
        raise ValueError(f"{name} needs --peer-python")
    python = peer_python if upstream and peer_python else sys.executable
    options = ["--system", "upstream" if upstream else name, "--workload", json.dumps(asdict(work))]
    return Ranks(name, [python, "pipeline_worker.py", *options], num_ranks, stderr)


def measure(
    names: list[str], work: Workload, num_ranks: int, arguments: argparse.Namespace, stderr: IO[str]
) -> tuple[list[Ranks], dict[str, str]]:
    """Run all rounds; returns the systems, closed, and why the others did not start."""
    systems: list[Ranks] = []
    failed: dict[str, str] = {}
    try:
        for name in names:
            system = start_ranks(name, work, num_ranks, arguments.peer_python, stderr)
            try:
                system.wait_until_ready()
            except RuntimeError as error:
                system.close()
                print_log(stderr, error)
                failed[name] = str(error)
                continue
            systems.append(system)
            print(f"ready: {name} {system.versions}", file=sys.stderr)
        run_turns(systems, arguments.rounds, arguments.steps, arguments.warmup)
    finally:
        for system in systems:
            system.close()
    return systems, failed


def table(systems: list[Ranks]) -> str:
    """The results as a Markdown table; ratios are to the first system."""
    base = systems[0]
    lines = [
        f"| system | median step (ms) | x {base.name} | middle half | processor per rank (ms) | x "
        f"{base.name} |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for system in systems:
        ratios = paired_ratios(system.rounds, base.rounds)
        low, high = middle_half(ratios)
        cells: tuple[Any, ...] = (
            system.name,
            f"{median_ms(system.rounds):.1f}",
            f"{statistics.median(ratios):.2f}",
            f"{low:.2f}-{high:.2f}",
            f"{median_ms(system.cpu_rounds):.1f}",
            f"{statistics.median(paired_ratios(system.cpu_rounds, base.cpu_rounds)):.2f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    arguments = parse_arguments(argv)
    work = workload(arguments)
    if arguments.profile:
        system = start_ranks(
            arguments.profile, work, arguments.ranks[0], arguments.peer_python, sys.stderr
        )
        try:
            system.wait_until_ready()
            system.tell(f"profile {arguments.steps * arguments.rounds}")
        finally:
            system.close()
        return 0
    print(f"{work}, {arguments.rounds} rounds of {arguments.steps} steps")
    for num_ranks in arguments.ranks:
        with tempfile.TemporaryFile("w+") as stderr:
            systems, failed = measure(chosen_systems(arguments), work, num_ranks, arguments, stderr)
        print(f"\n{num_ranks} ranks\n\n{table(systems)}")
        for name, reason in failed.items():
            print(f"\n{name} did not start: {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

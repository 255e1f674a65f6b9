"""Time of forward and backward of a mixture-of-experts layer: this project's beside upstream's, in
turns.

    python benchmarks/moe.py --peer-python /path/to/python

On 1 and then on 2 ranks over gloo (the experts spread over them), one thread each. Both systems run
a block of steps of every case in each round; a ratio is taken within the round. `--peer-python` is
the interpreter of an environment with upstream DeepSpeed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from typing import IO

from turns import UPSTREAM_PREFIX, Ranks, Rounds, median_ms, middle_half, paired_ratios, print_log

OURS, UPSTREAM = "ours", UPSTREAM_PREFIX + "moe"


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--peer-python", required=True, help="interpreter with upstream DeepSpeed installed"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument(
        "--experts",
        type=int,
        default=8,
        help="over all ranks; each has a hidden layer of twice the width",
    )
    parser.add_argument("--k", type=int, nargs="+", default=[1, 2], help="routes per token")
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1024, 4096], help="per rank")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="timed steps per block")
    parser.add_argument(
        "--warmup", type=int, default=1, help="untimed steps at the start of each block"
    )
    return parser.parse_args(argv)


def measure(
    num_ranks: int, arguments: argparse.Namespace, stderr: IO[str]
) -> dict[str, dict[str, tuple[Rounds, Rounds]]]:
    """For each case and system, seconds and processor seconds of all rounds.

    Raises:
        RuntimeError: A system did not start.
    """
    cases = [f"{k}-{tokens}" for k in arguments.k for tokens in arguments.tokens]
    options = [
        "--width",
        str(arguments.width),
        "--experts",
        str(arguments.experts),
        "--cases",
        *cases,
    ]
    systems: list[Ranks] = []
    times: dict[str, dict[str, tuple[Rounds, Rounds]]] = {
        case: {OURS: ([], []), UPSTREAM: ([], [])} for case in cases
    }
    try:
        for name, python in ((OURS, sys.executable), (UPSTREAM, arguments.peer_python)):
            systems.append(Ranks(name, [python, "moe_worker.py", *options], num_ranks, stderr))
            systems[-1].wait_until_ready()
        for number in range(arguments.rounds):
            for case in cases:
                for system in systems[:: 1 if number % 2 else -1]:
                    wall, cpu = system.timed(case, arguments.steps, arguments.warmup)
                    times[case][system.name][0].append(wall)
                    times[case][system.name][1].append(cpu)
    finally:
        for system in systems:
            system.close()
    return times


def table(times: dict[str, dict[str, tuple[Rounds, Rounds]]]) -> str:
    """The results as a Markdown table; ratios above 1 say that upstream takes longer."""
    lines = [
        "| k | tokens per rank | ours (ms) | upstream (ms) | upstream / ours | middle half | ratio "
        "of processor times |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for case, systems in times.items():
        (ours, ours_cpu), (upstream, upstream_cpu) = systems[OURS], systems[UPSTREAM]
        ratios = paired_ratios(upstream, ours)
        low, high = middle_half(ratios)
        k, tokens = case.split("-")
        cpu = statistics.median(paired_ratios(upstream_cpu, ours_cpu))
        lines.append(
            f"| {k} | {tokens} | {median_ms(ours):.1f} | {median_ms(upstream):.1f} | "
            f"{statistics.median(ratios):.2f} | {low:.2f}-{high:.2f} | {cpu:.2f} |"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    arguments = parse_arguments(argv)
    print(
        f"width {arguments.width}, {arguments.experts} experts, {arguments.rounds} rounds of "
        f"{arguments.steps} steps"
    )
    for num_ranks in arguments.ranks:
        with tempfile.TemporaryFile("w+") as stderr:
            try:
                times = measure(num_ranks, arguments, stderr)
            except RuntimeError as error:
                print_log(stderr, error)
                return 1
        print(f"\n{num_ranks} rank{'s' * (num_ranks > 1)}\n\n{table(times)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

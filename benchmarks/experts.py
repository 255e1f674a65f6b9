"""Training a mixture of experts of transformers: experts spread over ranks (`expert_parallel`) at
stages 2 and 3, stage 3 with leaf modules, and every rank with all experts, in turns.

    python benchmarks/experts.py
    python benchmarks/experts.py --experts 32 --hidden 256 --expert-width 512 --sequence 256

Ranks over gloo, one thread each. The systems take turns, a block of steps in each round; ratios are
taken within a round. Reported are tokens per second of all ranks together, and of a rank the
weights, gradients and optimizer state that it keeps between steps and the peak of its resident
memory above what it had before the model was made.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile

from turns import Ranks, median_ms, middle_half, paired_ratios, print_log, run_turns

SYSTEMS = {
    "spread": "experts spread, stage 2",
    "spread_shards": "experts spread, stage 3",
    "leaves": "stage 3, leaf modules",
    "whole": "all experts on each rank, stage 2",
}
MIB = 2**20


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--spread-over", type=int, help="ranks of `expert_parallel`; default: all")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--experts", type=int, default=16, help="of a layer, over all ranks")
    parser.add_argument("--expert-width", type=int, default=256)
    parser.add_argument("--k", type=int, default=2, help="experts per token")
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank")
    parser.add_argument("--sequence", type=int, default=128, help="tokens in each")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5, help="timed steps per block")
    parser.add_argument(
        "--warmup", type=int, default=1, help="untimed steps at the start of each block"
    )
    return parser.parse_args(argv)


def worker_options(arguments: argparse.Namespace, system: str) -> list[str]:
    """The command line of the workers of a system."""
    names = ("layers", "hidden", "experts", "expert_width", "k", "batch", "sequence", "precision")
    over = arguments.spread_over or arguments.ranks
    pairs = ((f"--{name.replace('_', '-')}", str(getattr(arguments, name))) for name in names)
    return [
        "--system",
        system,
        "--spread-over",
        str(over),
        *(word for pair in pairs for word in pair),
    ]


def table(systems: list[Ranks], arguments: argparse.Namespace) -> str:
    """The results as a Markdown table; ratios are to the first system."""
    lines = [
        "| system | median step (ms) | tokens/s | times the first's step | middle half | kept per "
        "rank (MiB) | peak per rank (MiB) |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    tokens = arguments.ranks * arguments.batch * arguments.sequence
    for system in systems:
        ratios = paired_ratios(system.rounds, systems[0].rounds)
        low, high = middle_half(ratios)
        step = median_ms(system.rounds)
        kept, peak = (max(column) / MIB for column in zip(*system.tell("memory 0"), strict=True))
        lines.append(
            f"| {SYSTEMS[system.name]} | {step:.1f} | {tokens / step * 1e3:.0f} | "
            f"{statistics.median(ratios):.2f} | {low:.2f}-{high:.2f} | {kept:.1f} | {peak:.1f} |"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    arguments = parse_arguments(argv)
    print(
        f"{arguments.layers} layers of width {arguments.hidden}, {arguments.experts} experts of "
        f"width {arguments.expert_width}, {arguments.k} per token; {arguments.ranks} ranks with "
        f"{arguments.batch} x {arguments.sequence} tokens; AdamW, {arguments.precision}; "
        f"{arguments.rounds} rounds of {arguments.steps} steps\n"
    )
    systems: list[Ranks] = []
    with tempfile.TemporaryFile("w+") as stderr:
        try:
            for name in arguments.systems:
                command = [sys.executable, "experts_worker.py", *worker_options(arguments, name)]
                systems.append(Ranks(name, command, arguments.ranks, stderr))
                systems[-1].wait_until_ready()
            run_turns(systems, arguments.rounds, arguments.steps, arguments.warmup)
            print(table(systems, arguments))
        except RuntimeError as error:
            print_log(stderr, error)
            return 1
        finally:
            for system in systems:
                system.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

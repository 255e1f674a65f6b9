"""Time of a training step: torch DDP and FSDP2, every stage of this project, and upstream
DeepSpeed, interleaved.

    python benchmarks/train_step.py --model gpt --precision fp32
    python benchmarks/train_step.py --model tiny --precision bf16 --upstream-python /path/to/python

Every system has two processes of its own, one thread each, over gloo. They take turns: a block of
steps of one system, then of the next, for many rounds, each round in another order, so that a
machine that gets slower or faster does so for all alike. Only one system computes at a time; the
others wait on a pipe. A ratio is taken within a round, against plain DDP; reported is its median.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from turns import (
    UPSTREAM_PREFIX,
    Ranks,
    Rounds,
    median_ms,
    middle_half,
    paired_ratios,
    print_log,
    run_turns,
)

NUM_RANKS = 2
BASELINE = "ddp"
BITS = "-bits"  # systems with `reproducibility`
FUSED = "ddp-fused"
LAYERS = {"gpt": 6, "tiny": 400}
MICRO_BATCH = {"gpt": 4, "tiny": 8}
SYSTEMS = {
    "fp32": ("ddp", "ddp-fused", "fsdp2", "zero0", "zero1", "zero2", "zero3"),
    "bf16": (
        "ddp",
        "ddp-fused",
        "ddp-autocast",
        "fsdp2",
        "zero0",
        "zero1",
        "zero2",
        "zero3",
        "zero1-fp32acc",
    ),
}
UPSTREAM_SYSTEMS = {
    "fp32": ("zero0", "zero1", "zero2", "zero3"),
    "bf16": ("zero0", "zero1", "zero2", "zero3", "zero1-fp32acc"),
}


class Pair(Ranks):
    """The processes of one system.

    Args:
        name: Name in the table; upstream's begin with `upstream-`.
        python: Interpreter.
        workload: Fields of `systems.Workload`.
        torch_adam: Ask for torch's default AdamW kernel.
        stderr: Where the processes' messages go.
    """

    def __init__(
        self, name: str, python: str, workload: dict[str, Any], torch_adam: bool, stderr: IO[str]
    ) -> None:
        system = name.removeprefix(UPSTREAM_PREFIX)
        options = [
            "--system",
            system,
            "--workload",
            json.dumps(workload),
            *(["--torch-adam"] if torch_adam else []),
        ]
        super().__init__(name, [python, "step_worker.py", *options], NUM_RANKS, stderr)


@dataclass(frozen=True)
class Result:
    """One line of the table.

    Attributes:
        system: Its name.
        median_ms: Median time of a step.
        ratio: Median over rounds of the ratio to the baseline.
        low, high: What the middle half of the rounds' ratios lies between.
        ratio_fused: As `ratio`, to DDP with fused AdamW; None if that was not run.
        cpu_ms, cpu_ratio: As `median_ms` and `ratio`, of processor time per rank: no waiting, so
            other work on the machine hardly shows in it.
        bits_ratio: Of a system with `reproducibility`: as `cpu_ratio`, to the one without.
    """

    system: str
    median_ms: float
    ratio: float
    low: float
    high: float
    ratio_fused: float | None
    cpu_ms: float
    cpu_ratio: float
    bits_ratio: float | None


def summarize(wall: dict[str, Rounds], cpu: dict[str, Rounds]) -> list[Result]:
    """Results of all systems, of which one is the baseline; `cpu` are processor times."""
    results = []
    for name, rounds in wall.items():
        ratios = paired_ratios(rounds, wall[BASELINE])
        low, high = middle_half(ratios)
        fused = statistics.median(paired_ratios(rounds, wall[FUSED])) if FUSED in wall else None
        cpu_ratio = statistics.median(paired_ratios(cpu[name], cpu[BASELINE]))
        plain = name.removesuffix(BITS)
        bits = plain in cpu and plain != name
        bits_ratio = statistics.median(paired_ratios(cpu[name], cpu[plain])) if bits else None
        results.append(
            Result(
                name,
                median_ms(rounds),
                statistics.median(ratios),
                low,
                high,
                fused,
                median_ms(cpu[name]),
                cpu_ratio,
                bits_ratio,
            )
        )
    return results


def table(results: list[Result]) -> str:
    """The results as a Markdown table."""
    lines = [
        "| system | median step (ms) | x DDP | middle half | x DDP fused | processor (ms) | x DDP "
        "| x without -bits |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for result in results:
        fused, bits = (
            "-" if ratio is None else f"{ratio:.2f}"
            for ratio in (result.ratio_fused, result.bits_ratio)
        )
        cells = (
            result.system,
            f"{result.median_ms:.2f}",
            f"{result.ratio:.2f}",
            f"{result.low:.2f}-{result.high:.2f}",
            fused,
            f"{result.cpu_ms:.2f}",
            f"{result.cpu_ratio:.2f}",
            bits,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        choices=("gpt", "tiny"),
        default="gpt",
        help="GPT of width 256, or Linear(16, 16) layers",
    )
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--layers", type=int, help="default: 6 (gpt), 400 (tiny)")
    parser.add_argument(
        "--micro-batch", type=int, help="sequences or rows per rank (default: 4, 8)"
    )
    parser.add_argument("--context", type=int, default=64, help="bytes per sequence of the GPT")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument(
        "--clip",
        type=float,
        default=0.0,
        help="largest gradient norm, in all systems (0: no clipping)",
    )
    parser.add_argument(
        "--wide-products",
        action="store_true",
        help="the GPT multiplies in fp32 though its weights are bf16",
    )
    parser.add_argument(
        "--torch-adam",
        action="store_true",
        help="torch.optim.AdamW with default arguments in this project too",
    )
    parser.add_argument("--systems", help="comma-separated choice (the baseline ddp is always run)")
    parser.add_argument("--upstream-python", help="interpreter with upstream DeepSpeed installed")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=8, help="timed steps per block")
    parser.add_argument(
        "--warmup", type=int, default=2, help="untimed steps at the start of each block"
    )
    parser.add_argument("--profile", metavar="SYSTEM", help="profile this system alone instead")
    parser.add_argument("--json", help="file for all times")
    return parser.parse_args(argv)


def chosen_systems(arguments: argparse.Namespace) -> list[str]:
    """Names of the systems to run, the baseline first."""
    names = list(SYSTEMS[arguments.precision])
    if arguments.upstream_python:
        names += [UPSTREAM_PREFIX + name for name in UPSTREAM_SYSTEMS[arguments.precision]]
    if arguments.systems:
        names = [BASELINE, *(name for name in arguments.systems.split(",") if name != BASELINE)]
    missing = [
        name for name in names if name.startswith(UPSTREAM_PREFIX) and not arguments.upstream_python
    ]
    if missing:
        raise ValueError(f"--systems {missing[0]} needs --upstream-python")
    return names


def workload(arguments: argparse.Namespace) -> dict[str, Any]:
    """Fields of `systems.Workload`."""
    return {
        "model": arguments.model,
        "precision": arguments.precision,
        "layers": arguments.layers or LAYERS[arguments.model],
        "micro_batch": arguments.micro_batch or MICRO_BATCH[arguments.model],
        "context": arguments.context,
        "accumulation": arguments.accumulation,
        "clip": arguments.clip,
        "wide_products": arguments.wide_products,
    }


def start(
    names: list[str], arguments: argparse.Namespace, pairs: dict[str, Pair], stderr: IO[str]
) -> None:
    """Start the systems one after the other, into `pairs`, so that the caller can end them if one
    fails.
    """
    for name in names:
        upstream = name.startswith(UPSTREAM_PREFIX)
        python = arguments.upstream_python if upstream else sys.executable
        # Upstream's own kernel needs a compiler and, on the host, does not exist as FusedAdam.
        pairs[name] = Pair(
            name, python, workload(arguments), upstream or arguments.torch_adam, stderr
        )
        pairs[name].wait_until_ready()
        print(f"ready: {name} {pairs[name].versions}", file=sys.stderr)


def measure(names: list[str], arguments: argparse.Namespace, stderr: IO[str]) -> dict[str, Pair]:
    """Run all rounds; the pairs are closed when this returns."""
    pairs: dict[str, Pair] = {}
    try:
        start(names, arguments, pairs, stderr)
        run_turns(list(pairs.values()), arguments.rounds, arguments.steps, arguments.warmup)
    finally:
        for pair in pairs.values():
            pair.close()
    return pairs


def profile(arguments: argparse.Namespace) -> None:
    """Print where one system's host time goes."""
    pairs: dict[str, Pair] = {}
    try:
        start([arguments.profile], arguments, pairs, sys.stderr)
        pairs[arguments.profile].tell(f"profile {arguments.steps * arguments.rounds}")
    finally:
        for pair in pairs.values():
            pair.close()


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    arguments = parse_arguments(argv)
    if arguments.profile:
        profile(arguments)
        return 0
    names = chosen_systems(arguments)
    with tempfile.TemporaryFile("w+") as stderr:
        try:
            pairs = measure(names, arguments, stderr)
        except RuntimeError as error:
            print_log(stderr, error)
            return 1
    wall, cpu = (
        {n: p.rounds for n, p in pairs.items()},
        {n: p.cpu_rounds for n, p in pairs.items()},
    )
    results = summarize(wall, cpu)
    print(
        f"{json.dumps(workload(arguments))}, {NUM_RANKS} ranks, {arguments.rounds} rounds of "
        f"{arguments.steps} steps\n"
    )
    print(table(results))
    if arguments.json:
        record = {
            "workload": workload(arguments),
            "versions": {name: pair.versions for name, pair in pairs.items()},
            "results": [asdict(result) for result in results],
            "seconds": wall,
            "processor_seconds": cpu,
        }
        Path(arguments.json).write_text(json.dumps(record) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

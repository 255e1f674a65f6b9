"""Time of a step whose optimizer is on the host or in files: this project and upstream DeepSpeed,
interleaved in one run.

    TORCH_EXTENSIONS_DIR=/an/empty/folder python benchmarks/offload_step.py --upstream-python
    /path/to/python [--stage 3 --folder FOLDER [--params]]

Both train the same GPT with bf16 weights, accumulation, `offload_optimizer` on "cpu" (`--folder`:
on "nvme", with upstream's pipelining of reads and writes) and their own DeepSpeedCPUAdam, in
processes of one thread each over gloo. With `--params` parameters are in files too, sizes of stage
3 are to the model what the defaults are to one of 7e9 elements, and this project runs a second time
by `engine.train_batch` ("vertical"). All is on the CPU: there "offloaded" state lies beside the
model, no byte crosses a bus, and what is compared is the work that the step does. Systems take
turns as in `train_step.py`, and a ratio is taken within a round. `step` is the whole training step;
`update` is the part of it in `engine.step()` at the boundary.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from turns import UPSTREAM_PREFIX, Ranks, Rounds, median_ms, middle_half, paired_ratios, print_log

OURS, VERTICAL, UPSTREAM = "ours", "ours, vertical", f"{UPSTREAM_PREFIX}deepspeed"
CASES = {OURS: ("step", "update"), VERTICAL: ("step",), UPSTREAM: ("step", "update")}


@dataclass(frozen=True)
class Result:
    """One line of the table.

    Attributes:
        ranks, system, case: What was measured.
        ours_ms, upstream_ms: Median times; upstream's is None if it was not run.
        ratio: Median over rounds of upstream's time over ours.
        low, high: What the middle half of the rounds' ratios lies between.
        cpu_ratio: As `ratio`, of processor time of the whole step.
    """

    ranks: int
    system: str
    case: str
    ours_ms: float
    upstream_ms: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    cpu_ratio: float | None = None


# For each system and case: rounds of wall times, and of processor times.
Times = dict[str, dict[str, tuple[Rounds, Rounds]]]


def measure(
    commands: dict[str, list[str]], num_ranks: int, options: argparse.Namespace, stderr: IO[str]
) -> Times:
    """Let the systems (name -> command) take turns; their processes have ended when this
    returns.
    """
    times: Times = {name: {case: ([], []) for case in CASES[name]} for name in commands}
    running: dict[str, Ranks] = {}
    try:
        for name, command in commands.items():
            running[name] = Ranks(name, command, num_ranks, stderr)
            running[name].wait_until_ready()
            print(f"ready: {name} {running[name].versions}", file=sys.stderr)
        names = list(commands)
        for number in range(options.rounds):
            for name in names if number % 2 == 0 else reversed(names):
                for case, (walls, cpus) in times[name].items():
                    wall, cpu = running[name].timed(case, options.steps, options.warmup)
                    walls.append(wall)
                    cpus.append(cpu)
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
    finally:
        for ranks in running.values():
            ranks.close()
    return times


def summarize(times: Times, num_ranks: int) -> list[Result]:
    """A result per system of this project and case."""
    results = []
    theirs = times.get(UPSTREAM)
    for system, case in (
        (name, case) for name in times if name != UPSTREAM for case in times[name]
    ):
        wall, cpu = times[system][case]
        result = Result(num_ranks, system, case, median_ms(wall))
        if theirs is not None:
            ratios = paired_ratios(theirs[case][0], wall)
            low, high = middle_half(ratios)
            result = replace(
                result,
                upstream_ms=median_ms(theirs[case][0]),
                ratio=statistics.median(ratios),
                low=low,
                high=high,
                cpu_ratio=statistics.median(paired_ratios(theirs[case][1], cpu)),
            )
        results.append(result)
    return results


def table(results: list[Result]) -> str:
    """The results as a Markdown table."""
    lines = [
        "| ranks | system | part | it (ms) | upstream (ms) | upstream / it | middle half | "
        "processor, upstream / it |",
        "|---:|---|---|---:|---:|---:|---:|---:|",
    ]
    for result in results:
        cells = [str(result.ranks), result.system, result.case, f"{result.ours_ms:.1f}"]
        if result.upstream_ms is None:
            cells += ["-"] * 4
        else:
            cells += [
                f"{result.upstream_ms:.1f}",
                f"{result.ratio:.2f}",
                f"{result.low:.2f}-{result.high:.2f}",
            ]
            cells.append(f"{result.cpu_ratio:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def worker(system: str, options: argparse.Namespace) -> list[str]:
    """The command of a rank."""
    python = options.upstream_python if system == UPSTREAM else sys.executable
    told = ["--workload", json.dumps(workload(options)), "--stage", str(options.stage)]
    return [python, "offload_worker.py", *told, *(["--vertical"] if system == VERTICAL else [])]


def workload(options: argparse.Namespace) -> dict[str, Any]:
    """Fields of `systems.Workload`."""
    return {
        "model": "gpt",
        "precision": "bf16",
        "layers": options.layers,
        "micro_batch": options.micro_batch,
        "context": options.context,
        "accumulation": options.accumulation,
        "clip": options.clip,
        "wide_products": not options.narrow_products,
        "width": options.width,
        "folder": options.folder,
        "params": options.params,
        "scaled": options.params,  # at upstream's defaults all of a small model stays in memory
    }


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="1,2", help="numbers of ranks, separated by commas")
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--folder", default="", help="for the state; empty: it is in host memory")
    parser.add_argument("--params", action="store_true", help="parameters are in files too")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument(
        "--micro-batch", type=int, default=1, help="sequences per rank and micro-batch"
    )
    parser.add_argument("--context", type=int, default=32, help="bytes per sequence")
    parser.add_argument("--accumulation", type=int, default=2, help="micro-batches per step")
    parser.add_argument(
        "--clip", type=float, default=1.0, help="largest gradient norm (0: no clipping)"
    )
    parser.add_argument(
        "--narrow-products", action="store_true", help="multiply in bf16, for processors that can"
    )
    parser.add_argument("--upstream-python", help="interpreter with upstream DeepSpeed installed")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=4, help="timed steps per block")
    parser.add_argument(
        "--warmup", type=int, default=1, help="untimed steps at the start of each block"
    )
    parser.add_argument("--profile", choices=tuple(CASES), help="profile this system alone instead")
    parser.add_argument("--json", help="file for all times")
    options = parser.parse_args(argv)
    if options.params and not (options.folder and options.stage == 3):
        parser.error("--params needs --folder and --stage 3: only there are parameters in files")
    return options


def profile(options: argparse.Namespace) -> None:
    """Print where one system's host time goes."""
    num_ranks = int(options.ranks.split(",")[0])
    ranks = Ranks(options.profile, worker(options.profile, options), num_ranks, sys.stderr)
    try:
        ranks.wait_until_ready()
        ranks.tell(f"profile step {options.steps * options.rounds}")
    finally:
        ranks.close()


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    options = parse_arguments(argv)
    if options.profile:
        profile(options)
        return 0
    wanted = {OURS: True, VERTICAL: options.params, UPSTREAM: bool(options.upstream_python)}
    commands = {name: worker(name, options) for name in CASES if wanted[name]}
    record: dict[str, Any] = {"workload": workload(options), "seconds": {}}
    results: list[Result] = []
    for num_ranks in map(int, options.ranks.split(",")):
        with tempfile.TemporaryFile("w+") as stderr:
            try:
                times = measure(commands, num_ranks, options, stderr)
            except RuntimeError as error:
                print_log(stderr, error)
                return 1
        record["seconds"][num_ranks] = times
        results += summarize(times, num_ranks)
    what = f"stage {options.stage}, {json.dumps(workload(options))}"
    print(f"{what}, {options.rounds} rounds of {options.steps} steps\n")
    print(table(results))
    if options.json:
        Path(options.json).write_text(json.dumps(record) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""How long stages idle: measured on 4 ranks, beside what the simulator of schedules predicts.

    python benchmarks/pipeline_bubble.py

Layers sleep instead of computing, equally long in the forward, for the gradient of the input and
for the weight's: stages that share processors don't slow each other then, and everything else that
a step does (instructions, messages, reductions, the optimizer) still costs what it costs. The
bubble is the share of the step in which a stage does not sleep in a layer.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from typing import IO

from pipeline import start_ranks
from pipeline_systems import DEEPSPEED_SCHEDULES, Workload
from turns import HERE, print_log

sys.path.insert(0, str(HERE.parent))
from deepspeed.runtime.pipe.schedule import make_schedule  # noqa: E402  the path above is where it lies
from deepspeed.runtime.pipe.simulator import CostModel, Simulation, simulate  # noqa: E402  as above


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--schedules", nargs="+", choices=DEEPSPEED_SCHEDULES, default=DEEPSPEED_SCHEDULES
    )
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument(
        "--sleep-ms",
        type=float,
        default=10.0,
        help="of each of a layer's three passes; a stage has two layers",
    )
    parser.add_argument("--steps", type=int, default=8)
    return parser.parse_args(argv)


def predict(schedule: str, arguments: argparse.Namespace) -> Simulation:
    """What the simulator says, in milliseconds."""
    chunks = 2 if schedule == "interleaved" else 1
    stages = range(arguments.stages)
    plans = [
        make_schedule(schedule, arguments.micro_batches, arguments.stages, stage, chunks)
        for stage in stages
    ]
    of_stage = 2 * arguments.sleep_ms
    return simulate(plans, CostModel(of_stage, of_stage, of_stage))


def measure(schedule: str, arguments: argparse.Namespace, stderr: IO[str]) -> float:
    """Median milliseconds of a step.

    Raises:
        RuntimeError: The ranks did not start.
    """
    work = Workload(
        blocks=2 * arguments.stages,
        micro_batch=1,
        context=1,
        micro_batches=arguments.micro_batches,
        sleep_ms=arguments.sleep_ms,
    )
    ranks = start_ranks(schedule, work, arguments.stages, None, stderr)
    try:
        ranks.wait_until_ready()
        return statistics.median(ranks.timed("", arguments.steps, 1)[0]) * 1e3
    finally:
        ranks.close()


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    arguments = parse_arguments(argv)
    busy = arguments.micro_batches * 6 * arguments.sleep_ms
    print(
        f"{arguments.stages} ranks, {arguments.micro_batches} micro-batches, {arguments.sleep_ms} "
        "ms per pass of a layer\n"
    )
    print(
        "| schedule | predicted step (ms) | measured step (ms) | predicted bubble | measured "
        "bubble |\n|---|---:|---:|---:|---:|"
    )
    for schedule in arguments.schedules:
        predicted = predict(schedule, arguments)
        with tempfile.TemporaryFile("w+") as stderr:
            try:
                measured = measure(schedule, arguments, stderr)
            except RuntimeError as error:
                print_log(stderr, error)
                return 1
        bubbles = f"{1 - busy / predicted.makespan:.1%} | {1 - busy / measured:.1%}"
        print(f"| {schedule} | {predicted.makespan:.0f} | {measured:.0f} | {bubbles} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What saving costs: the step beside an asynchronous save, and bandwidth of saving and loading
against a plain copy of the files.

    python benchmarks/checkpoints.py --folder A/FOLDER/ON/THE/DISK

Both parts train over gloo on the CPU, in processes of one thread each, and everything is flushed to
disk.

`beside`: the model and configuration of `examples/train_gpt.py`, `"checkpoint": {"writer":
{"decoupled": true}}`. Blocks of steps without a save and saves with the steps until they are
published take turns; a save is compared with the blocks before and after it. `held` is how long
`save_checkpoint` itself held the first of these steps: the copy, and what ranks agree about. "first
/ without" is that step with it; files are written beside the second and, if they take longer, the
third; "all / without" is the time of all of them, with `held`, over what as many cost without.
"without / without" compares each block without a save with those around it in the same way: what it
is off 1 is the noise of the machine.

`bandwidth`: a larger GPT. In each round a system saves, copies what it has saved (`shutil.copyfile`
and `fsync`; each rank a share of the files), reads it into new memory, and loads it with
`checkpoint.verify` "full" and "off". Files are in the page cache before they are read. Saving is
compared with the copy, loading with both; a ratio of 1.00 is the speed of the plain one. Ranks
share the plain reading, but each loads the weights, so with 2 ranks loading reads more bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from turns import Ranks, middle_half, print_log

PARTS = ("beside", "bandwidth")
WRITERS: dict[str, Any] = {
    "torch": {"writer": {"type": "torch"}},
    "fast": {"writer": {"type": "fast"}},
}
# Which time is compared with which plain one.
AGAINST = (("save", "copy"), ("load full", "copy"), ("load full", "read"), ("load off", "read"))


def start(name: str, num_ranks: int, system: dict[str, Any], stderr: IO[str]) -> Ranks:
    """The processes of one engine, when they are ready."""
    command = [sys.executable, "checkpoints_worker.py", "--system", json.dumps(system)]
    ranks = Ranks(name, command, num_ranks, stderr)
    ranks.wait_until_ready()
    print(f"ready: {name}, {num_ranks} ranks", file=sys.stderr)
    return ranks


def measure_beside(
    num_ranks: int, folder: str, options: argparse.Namespace, stderr: IO[str]
) -> list[dict[str, Any]]:
    """For each round: seconds of a step without a save around it, of the call, and to the end of
    each step beside it.
    """
    system = {
        "folder": folder,
        "layers": None,
        "width": None,
        "checkpoint": {"writer": {"decoupled": True}},
    }
    ranks = start("beside", num_ranks, system, stderr)
    rounds: list[dict[str, Any]] = []

    def step_without() -> float:
        return max(ends[-1] for ends in ranks.tell(f"steps {options.steps}")) / options.steps

    os.sync()  # what others have written takes processor time until it is on the disk
    try:
        ranks.tell("save_beside")  # the first takes the memory that the others use again
        before = step_without()
        for number in range(options.rounds):
            saves = ranks.tell("save_beside")
            after = step_without()
            # Of each step the slowest rank's end.
            ends = [max(step) for step in zip(*(save["ends"] for save in saves), strict=True)]
            rounds.append(
                {
                    "before": before,
                    "after": after,
                    "held": max(save["held"] for save in saves),
                    "ends": ends,
                }
            )
            before = after
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
    finally:
        ranks.close()
    return rounds


def beside_row(num_ranks: int, rounds: list[dict[str, Any]]) -> list[str]:
    """A row of the first table."""
    plain = [(part["before"] + part["after"]) / 2 for part in rounds]
    # Times of the first three steps, of those rounds in which there were so many.
    steps = [
        [
            (after - before) / base
            for (before, after), base in zip(place, plain, strict=True)
            if after
        ]
        for place in zip(
            *(pairwise([0.0, *part["ends"], 0.0, 0.0][:4]) for part in rounds), strict=True
        )
    ]
    whole = [
        part["ends"][-1] / len(part["ends"]) / base
        for part, base in zip(rounds, plain, strict=True)
    ]
    noise = [
        2 * part["after"] / (part["before"] + later["after"]) for part, later in pairwise(rounds)
    ]
    low, high = middle_half(whole)
    return [
        str(num_ranks),
        f"{statistics.median(plain) * 1e3:.1f}",
        f"{statistics.median(part['held'] for part in rounds) * 1e3:.1f}",
        f"{statistics.median(len(part['ends']) for part in rounds):.0f}",
        *(
            f"{statistics.median(ratios):.3f}" if ratios else ""
            for ratios in (noise, *steps, whole)
        ),
        f"{low:.3f}-{high:.3f}",
    ]


def measure_bandwidth(
    num_ranks: int, folder: str, options: argparse.Namespace, stderr: IO[str]
) -> dict[str, list[dict[str, float]]]:
    """For each system and round the seconds of the slowest rank."""
    running: dict[str, Ranks] = {}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in WRITERS}
    try:
        for name, checkpoint in WRITERS.items():
            place = str(Path(folder, f"{name}{num_ranks}"))
            system = {
                "folder": place,
                "layers": options.layers,
                "width": options.width,
                "checkpoint": checkpoint,
            }
            running[name] = start(name, num_ranks, system, stderr)
        for number in range(options.rounds + 1):
            for name in WRITERS if number % 2 == 0 else reversed(WRITERS):
                replies = running[name].tell("bandwidth")
                shutil.rmtree(Path(folder, f"{name}{num_ranks}"))
                if number:  # the first takes memory and makes what is made once
                    rounds[name].append(
                        {key: max(reply[key] for reply in replies) for key in replies[0]}
                    )
            print(f"round {number} of {options.rounds}", file=sys.stderr)
    finally:
        for ranks in running.values():
            ranks.close()
    return rounds


def bandwidth_rows(num_ranks: int, rounds: dict[str, list[dict[str, float]]]) -> list[list[str]]:
    """Rows of the second table."""
    rows = []
    for name, found in rounds.items():
        for key, plain in AGAINST:
            ratios = [part[plain] / part[key] for part in found]
            low, high = middle_half(ratios)
            speeds = [
                statistics.median(part["bytes"] / part[which] for part in found) / 1e9
                for which in (key, plain)
            ]
            ratio = f"{statistics.median(ratios):.2f}"
            rows.append(
                [
                    str(num_ranks),
                    name,
                    key,
                    plain,
                    *(f"{speed:.2f}" for speed in speeds),
                    ratio,
                    f"{low:.2f}-{high:.2f}",
                ]
            )
    return rows


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", help="on the disk that is measured (default: the system's for temporary files)"
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="separated by commas")
    parser.add_argument("--ranks", default="1,2", help="numbers of ranks, separated by commas")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--steps", type=int, default=5, help="steps without a save in each round of `beside`"
    )
    parser.add_argument("--layers", type=int, default=8, help="of the model of `bandwidth`")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--json", help="file for all times")
    options = parser.parse_args(argv)
    options.parts = options.parts.split(",")
    if not set(options.parts) <= set(PARTS):
        parser.error(f"--parts: {', '.join(options.parts)}; use {', '.join(PARTS)}")
    return options


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    options = parse_arguments(argv)
    record: dict[str, Any] = {part: {} for part in options.parts}
    beside, bandwidth = [], []
    with (
        tempfile.TemporaryFile("w+") as stderr,
        tempfile.TemporaryDirectory(dir=options.folder) as folder,
    ):
        try:
            for num_ranks in map(int, options.ranks.split(",")):
                if "beside" in options.parts:
                    rounds = record["beside"][num_ranks] = measure_beside(
                        num_ranks, folder, options, stderr
                    )
                    beside.append(beside_row(num_ranks, rounds))
                if "bandwidth" in options.parts:
                    found = record["bandwidth"][num_ranks] = measure_bandwidth(
                        num_ranks, folder, options, stderr
                    )
                    bandwidth += bandwidth_rows(num_ranks, found)
        except RuntimeError as error:
            print_log(stderr, error)
            return 1
    if beside:
        without = ["step without (ms)", "held (ms)", "steps beside", "without / without"]
        each = [f"{name} / without" for name in ("first", "second", "third", "all")]
        print(table(["ranks", *without, *each, "middle half of all"], beside) + "\n")
    if bandwidth:
        print(
            table(
                [
                    "ranks",
                    "writer",
                    "what",
                    "against",
                    "GB/s",
                    "plain GB/s",
                    "ratio",
                    "middle half",
                ],
                bandwidth,
            )
        )
    if options.json:
        Path(options.json).write_text(json.dumps(record) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

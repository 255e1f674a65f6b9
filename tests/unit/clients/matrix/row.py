"""What a scenario is, and the program on every rank that runs some of them.

Scenarios share a process group; one that fails ends the processes, and the others run in new ones.
"""

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deepspeed import comm as dist

STARTED, DONE = "started", "done"
Run = Callable[[Path, int], None]


@dataclass(frozen=True)
class Row:
    """One scenario, which takes an empty folder of all ranks and a ZeRO stage, and raises."""

    run: Run
    stages: Sequence[int]


def scenario(rows: dict[str, Row], *stages: int) -> Callable[[Run], Run]:
    """Put the function into ``rows`` under its own name with dashes."""

    def add(run: Run) -> Run:
        rows[run.__name__.replace("_", "-")] = Row(run, stages)
        return run

    return add


def main(rows: Mapping[str, Row], begin: Callable[[], None], end: Callable[[], None]) -> None:
    """Run the rows that the command line names, as ``NAME@STAGE``, and note which were started and
    done. Without names, print all. ``begin`` makes the process group, ``end`` forgets what the
    library keeps of a row.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--local_rank", type=int, help="the launcher gives it")
    parser.add_argument("rows", nargs="*")
    arguments = parser.parse_args()
    if not arguments.rows:
        print(*(f"{name}@{stage}" for name, row in rows.items() for stage in row.stages), sep="\n")
        return
    begin()
    for word in arguments.rows:
        name, _, stage = word.partition("@")
        folder = arguments.out / word
        if dist.get_rank() == 0:
            folder.mkdir()
            _note(arguments.out / STARTED, word)
        dist.barrier()
        try:
            rows[name].run(folder, int(stage))
            end()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        dist.barrier()
        if dist.get_rank() == 0:
            _note(arguments.out / DONE, word)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def _note(file: Path, word: str) -> None:
    with file.open("a", encoding="utf-8") as opened:
        opened.write(f"{word}\n")

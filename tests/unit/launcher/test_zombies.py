"""No process is left by a launch that failed or was interrupted: a share of the campaign's."""

import gc
import os
import random
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from unit.launcher import forked
from unit.launcher.zombies import CHILDREN, Round, hearing_hangups, leftovers, play, random_round

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="processes are found in /proc"
)


def rank(end: str, *children: str, deaf: bool = False) -> dict[str, object]:
    return {"children": children, "deaf": deaf, "end": end}


ROUNDS = {
    # Kills: killing descendants once only; a shell that starts another every 50 ms gets away.
    "a rank raises, the other has children": Round(
        (rank("raise", *CHILDREN), rank("sleep", *CHILDREN)), ""
    ),
    "a rank crashes": Round((rank("crash", "daemon"), rank("sleep", "shells")), ""),
    "stuck in native code, interrupted twice": Round(
        (rank("native", "shells"), rank("lock", "daemon")), "SIGINT SIGINT", 0.1
    ),
    "deaf ranks, terminated": Round(
        (rank("sleep", "shells", deaf=True), rank("native", "daemon")), "SIGTERM", 0.1
    ),
    "the terminal is closed": Round(
        (rank("sleep", *CHILDREN), rank("sleep")), "SIGHUP", 0.1, group=True
    ),
    # Kills: a launch without its reaper: the kernel ends ranks, their children come to init.
    "the launcher is killed": Round(
        (rank("native", *CHILDREN), rank("sleep", *CHILDREN)), "SIGKILL", 0.1
    ),
    "the launcher is killed while it cleans up": Round(
        (rank("native", "shells"), rank("lock", *CHILDREN)), "SIGINT SIGKILL"
    ),
    "interrupted while it starts": Round(
        (rank("sleep", *CHILDREN), rank("sleep")), "SIGINT", 1.5, when_ready=False
    ),
}


def test_nothing_is_left(tmp_path: Path) -> None:
    if shutil.which("sh") is None:
        pytest.skip("ranks start shells")

    def outcome(item: tuple[int, Round]) -> list[str]:
        folder = tmp_path / str(item[0])
        folder.mkdir()
        is_forked = item[1].when_ready and item[1].interrupt != "SIGKILL"
        return play(replace(item[1], is_forked=is_forked), folder)

    with hearing_hangups(), ThreadPoolExecutor(4) as threads:
        left = list(threads.map(outcome, enumerate(ROUNDS.values())))
    assert dict(zip(ROUNDS, left, strict=True)) == {name: [] for name in ROUNDS}


def test_random_rounds_are_bad_enough() -> None:
    """The campaign meets every way to end, every interruption, and children of every kind."""
    rng = random.Random(0)
    rounds = [random_round(rng) for _ in range(200)]
    ends = {str(behaviour["end"]) for launch in rounds for behaviour in launch.ranks}
    assert ends == {"crash", "raise", "exit", "native", "lock", "sleep"}
    wanted = {"", "SIGINT", "SIGINT SIGINT", "SIGTERM", "SIGHUP", "SIGKILL"}
    assert {launch.interrupt for launch in rounds} >= wanted
    assert leftovers("no such word", 0.0) == []


OWN_FILES = """
import gc, os
own = [os.open(os.devnull, os.O_RDONLY) for _ in range(100)]
gc.collect()
print(*map(os.fstat, own), sep="\\n")
"""


def test_a_forked_program_keeps_the_files_that_it_opens(tmp_path: Path) -> None:
    """Kills: numbers of files that the parent's objects close once more when they are collected."""
    (tmp_path / "program.py").write_text(OWN_FILES)
    gc.disable()
    try:
        cycle: list[object] = [open(os.devnull) for _ in range(20)]
        cycle.append(cycle)
        del cycle
        command = [sys.executable, str(tmp_path / "program.py")]
        program = forked.start(command, dict(os.environ), stdout=subprocess.PIPE, text=True)
    finally:
        gc.enable()
    assert (len(program.communicate()[0].splitlines()), program.returncode) == (100, 0)

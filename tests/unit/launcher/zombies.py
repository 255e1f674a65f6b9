"""Random failing and interrupted launches, and what is left of each: the campaign `zombies`.

Every process of a round carries a word in its environment; /proc tells who is left. Ranks are bad
on purpose: stuck in native code, holding the interpreter's lock, ignoring signals, with workers,
shells and daemons of their own in other sessions.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from unit.launcher.rounds import campaign_options, count_good
from unit.launcher.starting import Process, start

MARK = "ZOMBIE_HUNT"
LEFT_SECONDS = 15.0
"""After the launcher's own end, for the kernel's signals and the reaper; the launcher is gone,
nobody else acts.
"""

RANK = """
import ctypes, json, os, signal, subprocess, sys, time
behaviour = json.loads(os.environ["BEHAVIOUR"])[int(os.environ["RANK"])]
def shells():
    subprocess.Popen(["sh", "-c", "trap '' TERM INT HUP; sleep 600 & wait; sleep 600"])
    subprocess.Popen(["sleep", "600"], start_new_session=True)
def daemon():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
    os.wait()
def loader():
    import torch
    loader = torch.utils.data.DataLoader(list(range(64)), num_workers=2)
    globals()["kept"] = iter(loader)
    next(kept)
def breeding():
    endless = "trap '' TERM; while :; do sleep 600 & sleep 0.05; done"
    subprocess.Popen(["sh", "-c", endless], start_new_session=True)
for child in behaviour["children"]:
    globals()[child]()
if behaviour["deaf"]:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
open(os.path.join(os.environ["READY"], os.environ["RANK"]), "w").close()
end = behaviour["end"]
if end == "native":
    # All signals blocked, below Python: only SIGKILL ends this.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    ctypes.CDLL(None).sleep(600)
elif end == "lock":
    # The interpreter's lock is held: no Python handler ever runs.
    signal.signal(signal.SIGTERM, lambda *_: None)
    ctypes.PyDLL(None).sleep(600)
elif end == "crash":
    ctypes.string_at(0)
elif end == "raise":
    raise ValueError("boom")
elif end == "exit":
    os._exit(3)
time.sleep(600)
"""
CHILDREN = ("shells", "daemon", "breeding")
FAILING = ("crash", "raise", "exit")
STUCK = ("native", "lock", "sleep")
INTERRUPTS = (
    *("SIGINT", "SIGINT SIGINT", "SIGTERM", "SIGTERM SIGINT"),
    *("SIGHUP", "SIGKILL", "SIGINT SIGKILL"),
)


@dataclass(frozen=True)
class Round:
    """One launch: what each rank does, what is done to the launcher, when, and to whom.

    Attributes:
        ranks: per rank its `children`, whether it is `deaf` to signals, and its `end`.
        interrupt: signals to the launcher in order; "" where a rank fails by itself.
        delay: seconds before the first, from when all ranks are ready (`when_ready`) or the start.
        group: signal the launcher's whole process group, as a terminal does.
        is_forked: fork the launcher from this process; only where its start shows nothing.
    """

    ranks: tuple[dict[str, object], ...]
    interrupt: str
    delay: float = 0.0
    when_ready: bool = True
    group: bool = False
    is_forked: bool = False


def random_round(rng: random.Random) -> Round:
    """A launch of two ranks; one in three fails by itself, the others are interrupted."""
    failing = rng.random() < 1 / 3

    def rank(end: str) -> dict[str, object]:
        children = rng.sample(CHILDREN, rng.randint(0, len(CHILDREN)))
        if rng.random() < 0.15:
            children.append("loader")
        return {"children": children, "deaf": rng.random() < 0.3, "end": end}

    if failing:
        return Round((rank(rng.choice(FAILING)), rank(rng.choice(STUCK))), "")
    interrupt = rng.choice(INTERRUPTS)
    when_ready = rng.random() < 0.7
    delay = rng.uniform(0.0, 0.5 if when_ready else 3.0)
    ranks = rank(rng.choice(STUCK)), rank(rng.choice(STUCK))
    return Round(ranks, interrupt, delay, when_ready, rng.random() < 0.4)


@contextmanager
def hearing_hangups() -> Iterator[None]:
    """Launches within do not inherit that this process ignores SIGHUP, if `nohup` started it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def play(launch: Round, folder: Path, patience: float = 60.0) -> list[str]:
    """Run one launch in an empty folder; returns the commands of what is left, which is killed."""
    word = uuid.uuid4().hex
    (folder / "rank.py").write_text(RANK)
    variables = {
        # Half a minute of patience with deaf ranks is right for users, and the same code in two
        # seconds here.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "2",
        **{MARK: word, "READY": str(folder), "BEHAVIOUR": json.dumps(launch.ranks)},
    }
    words = ("-q", "--num_gpus", str(len(launch.ranks)), "rank.py")
    with open(folder / "output", "wb") as output:
        how = {"is_forked": launch.is_forked, "output": output, "start_new_session": True}
        launcher = start(folder, *words, variables=variables, **how)
    try:
        disturb(launcher, launch, folder)
        with suppress(subprocess.TimeoutExpired):
            launcher.wait(patience)
    finally:
        left = leftovers(word, LEFT_SECONDS)
        if launch.is_forked and launcher.poll() is None:
            left.append((launcher.pid, "the launcher"))  # the word is not in its environment
        kill(left)
        launcher.wait()
    return [line for _, line in left]


def kill(left: list[tuple[int, str]]) -> None:
    """End processes, some of which may have gone."""
    for pid, _ in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def disturb(launcher: Process, launch: Round, folder: Path) -> None:
    """Wait for the round's moment, then send its signals; at once where a rank fails by itself."""
    if not launch.interrupt:
        return
    if launch.when_ready:
        deadline = time.monotonic() + 90
        while not all((folder / str(rank)).exists() for rank in range(len(launch.ranks))):
            if launcher.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the ranks did not start: {(folder / 'output').read_text()}")
            time.sleep(0.02)
    time.sleep(launch.delay)
    for name in launch.interrupt.split():
        try:
            (os.killpg if launch.group else os.kill)(launcher.pid, signal.Signals[name])
        except ProcessLookupError:
            return
        # Closer together they would be taken for one.
        time.sleep(0.6)


def leftovers(word: str, seconds: float) -> list[tuple[int, str]]:
    """(id, command line) of the round's processes that are still there after at most `seconds`."""
    deadline = time.monotonic() + seconds
    while (left := marked(f"{MARK}={word}".encode())) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def marked(mark: bytes) -> list[tuple[int, str]]:
    """The processes that carry `mark`; a zombie in the kernel's sense has none."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                found.append((int(entry.name), words.decode(errors="replace")))
        except OSError:
            continue
    return found


def main() -> int:
    """Run random rounds and print how many left nothing."""
    parser = campaign_options(__doc__, 50)
    parser.add_argument("--folder", type=Path, required=True, help="an empty folder for the rounds")
    args = parser.parse_args()

    def play_in_folder(number: int, launch: Round) -> str:
        folder = args.folder.absolute() / str(number)
        folder.mkdir(parents=True)
        with hearing_hangups():
            left = play(launch, folder)
        return f"{len(left)} left {left}" if left else ""

    return count_good(args, random_round, play_in_folder, "left no process")


if __name__ == "__main__":
    sys.exit(main())

"""One of two ranks ends at a random moment, and whom the launcher blames: the campaign `blame`.
Its peer raises and still cleans up when the launcher ends it: whose end is seen first is chance.
"""

import os
import random
import re
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from unit.launcher.rounds import campaign_options, count_good
from unit.launcher.starting import Process, free_pair, start
from unit.launcher.zombies import hearing_hangups

RANK = """
import ctypes, os, random, sys, time
rank, end, delay = os.environ["RANK"], os.environ["END"], float(os.environ["DELAY"])
folder = os.environ["READY"]
def ready(name):
    with open(os.path.join(folder, name + rank + ".new"), "w") as stream:
        stream.write(str(os.getpid()))
    os.rename(stream.name, os.path.join(folder, name + rank))
ready("started")
if "PEER" in os.environ:
    # Without torch: a word to and fro.
    import socket
    path = os.path.join(folder, "peer")
    if rank == "0":
        with socket.socket(socket.AF_UNIX) as listens:
            listens.bind(path + ".new")
            listens.listen()
            os.rename(path + ".new", path)
            peer = listens.accept()[0]
    else:
        while not os.path.exists(path):
            time.sleep(0.01)
        peer = socket.socket(socket.AF_UNIX)
        peer.connect(path)
    def exchange():
        try:
            peer.sendall(b"x")
            if not peer.recv(1):
                raise ConnectionError("Connection closed by peer")
        except ConnectionError:
            time.sleep(0.05)  # torch takes its time too
            raise
else:
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    value = torch.ones(1000)
    def exchange():
        dist.all_reduce(value)
exchange()
ready("joined")
until = time.monotonic() + delay
while True:
    exchange()
    if rank == os.environ["VICTIM"] and time.monotonic() > until:
        if end == "raise":
            # Right after a collective torch was seen to abort when the interpreter ends
            # ("terminate called without an active exception"): that would be another end.
            time.sleep(0.02)
            raise ValueError("boom")
        if end == "abort":
            os.abort()
        if end == "crash":
            ctypes.string_at(0)
"""
FROM_OUTSIDE = ("SIGKILL", "SIGSEGV", "SIGABRT", "SIGTERM")
ENDS = {
    **{name: signal.Signals[name].value for name in FROM_OUTSIDE},
    "abort": signal.SIGABRT.value,
    "crash": signal.SIGSEGV.value,
    "raise": 0,
}
"""How the rank ends, and the number of the signal that ends it: sent to it, or its own fault."""
LIMIT = 120.0


@dataclass(frozen=True)
class Round:
    """One launch.

    Attributes:
        delay: seconds until the `end` of the `victim`, from the first all-reduce.
        early: count from when the rank's program begins; only for what comes from outside.
        nodes: launchers, with one rank each if there are two.
        is_light: the ranks speak without torch, and the launcher is forked from this process.
    """

    end: str
    victim: int
    delay: float
    early: bool = False
    nodes: int = 1
    is_light: bool = False


def random_round(rng: random.Random) -> Round:
    """Every second rank is killed, as when memory is short; every fourth launch has two nodes."""
    end = "SIGKILL" if rng.random() < 0.5 else rng.choice(sorted(set(ENDS) - {"SIGKILL"}))
    early = end in FROM_OUTSIDE and rng.random() < 0.2
    delay = rng.uniform(0.0, 4.0 if early else 0.5)
    return Round(end, rng.randrange(2), delay, early, 2 if rng.random() < 0.25 else 1)


def play(launch: Round, folder: Path) -> str:
    """Run one launch in an empty folder; returns "", or what was said if wrongly blamed."""
    (folder / "rank.py").write_text(RANK)
    port = free_pair()
    launchers = [begin(launch, folder, node, port) for node in range(launch.nodes)]
    try:
        pid = rank_id(launch, folder, launchers)
        if launch.end in FROM_OUTSIDE:
            time.sleep(launch.delay)
            os.kill(pid, signal.Signals[launch.end])
        codes = [launcher.wait(LIMIT) for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.wait()
    said = [(folder / f"output{node}").read_text() for node in range(launch.nodes)]
    number = ENDS[launch.end]
    expected = 128 + number if number else 1
    blamed = re.findall(r"rank (\d+) \(process (\d+)\) failed first, with (.*)", said[0])
    how = f"signal {signal.Signals(number).name} ({number})" if number else ""
    right = (
        codes == [expected] * launch.nodes
        and [found[:2] for found in blamed] == [(str(launch.victim), str(pid))]
        and (blamed[0][2] == how if number else said[0].rstrip().endswith("ValueError: boom"))
    )
    return "" if right else f"codes {codes}, rank {launch.victim} was process {pid}\n" + said[0]


def begin(launch: Round, folder: Path, node: int, port: int) -> Process:
    """Start one node's launcher; all nodes meet at `port`."""
    flags = ["--num_gpus", "2"]
    if launch.nodes > 1:
        flags = ["--num_gpus", "1", "--no_ssh", "--num_nodes", str(launch.nodes), "--node_rank"]
        flags += [str(node), "--master_addr", "127.0.0.1", "--master_port", str(port)]
    variables = {"READY": str(folder), "END": launch.end, "VICTIM": str(launch.victim)}
    variables.update(DELAY=str(launch.delay), **({"PEER": "1"} if launch.is_light else {}))
    with open(folder / f"output{node}", "wb") as output:
        how = {"is_forked": launch.is_light, "output": output, "variables": variables}
        return start(folder, "-q", *flags, "rank.py", **how)


def rank_id(launch: Round, folder: Path, launchers: list[Process]) -> int:
    """The victim's process id, once it and its peer are where the delay is counted from."""
    name = "started" if launch.early else "joined"
    deadline = time.monotonic() + LIMIT
    while not all((folder / f"{name}{rank}").exists() for rank in (0, 1)):
        if time.monotonic() > deadline or any(other.poll() is not None for other in launchers):
            raise RuntimeError(f"the ranks did not start: {(folder / 'output0').read_text()}")
        time.sleep(0.005)
    return int((folder / f"{name}{launch.victim}").read_text())


def main() -> int:
    """Run random rounds and print how many were blamed right."""
    parser = campaign_options(__doc__, 200)
    parser.add_argument("--end", choices=ENDS, help="only ranks that end like this")
    args = parser.parse_args()

    def draw(rng: random.Random) -> Round:
        launch = random_round(rng)
        return launch if args.end in (None, launch.end) else draw(rng)

    def play_alone(number: int, launch: Round) -> str:
        with tempfile.TemporaryDirectory() as folder, hearing_hangups():
            return play(launch, Path(folder))

    return count_good(args, draw, play_alone, "blamed right")


if __name__ == "__main__":
    sys.exit(main())

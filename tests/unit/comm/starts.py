"""Two ranks start, train one step and end as a user's program: the campaign `starts`.

A start is told of if it stands, with its stacks, if a rank ends with a code other than 0, or says
what C++ says of a thread that was cut off ("terminate called") when the interpreter ends.
"""

import argparse
import faulthandler
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unit.common import RANK_ENV, get_master_port
from unit.launcher.rounds import campaign_options, told_seed
from unit.rank_server import become_template

FORKED, SPAWNED = "forked", "spawned"
LIMIT_S = 60.0
"""When the stacks of ranks that have not ended are taken. They are given up after four times as
long: beside a load some are late, which is no fault.
"""
BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): pass"


@dataclass(frozen=True)
class Start:
    """Two ranks FORKED from one process that has all imported, meeting in a file, or SPAWNED, over
    TCP; the program `destroys` its process group, or leaves that to the interpreter.
    """

    how: str
    stage: int
    destroys: bool


def starts(seed: int, how: str | None) -> Iterator[Start]:
    """Forked and spawned by turns unless `how` says which."""
    rng = random.Random(seed)
    for turn in itertools.cycle((FORKED, SPAWNED)):
        drawn = Start(turn, rng.randrange(4), rng.random() < 0.5)
        if how in (None, turn):
            yield drawn


# -- in a rank -------------------------------------------------------------------------------------


def be_rank(start: Start, rank: int, folder: Path, port: str) -> None:
    """Be a rank, whose process then ends in the interpreter's own way."""
    output = os.open(folder / f"rank{rank}.out", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # It stays open until the process ends.
    stacks = open(folder / f"rank{rank}.stacks", "w", encoding="utf-8")
    faulthandler.enable(file=stacks, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    os.environ.update(RANK_ENV, DS_ACCELERATOR="cpu", GLOO_SOCKET_IFNAME="lo")
    os.environ.update({name: str(rank) for name in ("RANK", "LOCAL_RANK")})
    os.environ.update({name: "2" for name in ("WORLD_SIZE", "LOCAL_SIZE")})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    train(start, f"file://{folder}/store" if start.how == FORKED else "env://")


def train(start: Start, meeting_point: str) -> None:
    """A user's program."""
    # A spawned rank has not imported them before.
    import torch

    import deepspeed

    deepspeed.init_distributed("gloo", init_method=meeting_point, verbose=False)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": start.stage},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    deepspeed.comm.barrier()
    engine.backward(engine(torch.ones(2, 8)).sum())
    engine.step()
    if start.destroys:
        deepspeed.comm.destroy_process_group()


# -- the campaign ----------------------------------------------------------------------------------


def begin(start: Start, rank: int, folder: Path, port: str) -> int:
    """Start a rank; returns its process id, or 0 in a forked rank."""
    # A rank inherits it: asked for stacks while it imports, or after its interpreter has ended
    # (either takes long beside a load), it tells none and goes on.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if start.how == FORKED:
        return os.fork()
    words = [str(word) for word in (start.stage, int(start.destroys), rank, folder, port)]
    command = [sys.executable, "-m", "unit.comm.starts", "--rank", *words]
    return os.posix_spawn(sys.executable, command, os.environ)


def verdict(pids: list[int], folder: Path, limit_s: float = LIMIT_S) -> str:
    """Wait for the ranks; returns "" if all ended well, or what is to be said of them."""
    codes: dict[int, int] = {}
    stacks = ""
    began = time.monotonic()
    while len(codes) < len(pids):
        time.sleep(0.01)
        for pid in set(pids) - codes.keys():
            reaped, status = os.waitpid(pid, os.WNOHANG)
            if reaped:
                codes[pid] = os.waitstatus_to_exitcode(status)
        late, waited = sorted(set(pids) - codes.keys()), time.monotonic() - began
        if waited > limit_s and not stacks:
            stacks = f"not ended after {limit_s:g} s: {late}\n" + native_stacks(late)
            for pid in late:
                os.kill(pid, signal.SIGUSR1)
            began = time.monotonic() - limit_s  # the debugger's time is not theirs
        elif waited > 4 * limit_s:
            for pid in late:
                os.kill(pid, signal.SIGKILL)
    said = [path.read_text(errors="replace") for path in sorted(folder.glob("rank*.out"))]
    if not any(codes.values()) and "terminate called" not in "".join(said):
        return ""
    said += [path.read_text(errors="replace") for path in sorted(folder.glob("rank*.stacks"))]
    return "\n".join([f"codes {[codes[pid] for pid in pids]}", stacks, *said])


def native_stacks(pids: list[int]) -> str:
    """The stacks of all threads, if there is a debugger; Python's come from the ranks."""
    if shutil.which("gdb") is None:
        return "no gdb, so no native stacks\n"
    words = ["gdb", "-batch", "-ex", "thread apply all backtrace 25", "-p"]
    how: dict[str, Any] = {"capture_output": True, "text": True, "check": False}
    return "\n".join(subprocess.run([*words, str(pid)], **how).stdout for pid in pids)


def main() -> None:
    """Run random starts and print how many ended well; the exit code is 0 if all did."""
    parser = campaign_options(__doc__, 2000)
    parser.add_argument("--how", choices=(FORKED, SPAWNED), help="only starts of this kind")
    busy = "busy processes beside the ranks"
    parser.add_argument("--load", type=int, default=os.cpu_count(), help=busy)
    parser.add_argument("--rank", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        stage, destroys, rank, folder, port = args.rank
        be_rank(Start(SPAWNED, int(stage), destroys == "1"), int(rank), Path(folder), port)
        return
    seed = told_seed(args.seed)
    for _ in range(args.load):
        # It ends with this process, so that forked ranks have nothing to leave alone.
        os.posix_spawn(sys.executable, [sys.executable, "-c", BUSY, str(os.getpid())], os.environ)
    become_template()
    well = 0
    for number, start in enumerate(itertools.islice(starts(seed, args.how), args.rounds), 1):
        folder, port = Path(tempfile.mkdtemp(prefix="start-")), get_master_port()
        pids: list[int] = []
        for rank in (0, 1):
            pids.append(begin(start, rank, folder, port))
            if not pids[-1]:
                # Nothing is around this loop: the rank's end is that of a program.
                be_rank(start, rank, folder, port)
                return
        wrong = verdict(pids, folder)
        shutil.rmtree(folder)
        well += not wrong
        if wrong or not number % 20:
            print(f"{number}: {well} well, last {start}\n{wrong}".rstrip(), flush=True)
    print(f"{well} of {args.rounds} ended well", flush=True)
    sys.exit(well != args.rounds)


if __name__ == "__main__":
    main()

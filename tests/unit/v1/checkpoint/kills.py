"""Runs that are killed while they save, or while they update state in files, over and over, and
what the next run finds.

A round loads the newest checkpoint, compares itself with a run that was never broken, trains on,
saves after every step, until one process is killed: after so many file operations of a save or an
update (an audit hook counts them, so that every place between two has its turn), or so long after
it began (so that the inside of a write has). The others live a little longer, and may do what
survivors do.

Called in a process that has no process group and no threads: every rank is forked from it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import os
import pickle
import random
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import deepspeed
from deepspeed.ops import state_files
from unit.models import seeded
from unit.rank_server import become_template

from . import runs
from . import test_pipeline as pipeline

# How far the unbroken run goes; killed runs that get there begin anew in an empty folder.
LAST_STEP = 24
# How many steps a round takes if nobody dies.
ROUND_STEPS = 5
# How long survivors go on.
SURVIVAL_S = 0.3
# How long ranks may be silent until it is looked whether the one that kills itself has done so.
LOOK_S = 0.2
ROUND_LIMIT_S = 60.0
# Problems after which a campaign ends.
TOO_MANY = 5


class Case(NamedTuple):
    """What two ranks train and how they save it, with more keys of the configuration.

    Attributes:
        stages: Pipeline stages; 0 trains `runs.Net`.
        one_tag: Every save replaces the one before, under the same tag.
        swaps: State lies in files, and ranks are killed in a step.
    """

    name: str
    keys: dict[str, Any]
    stages: int = 0
    one_tag: bool = False
    swaps: bool = False

    @property
    def is_async(self) -> bool:
        """Whether a save is on disk only some time after `save_checkpoint` returned."""
        return bool(self.keys.get("checkpoint", {}).get("writer", {}).get("decoupled", False))


WORLD = 2
ASYNC = {"writer": {"type": "fast", "decoupled": True}}
CASES = (
    Case("zero2-bf16", {**runs.BF16, **runs.zero(2)}),
    Case("zero1-fp16-async", {"fp16": {"enabled": True}, **runs.zero(1), "checkpoint": ASYNC}),
    Case("stage0-one-tag", {}, one_tag=True),
    Case("zero2-async-keep2", {**runs.zero(2), "checkpoint": {**ASYNC, "keep_last": 2}}),
    Case("zero2-async-one-tag", {**runs.zero(2), "checkpoint": ASYNC}, one_tag=True),
    Case("pipeline-async", {**runs.BF16, **runs.zero(1), "checkpoint": ASYNC}, stages=2),
    Case("pipeline-keep1", {**runs.zero(1), "checkpoint": {"keep_last": 1}}, stages=2),
    Case("swap-zero1-bf16", {**runs.BF16, **runs.zero(1)}, swaps=True),
    Case("swap-zero2-fp16", {"fp16": {"enabled": True}, **runs.zero(2)}, swaps=True),
    Case("swap-zero3-bf16", {**runs.BF16, **runs.zero(3)}, swaps=True),
)
# Where the files of state are opened: they have no names.
DESCRIPTORS = "/proc/self/fd/"
# Of the folder of checkpoints.
SWAP = ".swap"


class Wide(runs.Net):
    """State of several windows."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Sequential(nn.Linear(runs.WIDTH, 800), nn.Linear(800, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.wide(x)


class Kill(NamedTuple):
    """Who is killed when: in its `save`-th save, or the step before it, at file operation
    `operation` or after `delay_s`.
    """

    rank: int
    save: int
    operation: int | None
    delay_s: float


Tell = Callable[[str, int, Any], None]


class Progress:
    """What ranks have told: where they loaded, steps whose saves began and returned, problems."""

    def __init__(self) -> None:
        self.told: dict[str, list[tuple[int, Any]]] = {}

    def take(self, message: tuple[str, int, Any]) -> None:
        kind, rank, value = message
        self.told.setdefault(kind, []).append((rank, value))

    def last(self, kind: str) -> int:
        """The last step of which a rank has told that."""
        return max((value for _, value in self.told.get(kind, ())), default=0)

    def lines(self, kind: str) -> list[str]:
        """What ranks have told of a kind."""
        return [f"rank {rank}: {value}" for rank, value in self.told.get(kind, ())]


# -- in a rank -------------------------------------------------------------------------------------


def digest(engine: Any, case: Case) -> str:
    """A hash of all that a resumed run has in common with an unbroken one, of this rank."""
    if case.stages:
        seen = {**runs.by_name(engine), **runs.progress(engine)}
    else:
        seen = runs.look(engine)
        # The end of an epoch and the start of the next are one position; a wrong one shows in the
        # next step.
        del seen["data"]
    # All steps go through a pipe in one write.
    return hashlib.sha256(_plain(sorted(seen.items()))).hexdigest()[:16]


def _plain(value: Any) -> bytes:
    """All of it: torch shortens long tensors in their text."""
    if isinstance(value, torch.Tensor):
        return value.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        value = list(value.items())
    return (
        b"".join(map(_plain, value)) if isinstance(value, (tuple, list)) else repr(value).encode()
    )


def _start(case: Case, folder: str) -> Any:
    if case.stages:
        return pipeline.make(case.stages, **case.keys)
    if case.swaps:
        state_files.WINDOW_NUMEL = 1024
        offload = {"device": "nvme", "nvme_path": folder + SWAP}
        zero = {**case.keys["zero_optimization"], "offload_optimizer": offload}
        return runs.start(model=seeded(Wide), **{**case.keys, "zero_optimization": zero})
    return runs.start(**case.keys)


def _step(engine: Any, case: Case) -> None:
    (pipeline.train if case.stages else runs.train)(engine, 1)


def _die_after(operations: int, folder: str) -> Callable[[], None]:
    """Returns what arms it: the process kills itself at that many file operations in `folder`."""
    left, armed = operations, False

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if not armed or not (event == "open" or event.startswith(("os.", "shutil."))):
            return
        paths = [os.fspath(value) for value in arguments if isinstance(value, (str, os.PathLike))]
        if any(path.startswith(folder) for path in paths):
            left -= 1
            if left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def arm() -> None:
        nonlocal armed
        armed = True

    sys.addaudithook(hook)
    return arm


def _rank(
    case: Case, rank: int, port: int, folder: str, kill: Kill | None, steps: list[str], tell: Tell
) -> None:
    """One rank of a round; with an empty `steps` it is the unbroken run, and fills them."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), LOCAL_SIZE=str(WORLD))
    os.environ.update(WORLD_SIZE=str(WORLD), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    engine = _start(case, folder)
    unbroken = not steps
    if unbroken:
        for _ in range(LAST_STEP):
            _step(engine, case)
            steps.append(digest(engine, case))
        tell("steps", rank, steps)
        return
    engine.load_checkpoint(folder)
    tell("loaded", rank, engine.global_steps)
    if engine.global_steps and digest(engine, case) != steps[engine.global_steps - 1]:
        step = f"step {engine.global_steps} of the unbroken run"
        tell("problem", rank, f"what was loaded is not {step}")
    arm = None
    if kill is not None and kill.rank == rank and kill.operation is not None:
        arm = _die_after(kill.operation, DESCRIPTORS if case.swaps else folder)
    for save in range(min(ROUND_STEPS, LAST_STEP - engine.global_steps)):
        tell("step", rank, engine.global_steps + 1)
        if case.swaps and arm is not None and kill is not None and save == kill.save:
            arm()
        _step(engine, case)
        if digest(engine, case) != steps[engine.global_steps - 1]:
            tell("problem", rank, f"step {engine.global_steps} is not that of the unbroken run")
        tell("begin", rank, engine.global_steps)
        if not case.swaps and arm is not None and kill is not None and save == kill.save:
            arm()
        engine.save_checkpoint(folder, tag="same" if case.one_tag else None)
        tell("return", rank, engine.global_steps)
    engine.destroy()


# -- around the ranks ------------------------------------------------------------------------------


class Campaign:
    """Rounds of one case in one empty folder; `seed` chooses the instants."""

    def __init__(self, case: Case, folder: Path, seed: int) -> None:
        self.case = case
        self.folder = folder / "checkpoints"
        self.random = random.Random(seed)
        self.logs = folder
        self.kills = 0
        self.begun = self.at_least = 0
        self.problems: list[str] = []
        self.unbroken: dict[int, list[str]] = {}

    def run(self, kills: int) -> None:
        """Kill that many times; then look once more."""
        self._unbroken_run()
        while self.kills < kills and len(self.problems) < TOO_MANY:
            # The second save replaces a published one, and with `keep_last` removes one.
            rank, save = self.random.randrange(WORLD), self.random.randrange(3)
            most = 70 if self.case.swaps else 40
            operation = self.random.randint(1, most) if self.random.random() < 0.5 else None
            self._round(Kill(rank, save, operation, self.random.uniform(0.0, 0.03)))
        self._round(None)

    def _unbroken_run(self) -> None:
        with _Ranks(self.case, str(self.folder), None, {}, self.logs) as ranks:
            for kind, rank, value in ranks.messages():
                if kind == "steps":
                    self.unbroken[rank] = value
                elif kind == "raised":
                    raise AssertionError(value)

    def _round(self, kill: Kill | None) -> None:
        progress = Progress()
        self.folder.mkdir(exist_ok=True)
        with _Ranks(self.case, str(self.folder), kill, self.unbroken, self.logs) as ranks:
            killed = ranks.follow(progress, kill)
        self.kills += killed
        left = os.listdir(f"{self.folder}{SWAP}") if self.case.swaps else []
        where = f"{self.case.name}, after kill {self.kills} ({kill})"
        loaded, begun = progress.last("loaded"), progress.last("begin")
        if "loaded" not in progress.told and kill is None:
            self.problems.append(f"{where}: nothing could be loaded")
        if "loaded" in progress.told and not self.at_least <= loaded <= self.begun:
            saved = f"{self.at_least} was saved and {self.begun} begun"
            self.problems.append(f"{where}: step {loaded} was loaded; {saved}")
        # What survivors raise about their lost peer is as it should be.
        found = progress.lines("problem") + ([] if killed else progress.lines("raised"))
        found += [f"files of state are left: {left}"] if left else []
        self.problems += [f"{where}: {problem}" for problem in found]
        self.begun = max(self.begun, begun)
        # What returned is on disk; of an asynchronous save that is so of the one before.
        self.at_least = max(self.at_least, progress.last("return") - self.case.is_async)
        if begun >= LAST_STEP - 1:
            shutil.rmtree(self.folder)
            self.begun = self.at_least = 0


class _Ranks:
    """The processes of a round; none is left when it ends."""

    def __init__(
        self, case: Case, folder: str, kill: Kill | None, unbroken: dict[int, list[str]], logs: Path
    ) -> None:
        self.pids: dict[int, int] = {}
        self.swaps = case.swaps
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.inbox, outbox = os.pipe()
        for rank in range(WORLD):
            pid = os.fork()
            if pid == 0:
                steps = list(unbroken.get(rank, []))
                run = functools.partial(_rank, case, rank, port, folder, kill, steps)
                _become(rank, run, outbox, logs)
            self.pids[rank] = pid
        os.close(outbox)
        self.partial = b""

    def __enter__(self) -> _Ranks:
        return self

    def __exit__(self, *_: Any) -> None:
        for pid in self.pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(self.inbox)

    def messages(
        self, limit_s: float = ROUND_LIMIT_S, is_over: Callable[[], bool] = lambda: False
    ) -> Any:
        """What ranks tell, until all have closed their end, time is over, or `is_over()`."""
        deadline = time.monotonic() + limit_s
        while (left := deadline - time.monotonic()) > 0:
            if not select.select([self.inbox], [], [], min(left, LOOK_S))[0]:
                if is_over():
                    return
                continue
            data = os.read(self.inbox, 1 << 16)
            if not data:
                return
            *lines, self.partial = (self.partial + data).split(b"\n")
            yield from (pickle.loads(bytes.fromhex(line.decode())) for line in lines)

    def follow(self, progress: Progress, kill: Kill | None) -> bool:
        """Take the messages of a round, kill as planned; whether somebody was killed."""

        def is_dead() -> bool:
            # A survivor that waits for the dead rank says nothing for as long as it waits.
            return kill is not None and kill.operation is not None and self._is_dead(kill.rank)

        first = time.monotonic()
        for message in self.messages(ROUND_LIMIT_S, is_dead):
            progress.take(message)
            place = "step" if self.swaps else "begin"
            if kill is not None and message[:2] == (place, kill.rank) and kill.operation is None:
                begun = message[2] - progress.last("loaded")
                if begun == kill.save + 1:
                    time.sleep(kill.delay_s)
                    os.kill(self.pids[kill.rank], signal.SIGKILL)
                    self._drain(progress)
                    return True
            if is_dead():
                break
        if time.monotonic() - first >= ROUND_LIMIT_S:
            progress.take(("problem", kill.rank if kill else 0, "the ranks neither ended nor died"))
        if not is_dead():
            return False
        self._drain(progress)
        return True

    def _is_dead(self, rank: int) -> bool:
        info = os.waitid(os.P_PID, self.pids[rank], os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return info is not None and info.si_code == os.CLD_KILLED

    def _drain(self, progress: Progress) -> None:
        for message in self.messages(SURVIVAL_S):
            progress.take(message)


def _become(rank: int, run: Callable[[Tell], None], outbox: int, logs: Path) -> None:
    """A forked process becomes a rank and never returns."""

    def tell(*message: Any) -> None:
        # It is written at once: shorter than a pipe's atomic write.
        os.write(outbox, pickle.dumps(message).hex().encode() + b"\n")

    code = 1
    try:
        log = os.open(logs / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        run(tell)
        code = 0
    except BaseException:
        tell("raised", rank, traceback.format_exc()[-1500:])
    finally:
        os._exit(code)


def main() -> None:
    """Many kills, dealt to the cases; exits with 1 if any lost something."""
    parser = argparse.ArgumentParser(
        description="Kill runs while they save or update files, and see what the next one finds."
    )
    parser.add_argument("--rounds", type=int, default=200, help="how many, over all cases")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the instants")
    parser.add_argument("--case", choices=[case.name for case in CASES], help="only this one")
    arguments = parser.parse_args()
    become_template()
    cases = [case for case in CASES if arguments.case in (None, case.name)]
    problems: list[str] = []
    for index, case in enumerate(cases):
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            campaign = Campaign(case, Path(folder), arguments.seed + index)
            campaign.run(arguments.rounds // len(cases) + (index < arguments.rounds % len(cases)))
        problems += campaign.problems
        took = time.monotonic() - began
        told = f"{campaign.kills} kills, {len(campaign.problems)} problems, {took:.0f} s"
        print(*campaign.problems, f"{case.name}: {told}", sep="\n", flush=True)
    print(f"seed {arguments.seed}: {arguments.rounds} kills, {len(problems)} problems")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()

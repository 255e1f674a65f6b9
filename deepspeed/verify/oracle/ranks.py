"""Starts the ranks of a plan, follows what they write, and ends all of them when one raised, died
or hung; the rest of the plan is then started anew, so that every run has a result or a reason.
Owns processes and time; what a result means is `verdicts`' business.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from deepspeed.runtime.config_utils import DeepSpeedConfigError
from deepspeed.verify.oracle.plan import Plan

WORKER = "deepspeed.verify.oracle.worker"
POLL_S = 0.1
# Other ranks of a failed one get this long to say what they saw: a checker raises on all of them.
GRACE_S = 3.0
LOG_LINES = 12
# So many runs may fail one after another, each with a start of all ranks, before none is tried.
MOST_IN_VAIN = 3


@dataclass
class Outcome:
    """What became of one run."""

    # Result of each rank; empty if the run failed.
    ranks: list[dict[str, Any]] = field(default_factory=list)
    failure: str = ""  # why there is no result: a text that names the rank
    kind: str = ""  # class name of the exception that ended it, if there was one


@dataclass
class Session:
    """What became of a plan; `not_started`: why the ranks did not come to their first run."""

    outcomes: dict[str, Outcome] = field(default_factory=dict)  # by the name of the run
    # What every rank said of its model and data; empty if no launch came so far.
    ready: list[dict[str, Any]] = field(default_factory=list)
    not_started: str = ""


Progress = Callable[[str, dict[str, Any]], None]


def run_plan(plan: Plan, timeout_s: float, progress: Progress) -> Session:
    """Run everything, starting the ranks anew after each run that failed."""
    session = Session()
    left = list(plan.runs)
    # The same of all: how a product is divided among threads shows in its bits.
    threads = max(1, (os.cpu_count() or 1) // plan.ranks)
    while left:
        ranks = plan.ranks_of(left[0])
        now = [run for run in left if plan.ranks_of(run) == ranks]
        launch = _Launch(replace(plan, runs=now, ranks=ranks), timeout_s, progress, threads)
        failed = launch.follow()
        session.ready = session.ready or launch.ready()
        for run in now:
            results = [log.results.get(run.name) for log in launch.logs]
            if None not in results:
                session.outcomes[run.name] = Outcome([one for one in results if one is not None])
        name = next((run.name for run in now if run.name not in session.outcomes), None)
        # Without a name every result was there before a rank failed on its way out.
        if failed is not None and name is not None:
            if failed.kind == DeepSpeedConfigError.__name__ and not session.outcomes:
                raise DeepSpeedConfigError(failed.failure)  # the engine refuses it in every run
            if not session.ready:
                session.not_started = failed.failure  # starting again would end the same way
                return session
            session.outcomes[name] = failed
            came_through = any(outcome.ranks for outcome in session.outcomes.values())
            if len(session.outcomes) == MOST_IN_VAIN and not came_through:
                untried = (run.name for run in left if run.name not in session.outcomes)
                text = f"not tried: the {MOST_IN_VAIN} runs before it all failed"
                session.outcomes |= {run: Outcome(failure=text) for run in untried}
        tried = session.outcomes if failed is not None else [run.name for run in now]
        in_vain = {name for name, outcome in session.outcomes.items() if outcome.failure}
        done = {*tried, *session.outcomes}
        left = [run for run in left if run.name not in done and run.beside not in in_vain]
    return session


class _RankLog:
    """What one rank has written so far."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.results: dict[str, dict[str, Any]] = {}
        self.begun: list[str] = []
        self.ready: dict[str, Any] = {}
        self.error: dict[str, Any] = {}
        self._position = 0

    def read(self) -> list[dict[str, Any]]:
        """Return new events."""
        if not self.path.exists():
            return []
        with self.path.open("r", encoding="utf-8") as file:
            file.seek(self._position)
            text = file.read()
        complete, newline, _ = text.rpartition("\n")
        self._position += len((complete + newline).encode("utf-8"))
        events = [json.loads(line) for line in complete.splitlines()]
        for event in events:
            kind = event["event"]
            if kind == "begin":
                self.begun.append(event["run"])
            elif kind == "end":
                self.results[event["run"]] = event["result"]
            elif kind in ("ready", "error"):
                setattr(self, kind, event)
        return events


class _Launch:
    """One start of all ranks."""

    def __init__(self, plan: Plan, timeout_s: float, progress: Progress, threads: int) -> None:
        self.plan = plan
        self.threads = threads
        self.timeout_s = timeout_s
        self.progress = progress
        self.folder = tempfile.TemporaryDirectory(prefix="ds_verify_")
        root = Path(self.folder.name)
        self.plan_path = str(root / "plan.json")
        Path(self.plan_path).write_text(json.dumps(asdict(plan)), encoding="utf-8")
        self.logs = [_RankLog(root / f"events-{rank}.jsonl") for rank in range(plan.ranks)]
        self.outputs = [root / f"output-{rank}.txt" for rank in range(plan.ranks)]
        self.processes: list[subprocess.Popen[bytes]] = []

    def ready(self) -> list[dict[str, Any]]:
        """Return what the ranks said of model and data, if all did."""
        said = [log.ready for log in self.logs]
        return said if all(said) else []

    def follow(self) -> Outcome | None:
        """Start the ranks and wait for their end; return the first failure, or None."""
        try:
            self._start()
            return self._watch()
        finally:
            self._end()
            self.folder.cleanup()

    def _start(self) -> None:
        world = self.plan.ranks
        root = str(Path(__file__).resolve().parents[3])
        paths = os.pathsep.join([root, os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])
        for rank, output in enumerate(self.outputs):
            environment = {
                **os.environ,
                "PYTHONPATH": paths,
                "DS_ACCELERATOR": "cpu",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_WORLD_SIZE": str(world),
                "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(self.threads)),
            }
            # The plan's configuration says what is watched; a switch for all runs would mix the
            # rows of the table.
            environment.pop("DS_VERIFY", None)
            command = [sys.executable, "-m", WORKER, self.plan_path, self.folder.name]
            with output.open("wb") as file:
                self.processes.append(
                    subprocess.Popen(
                        command,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )

    def _watch(self) -> Outcome | None:
        heard = time.monotonic()
        while True:
            # Before reading: what a rank wrote last is then read.
            done = [process.poll() for process in self.processes]
            if self._read():
                heard = time.monotonic()
            if any(code not in (None, 0) for code in done):
                return self._failure()
            if all(code == 0 for code in done):
                return None
            if time.monotonic() - heard > self.timeout_s:
                return self._silence(done)
            time.sleep(POLL_S)

    def _read(self) -> bool:
        heard = False
        for rank, log in enumerate(self.logs):
            for event in log.read():
                heard = True
                if rank == 0 or event["event"] == "judged":
                    self.progress(event["event"], event)
        return heard

    def _failure(self) -> Outcome:
        """Return the first failure, once the others had time to fail with it."""
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline and None in [p.poll() for p in self.processes]:
            self._read()
            time.sleep(POLL_S)
        self._read()
        # A rank that went without a word comes first: errors of the others are about losing it.
        for rank, (process, log) in enumerate(zip(self.processes, self.logs, strict=True)):
            code = process.returncode
            if code not in (None, 0) and not log.error:
                how = f"exited with {code}"
                if code < 0:
                    how = f"was killed by signal {-code} ({signal.Signals(-code).name})"
                text = f"rank {rank} {how}; its last output:\n{self._tail(rank)}"
                return Outcome(failure=text, kind="died")
        raised = {rank: log.error for rank, log in enumerate(self.logs) if log.error}
        first = min(raised, key=lambda rank: float(raised[rank]["time"]))
        error = raised[first]
        also = f" (ranks {', '.join(map(str, raised))})" if len(raised) > 1 else ""
        text = f"rank {first}{also}: {error['kind']}: {error['text']}"
        return Outcome(failure=text, kind=error["kind"])

    def _silence(self, done: list[int | None]) -> Outcome:
        waiting = [rank for rank, code in enumerate(done) if code is None]
        begun = {rank: (self.logs[rank].begun or ["its start"])[-1] for rank in waiting}
        where = ", ".join(f"rank {rank} in {run}" for rank, run in begun.items())
        text = (
            f"no progress for {self.timeout_s:g} s ({where}): they wait for each other, or "
            f"--timeout is too short; last output of rank {waiting[0]}:\n{self._tail(waiting[0])}"
        )
        return Outcome(failure=text, kind="hung")

    def _tail(self, rank: int) -> str:
        lines = self.outputs[rank].read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(f"    {line}" for line in lines[-LOG_LINES:])

    def _end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                # The whole session: data-loader workers of the user's batches too.
                os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()

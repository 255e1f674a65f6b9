"""Runs a scenario of `unit.verify.scenarios` on two ranks against a copy of the package, one after
another and fast.

A copy with a fault in it needs an interpreter that has not imported the package yet. `MutantRunner`
keeps one that has imported torch and nothing else; a process forked from it imports the copy, and
the ranks of a scenario are forked from that.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import IO

from unit.rank_server import become_template, use_huge_pages

LIMIT_S = 60.0


class MutantRunner:
    """Handle of the interpreter that ranks are forked from."""

    def __init__(self) -> None:
        tests = Path(__file__).resolve().parents[2]
        environment = {**os.environ, "PYTHONPATH": str(tests), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "unit.verify.mutants"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            cwd=tempfile.gettempdir(),  # the checkout must not be importable
            text=True,
        )

    def run(self, package: Path, scenario: str, world: int = 2) -> list[str]:
        """What the guards of `scenario` found with the package below `package`, over all ranks;
        nothing if all were silent.
        """
        stdin, stdout = self._pipes()
        stdin.write(json.dumps([str(package), scenario, world]) + "\n")
        stdin.flush()
        answer: list[str] = json.loads(stdout.readline())
        return answer

    def _pipes(self) -> tuple[IO[str], IO[str]]:
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the interpreter was started without pipes")
        return self._process.stdin, self._process.stdout

    def close(self) -> None:
        """End the interpreter."""
        self._pipes()[0].close()
        self._process.wait()


def serve() -> None:
    """Run jobs from standard input until it closes."""
    become_template(with_deepspeed=False)
    use_huge_pages()
    for line in sys.stdin:
        package, scenario, world = json.loads(line)
        sys.stdout.write(json.dumps(_run_ranks(package, scenario, world)) + "\n")
        sys.stdout.flush()


def _run_ranks(package: str, scenario: str, world: int) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        template = os.fork()
        if template == 0:
            os.dup2(2, 1)  # by standard output go answers
            try:
                _serve_one(package, scenario, world, Path(folder))
            except BaseException:  # in the test's own output; there is no rank yet to report it
                traceback.print_exc()
            finally:
                os._exit(0)
        os.waitpid(template, 0)
        return [finding for rank in range(world) for finding in _answer(Path(folder), rank)]


def _serve_one(package: str, scenario: str, world: int, folder: Path) -> None:
    """Import the package once for all ranks, and run them."""
    sys.path.insert(0, package)
    become_template()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    _wait({_fork(scenario, rank, world, port, folder) for rank in range(world)})


def _fork(scenario: str, rank: int, world: int, port: int, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    try:
        from unit.verify.scenarios import run

        found = run(scenario)
    except BaseException as error:
        traceback.print_exc()
        found = [f"{type(error).__name__}: {error}"]
    (folder / f"{rank}.tmp").write_text(json.dumps(found))
    (folder / f"{rank}.tmp").rename(folder / f"{rank}.json")
    sys.stdout.flush()
    os._exit(0)  # without the destructors of process groups whose other ranks may be gone


def _wait(pids: set[int]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while pids and time.monotonic() < deadline:
        pids -= {pid for pid in pids if os.waitpid(pid, os.WNOHANG)[0]}
        time.sleep(0.01)
    for pid in pids:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _answer(folder: Path, rank: int) -> list[str]:
    answer = folder / f"{rank}.json"
    if answer.exists():
        found: list[str] = json.loads(answer.read_text())
        return [f"rank {rank}: {finding}" for finding in found]
    file = folder / f"{rank}.log"
    log = file.read_text(errors="replace") if file.exists() else "it was not started"
    return [f"rank {rank}: HANG or crash within {LIMIT_S} s\n{log[-3000:]}"]


if __name__ == "__main__":
    serve()

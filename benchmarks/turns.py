"""Systems that take turns on one machine: each has processes of its own, only one computes at a
time, the others wait on a pipe.

What the processes run is a worker script that ends in `serving.serve`. Times of a round are
compared within the round, so that a machine that gets slower or faster does so for all alike.
Imports no torch.
"""

from __future__ import annotations

import json
import os
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).resolve().parent
START_SECONDS = 300
UPSTREAM_PREFIX = "upstream-"
# For each round, for each step, seconds.
Rounds = list[list[float]]


class Ranks:
    """The processes of one system.

    Args:
        name: Name in the table; those that begin with `upstream-` don't see this checkout.
        command: Interpreter, worker script (a file of this folder) and its options.
        num_ranks: How many processes.
        stderr: Where the processes' messages go.
        accelerator: `DS_ACCELERATOR` of the processes.

    Attributes:
        rounds: For each round and step, seconds of the slowest rank.
        cpu_rounds: The same of mean processor seconds per rank.
        versions: What the worker says of its software.
        num_ranks: How many processes there are.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        num_ranks: int,
        stderr: IO[str],
        accelerator: str = "cpu",
    ) -> None:
        self.name = name
        self.num_ranks = num_ranks
        self._accelerator = accelerator
        self.rounds: Rounds = []
        self.cpu_rounds: Rounds = []
        self.versions: dict[str, Any] = {}
        python, worker, *options = command
        port = free_port()
        self._processes = [
            subprocess.Popen(
                [python, str(HERE / worker), *options],
                env=self._environment(rank, num_ranks, port),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                # Not the checkout: its deepspeed must not shadow upstream's.
                cwd=tempfile.gettempdir(),
            )
            for rank in range(num_ranks)
        ]
        # Upstream's processes leave buffers behind, named by the port.
        self._leftovers = f"deepspeed_*_{port}_*"

    def wait_until_ready(self) -> None:
        """Return when all processes have built their system and trained a step.

        Raises:
            RuntimeError: If one ended instead, or takes too long.
        """
        deadline = time.monotonic() + START_SECONDS
        for process in self._processes:
            if (
                process.stdout
                and not select.select(
                    [process.stdout], [], [], max(0.0, deadline - time.monotonic())
                )[0]
            ):
                raise RuntimeError(
                    f"{self.name}: not ready after {START_SECONDS} s. Upstream builds kernels at "
                    "its first start and waits forever for the lock of a build that was killed; "
                    "set TORCH_EXTENSIONS_DIR to an empty folder"
                )
        self.versions = self._replies()[0]

    def _environment(self, rank: int, num_ranks: int, port: int) -> dict[str, str]:
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        if not self.name.startswith(UPSTREAM_PREFIX):
            environment["PYTHONPATH"] = str(HERE.parent)
        environment.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(num_ranks),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            OMP_NUM_THREADS="1",
            DS_ACCELERATOR=self._accelerator,
        )
        return environment

    def _replies(self) -> list[Any]:
        replies = []
        for rank, process in enumerate(self._processes):
            line = process.stdout.readline() if process.stdout else ""
            if not line:
                raise RuntimeError(f"{self.name}: rank {rank} ended (exit code {process.wait()})")
            replies.append(json.loads(line))
        return replies

    def tell(self, command: str) -> list[Any]:
        """Send a line to every rank; returns their replies."""
        for process in self._processes:
            if process.stdin:
                process.stdin.write(command + "\n")
                process.stdin.flush()
        return self._replies()

    def run_block(self, steps: int, warmup: int) -> None:
        """Train a block; keep, of each step after the first ones, the slowest rank's time and the
        mean processor time.
        """
        wall, cpu = self.timed("", steps, warmup)
        self.rounds.append(wall)
        self.cpu_rounds.append(cpu)

    def timed(self, case: str, steps: int, warmup: int) -> tuple[list[float], list[float]]:
        """Train a block of one of the worker's cases: the slowest rank's seconds and the mean
        processor seconds of each step.
        """
        of_steps = list(zip(*self.tell(f"{case} {warmup + steps}".strip()), strict=True))[warmup:]
        wall = [max(seconds for seconds, _ in ranks) for ranks in of_steps]
        return wall, [statistics.mean(cpu for _, cpu in ranks) for ranks in of_steps]

    def close(self) -> None:
        """End the processes; kills what does not end by itself."""
        healthy = bool(self.versions) and all(process.poll() is None for process in self._processes)
        for process in self._processes:
            if not healthy:
                process.kill()  # it may wait for a peer that is gone, or for a lock
            if process.stdin:
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for leftover in Path("/dev/shm").glob(self._leftovers):
            with suppress(OSError):
                leftover.unlink()


def run_turns(systems: Sequence[Ranks], rounds: int, steps: int, warmup: int) -> None:
    """Let each train a block of steps per round, another one first in each: what comes after a
    pause or a neighbour differs.
    """
    for number in range(rounds):
        shift = number % len(systems)
        for system in [*systems[shift:], *systems[:shift]]:
            system.run_block(steps, warmup)
        print(f"round {number + 1} of {rounds}", file=sys.stderr)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def paired_ratios(rounds: Rounds, base: Rounds) -> list[float]:
    """For each round, this system's median step over the other's."""
    return [
        statistics.median(own) / statistics.median(other)
        for own, other in zip(rounds, base, strict=True)
    ]


def median_ms(rounds: Rounds) -> float:
    """Median step over all rounds, in milliseconds."""
    return statistics.median(value for block in rounds for value in block) * 1e3


def middle_half(ratios: Sequence[float]) -> tuple[float, float]:
    """What the middle half of some ratios lies between."""
    if len(ratios) == 1:
        return ratios[0], ratios[0]
    low, _, high = statistics.quantiles(ratios, n=4)
    return low, high


def print_log(stderr: IO[str], error: Exception) -> None:
    """The end of what the processes said, and why the benchmark ends."""
    stderr.seek(0)
    print("".join(stderr.readlines()[-60:]) + f"\n{error}", file=sys.stderr)

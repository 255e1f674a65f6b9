"""AdamW on the host: this project's op, torch's fused kernel and upstream's op, beside a
STREAM-like triad, in one run.

Every system steps the same number of parameters with bf16 gradients and a bf16 copy of the new
parameters, including the casts that it needs for that. Systems take turns within a round, so that
what else the machine does meets all of them; ratios are taken within rounds. Each interpreter is a
worker process, because both packages have the same name. Bytes are counted as STREAM does: what the
arithmetic reads and writes, 28 per element for AdamW (12 for the triad); a line that is read only
because it is then written does not count.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[1]
ADAM_BYTES, TRIAD_BYTES = 28, 12
HERE = ("triad", "ours", "torch")
FACTOR = 0.5  # stands for clipping; the others get none, which spares them a pass


class Timing(NamedTuple):
    """Seconds of one step."""

    wall: float
    processor: float


def systems_here(numel: int) -> dict[str, Callable[[], object]]:
    """The systems of this project's interpreter."""
    # startup: the name means another package in the other worker
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    grad, low = torch.randn(numel).bfloat16(), torch.empty(numel, dtype=torch.bfloat16)
    masters = [torch.randn(numel) for _ in range(2)]
    ours = DeepSpeedCPUAdam(masters[:1], weight_decay=0.1)
    fused = torch.optim.AdamW(masters[1:], weight_decay=0.1, fused=True)
    wide = torch.empty(numel)
    masters[1].grad = wide

    def torch_step() -> None:
        wide.copy_(grad)
        fused.step()
        low.copy_(masters[1])

    b, c, a = torch.randn(numel), torch.randn(numel), torch.empty(numel)
    return {
        "triad": lambda: torch.add(b, c, alpha=3.0, out=a),
        "ours": lambda: ours.step_flat(masters[0], grad, grad_factor=FACTOR, low_precision_out=low),
        "torch": torch_step,
    }


def systems_upstream(numel: int) -> dict[str, Callable[[], object]]:
    """Upstream's op, whose gradients must have the parameter's dtype (it ends the process on bf16
    ones beside fp32 masters).
    """
    # startup: the name means another package in the other worker
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    grad, low = torch.randn(numel).bfloat16(), torch.empty(numel, dtype=torch.bfloat16)
    master = torch.randn(numel)
    master.grad = torch.empty(numel)
    optimizer = DeepSpeedCPUAdam([master], weight_decay=0.1)

    def step() -> None:
        master.grad.copy_(grad)
        optimizer.step()
        low.copy_(master)

    return {"upstream": step}


def work(systems: dict[str, Callable[[], object]]) -> None:
    """Step the system that each line of standard input names; answer with the two times."""
    for step in systems.values():
        step()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        step = systems[line.strip()]
        wall, processor = time.perf_counter(), time.process_time()
        step()
        sys.stdout.write(f"{time.perf_counter() - wall} {time.process_time() - processor}\n")
        sys.stdout.flush()


class Worker:
    """A process of one interpreter that steps on demand."""

    def __init__(self, python: str, path: str, numel: int, threads: int, upstream: bool) -> None:
        command = [python, __file__, "--worker", "--numel", str(numel)] + (
            ["--upstream-python", python] if upstream else []
        )
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)}
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        while (line := self._line()) != "ready\n":
            if not line:
                raise RuntimeError(
                    f"{python} ended before it was ready; run by hand: {' '.join(command)}"
                )

    def _line(self) -> str:
        if self.process.stdout is None:
            raise AssertionError("the worker was started without a pipe")
        return self.process.stdout.readline()

    def step(self, system: str) -> Timing:
        """One step of a system."""
        if self.process.stdin is None:
            raise AssertionError("the worker was started without a pipe")
        self.process.stdin.write(f"{system}\n")
        self.process.stdin.flush()
        wall, processor = map(float, self._line().split())
        return Timing(wall, processor)

    def end(self) -> None:
        """End the process."""
        self.process.communicate()


def measure(
    numel: int, threads: int, rounds: int, upstream_python: str | None
) -> dict[str, list[Timing]]:
    """Times of every system in every round."""
    here = Worker(sys.executable, str(ROOT), numel, threads, upstream=False)
    workers = dict.fromkeys(HERE, here)
    if upstream_python:
        workers["upstream"] = Worker(upstream_python, "", numel, threads, upstream=True)
    found: dict[str, list[Timing]] = {system: [] for system in workers}
    for _ in range(rounds):
        for system, worker in workers.items():
            found[system].append(worker.step(system))
    for worker in set(workers.values()):
        worker.end()
    return found


def table(found: dict[str, list[Timing]], numel: int) -> str:
    """The results as markdown."""
    lines = [
        "| system | best (ms) | median (ms) | processor, best (ms) | GB/s, best | x ours (middle "
        "half) | x ours, processor |"
    ]
    lines.append("|---|---:|---:|---:|---:|---:|---:|")
    for system, times in found.items():
        moved = numel * (TRIAD_BYTES if system == "triad" else ADAM_BYTES)
        walls, processors = [one.wall for one in times], [one.processor for one in times]
        ratios = [one.wall / ours.wall for one, ours in zip(times, found["ours"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        processor = statistics.median(
            one.processor / ours.processor for one, ours in zip(times, found["ours"], strict=True)
        )
        lines.append(
            f"| {system} | {min(walls) * 1e3:.1f} | {statistics.median(walls) * 1e3:.1f} | "
            f"{min(processors) * 1e3:.1f} | {moved / min(walls) / 1e9:.1f} | {middle:.2f} "
            f"({low:.2f}-{high:.2f}) | {processor:.2f} |"
        )
    share = [
        ADAM_BYTES / ours.wall * triad.wall / TRIAD_BYTES
        for ours, triad in zip(found["ours"], found["triad"], strict=True)
    ]
    best = (
        ADAM_BYTES
        / min(one.wall for one in found["ours"])
        * min(one.wall for one in found["triad"])
        / TRIAD_BYTES
    )
    lines.append("")
    lines.append(
        f"Bandwidth of `ours` / triad: {statistics.median(share):.2f} (median of rounds), "
        f"{best:.2f} (best of each)."
    )
    return "\n".join(lines)


def main() -> None:
    """Measure and print, or be a worker."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--numel", type=int, default=50_000_000, help="parameters")
    parser.add_argument("--threads", default="1,2", help="numbers of threads, separated by commas")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--upstream-python", help="interpreter that has upstream's package")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work((systems_upstream if options.upstream_python else systems_here)(options.numel))
        return
    for threads in map(int, options.threads.split(",")):
        print(f"{options.numel} parameters, {threads} thread(s), {options.rounds} rounds\n")
        print(
            table(
                measure(options.numel, threads, options.rounds, options.upstream_python),
                options.numel,
            )
            + "\n",
            flush=True,
        )


if __name__ == "__main__":
    main()

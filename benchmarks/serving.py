"""What every worker process does when its systems are built: trains blocks of steps when told to,
and says how long each took.

Protocol: one JSON line on stdout when ready; then for each line `[CASE] N` on stdin, N steps and
one JSON line with a list of (seconds, processor seconds); `profile [CASE] N` writes a cProfile
report to stderr, `count [CASE] N` answers with the scalar collectives of N steps by function; end
of input ends the process. While it waits it uses no processor time.
"""

from __future__ import annotations

import cProfile
import gc
import json
import os
import pstats
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TextIO

import torch
import torch.distributed as dist

Step = Callable[[], float | None]
# What is done with a number of steps; its result is the answer.
Action = Callable[[Step, int], Any]
# A message of at most so many elements is a norm, a flag or a loss.
SCALAR_ELEMENTS = 16


def take_stdout() -> TextIO:
    """Keep stdout for the protocol: what libraries print goes to stderr."""
    protocol = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return protocol


def start_distributed(with_deepspeed: bool, backend: str = "gloo") -> dict[str, Any]:
    """Initialize `backend`; returns what identifies the software."""
    versions: dict[str, Any] = {"torch": torch.__version__}
    if with_deepspeed:
        import deepspeed  # optional: torch's own systems run without it

        deepspeed.init_distributed(dist_backend=backend)
        return {
            **versions,
            "deepspeed": deepspeed.__version__,
            "path": os.path.dirname(deepspeed.__file__),
        }
    dist.init_process_group(backend)
    return versions


def time_steps(step: Step, count: int) -> list[tuple[float, float]]:
    """Seconds and processor seconds of each of `count` steps. Ranks begin together; garbage is
    collected before, not within.

    A step that is about a part of what it does returns the seconds of that part.
    """
    gc.collect()
    dist.barrier()
    times = []
    for _ in range(count):
        start, cpu_start = time.perf_counter(), time.process_time()
        part = step()
        times.append(
            (time.perf_counter() - start if part is None else part, time.process_time() - cpu_start)
        )
    return times


def profile_steps(step: Step, count: int) -> None:
    """Where the main thread's processor time goes, to stderr: waiting counts nothing, nor does
    other work on the machine.
    """
    profile = cProfile.Profile(time.thread_time)
    dist.barrier()
    profile.enable()
    for _ in range(count):
        step()
    profile.disable()
    for key in ("tottime", "cumulative"):
        pstats.Stats(profile, stream=sys.stderr).sort_stats(key).print_stats(35)


def count_scalars(step: Step, count: int) -> dict[str, int]:
    """How often `count` steps call each function of torch.distributed with one small tensor."""
    calls: Counter[str] = Counter()

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            calls[name] += isinstance(tensor, torch.Tensor) and tensor.numel() <= SCALAR_ELEMENTS
            return function(tensor, *args, **kwargs)

        return counted

    kept = {name: getattr(dist, name) for name in ("all_reduce", "broadcast", "reduce")}
    try:
        for name, function in kept.items():
            setattr(dist, name, counting(name, function))
        for _ in range(count):
            step()
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)
    return {name: number for name, number in calls.items() if number}


ACTIONS: dict[str, Action] = {
    "time": time_steps,
    "profile": profile_steps,
    "count": count_scalars,
}


def serve(
    protocol: TextIO,
    versions: Mapping[str, Any],
    cases: Mapping[str, Step],
    more: Mapping[str, Action] | None = None,
) -> None:
    """Train a step of each case, then serve until stdin ends. A line without a case means the one
    named "".

    Args:
        protocol: Where answers go.
        versions: What identifies the software.
        cases: Steps by name.
        more: Actions of this worker alone.
    """
    actions = {**ACTIONS, **(more or {})}
    for step in cases.values():
        step()
    print(json.dumps(versions), file=protocol, flush=True)
    for line in sys.stdin:
        *words, count = line.split()
        action = words.pop(0) if words and words[0] in actions else "time"
        answer = actions[action](cases["".join(words)], int(count))
        print(json.dumps(answer), file=protocol, flush=True)
    dist.destroy_process_group()

"""One rank of one system of `device.py`: `step_worker.py` on a device, which also tells peak memory
and how much of the side streams' work is hidden behind the computation.

torch's own systems run under `sim` as on the host: no simulated stream is behind them.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from typing import Any

import torch
from serving import Step, serve, start_distributed, take_stdout
from systems import Workload, build_step

Interval = tuple[int, int]


class Device:
    """What the benchmark asks of a device.

    Args:
        kind: "cuda" or another type of torch's, or "cpu".
        simulated: Ask the simulated device instead.
    """

    def __init__(self, kind: str, simulated: bool) -> None:
        self._owner: Any = None
        if simulated:
            # optional: torch's own systems are built without it
            from deepspeed.accelerator import get_accelerator

            self._owner = get_accelerator()
        elif kind != "cpu":
            self._owner = torch.get_device_module(kind)
            self._owner.set_device(choose(int(os.environ["LOCAL_RANK"]), self._owner))

    def synchronize(self) -> None:
        """Return when all queued work is done."""
        if self._owner is not None:
            self._owner.synchronize()

    def peak_of(self, step: Step, count: int) -> int | None:
        """Bytes that tensors took at most within `count` steps; None where nobody counts."""
        if self._owner is None:
            return None
        self._owner.reset_peak_memory_stats()
        for _ in range(count):
            step()
        self.synchronize()
        return int(self._owner.max_memory_allocated())

    def hidden_of(self, step: Step, count: int) -> float | None:
        """The part of the side streams' work within `count` steps during which the busiest stream
        worked too; None without a device or without such work.
        """
        with torch.profiler.profile() as profile:
            for _ in range(count):
                step()
            self.synchronize()
        return hidden_part(busy_intervals(profile))


def choose(local_rank: int, devices: Any) -> int:
    """The index of this process's device: the only one it sees, or that of its rank."""
    return 0 if devices.device_count() == 1 else local_rank


def busy_intervals(profile: Any) -> list[list[Interval]]:
    """When each stream of the device worked, in nanoseconds, as a profiler of torch has seen it."""
    streams: dict[int, list[Interval]] = {}
    for event in profile.profiler.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA and event.duration_ns() > 0:
            interval = (event.start_ns(), event.start_ns() + event.duration_ns())
            streams.setdefault(event.device_resource_id(), []).append(interval)
    return list(streams.values())


def union(intervals: list[Interval]) -> list[Interval]:
    """The same time as disjoint ascending intervals."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def duration(intervals: list[Interval]) -> int:
    """How long disjoint intervals are together."""
    return sum(end - start for start, end in intervals)


def hidden_part(streams: list[list[Interval]]) -> float | None:
    """Of the time in which streams other than the busiest one worked, the part in which that one
    worked too; None if they never did.
    """
    busy = sorted((union(stream) for stream in streams), key=duration)
    if len(busy) < 2:
        return None
    main, side = busy[-1], union([interval for stream in busy[:-1] for interval in stream])
    together = duration(union(main + side))
    return (duration(main) + duration(side) - together) / duration(side)


def several(step: Step, count: int, device: Device) -> Callable[[], None]:
    """`count` steps and then a wait for the device, so that the host may run ahead within them."""

    def steps() -> None:
        for _ in range(count):
            step()
        device.synchronize()

    return steps


def main() -> None:
    """Build the system and serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--system", required=True)
    parser.add_argument("--workload", required=True, help="JSON of systems.Workload")
    parser.add_argument("--backend", required=True)
    parser.add_argument("--steps", type=int, required=True, help="steps that are timed as one")
    arguments = parser.parse_args()
    protocol = take_stdout()
    work = Workload(**json.loads(arguments.workload))
    ours = arguments.system.startswith("zero")
    device = Device(work.device, ours and os.environ["DS_ACCELERATOR"] == "sim")
    versions = start_distributed(ours, arguments.backend)
    step = build_step(work, arguments.system)
    more = {"peak": device.peak_of, "hidden": device.hidden_of}
    cases = {"": several(step, arguments.steps, device), "one": step}
    serve(protocol, versions, cases, more)


if __name__ == "__main__":
    main()

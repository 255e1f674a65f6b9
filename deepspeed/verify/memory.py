"""The holders of the simulated device's memory at its peak, by name or by place of allocation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from deepspeed.accelerator.sim_accelerator import simulated_device
from deepspeed.utils import memory_names


@dataclass
class MemoryPeak:
    """Filled at the end of `memory_peak`."""

    nbytes: int = 0  # most bytes that were allocated at once
    # Who held them, most first: a buffer's name (as in races: "gradient of ..."), or ``FILE:LINE in
    # FUNCTION``, where it was allocated.
    by_owner: dict[str, int] = field(default_factory=dict)


@contextmanager
def memory_peak() -> Iterator[MemoryPeak]:
    """Within it, the peak of the simulated device's memory is followed.

    Names are those that buffers have when it ends; memory that has come back by then goes by its
    place.

    Raises:
        RuntimeError: the accelerator is no simulated device.
    """
    allocator = simulated_device("memory_peak").simulator.allocator
    peak = MemoryPeak()
    with allocator.recording() as record:
        yield peak
        peak.nbytes, peak.by_owner = record.nbytes, record.by_owner(memory_names.describe)

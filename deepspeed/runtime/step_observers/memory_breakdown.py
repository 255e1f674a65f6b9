"""`memory_breakdown`: memory at both ends of every phase, printed on rank 0."""

from __future__ import annotations

from deepspeed.runtime.step_observers.step_observer import StepObserver
from deepspeed.runtime.utils import see_memory_usage


class MemoryBreakdown(StepObserver):
    """Prints `see_memory_usage`. Its peaks are since the line before, so each line shows the peak
    of the phase that it ends.
    """

    def forward_starts(self, training: bool) -> None:
        see_memory_usage("before forward", force=True)

    def forward_ended(self) -> None:
        see_memory_usage("after forward", force=True)

    def backward_starts(self) -> None:
        see_memory_usage("before backward", force=True)

    def backward_ended(self) -> None:
        see_memory_usage("after backward", force=True)

    def step_starts(self) -> None:
        see_memory_usage("before step", force=True)

    def step_ended(self) -> None:
        see_memory_usage("after step", force=True)

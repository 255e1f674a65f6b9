"""Timers of the engine's phases (`wall_clock_breakdown`) and its throughput line.

Attached to the engine by calls that do nothing when timing is off.
"""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.utils.timer import NoopTimer, SynchronizedWallClockTimer, ThroughputTimer

FORWARD = "fwd"
BACKWARD = "bwd"
REDUCE = "bwd_allreduce"
STEP = "step"


class EngineTimers:
    """Phases of one engine.

    Args:
        config: Says whether phases are timed and how often they are logged.
        batch_size: Samples per step, for samples per second.
    """

    def __init__(self, config: DeepSpeedConfig, batch_size: int) -> None:
        self._enabled = config.tree.wall_clock_breakdown
        self._steps_per_print = config.tree.steps_per_print
        self._timers: Any = SynchronizedWallClockTimer() if self._enabled else NoopTimer()
        self.throughput = ThroughputTimer(config.timers_config, batch_size=batch_size, steps_per_output=None)
        self._in_step = False

    def start_forward(self, training: bool) -> None:
        """A forward begins; the first one of a training step starts the throughput timer."""
        if training and not self._in_step:
            self._in_step = True
            self.throughput.start()
        if self._enabled:
            self._timers(FORWARD).start()

    def stop_forward(self) -> None:
        """A forward ended."""
        if self._enabled:
            self._timers(FORWARD).stop()

    def start_backward(self) -> None:
        """A backward begins."""
        if self._enabled:
            self._timers(BACKWARD).start()

    def start_reduce(self) -> None:
        """Backward's gradients are all there; what follows is reduction."""
        if self._enabled:
            self._timers(REDUCE).start()

    def stop_backward(self) -> None:
        """Backward and its reductions ended."""
        if self._enabled:
            self._timers(REDUCE).stop()
            if self._timers(BACKWARD).started_:
                self._timers(BACKWARD).stop()

    def start_step(self) -> None:
        """An optimizer step begins."""
        if self._enabled:
            self._timers(STEP).start()

    def stop_step(self, global_steps: int) -> None:
        """An optimizer step ended; log the phases if it is time."""
        self._in_step = False
        self.throughput.stop(global_step=True, report_speed=False)
        if not self._enabled:
            return
        self._timers(STEP).stop()
        every = self._steps_per_print or 1
        if global_steps % every == 0:
            self._timers.log([FORWARD, BACKWARD, REDUCE, STEP], ranks=[0])

    def summary(self) -> str:
        """Throughput so far, for the progress line."""
        return f"samples/s={self.throughput.avg_samples_per_sec():.2f}"

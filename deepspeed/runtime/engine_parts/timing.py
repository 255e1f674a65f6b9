"""The engine's phases: timed (`wall_clock_breakdown`, throughput), and told to observers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.step_observers.step_observer import StepObserver
from deepspeed.utils import timer

FORWARD = timer.FORWARD_GLOBAL_TIMER
BACKWARD = timer.BACKWARD_GLOBAL_TIMER
# Autograd's part of backward, with the reductions that overlap it.
INNER = timer.BACKWARD_INNER_GLOBAL_TIMER
REDUCE = timer.BACKWARD_REDUCE_GLOBAL_TIMER
STEP = timer.STEP_GLOBAL_TIMER


class EngineTimers:
    """Phases of one engine; calls do nothing when timing is off and nobody observes.

    Attributes:
        observers: Who is told of phases, in this order.
        logged_phases: Milliseconds by phase since the last log, if the step that just ended logged
            them; empty otherwise.
    """

    def __init__(self, config: DeepSpeedConfig, batch_size: int) -> None:
        self._enabled = config.tree.wall_clock_breakdown
        self._steps_per_print = config.tree.steps_per_print
        self._timers: Any = (
            timer.SynchronizedWallClockTimer() if self._enabled else timer.NoopTimer()
        )
        self.throughput = timer.ThroughputTimer(
            config.timers_config, batch_size=batch_size, steps_per_output=None
        )
        self.observers: Sequence[StepObserver] = ()
        self.logged_phases: dict[str, float] = {}
        self._in_step = False
        self._in_backward = False
        self._count_as_one = False

    def start_forward(
        self, training: bool, inputs: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Begin a forward; the first one of a training step starts the throughput timer.

        `inputs` and `kwargs` are what the model is given, where that is the batch.
        """
        for observer in self.observers if training else ():
            observer.saw_inputs(inputs, kwargs or {})
        if not self._count_as_one:
            self._start_forward(training)

    def _start_forward(self, training: bool) -> None:
        for observer in self.observers:
            observer.forward_starts(training)
        if training and not self._in_step:
            self._in_step = True
            self.throughput.start()
        if self._enabled:
            self._timers(FORWARD).start()

    def stop_forward(self) -> None:
        if self._count_as_one:
            return
        if self._enabled:
            self._timers(FORWARD).stop()
        for observer in self.observers:
            observer.forward_ended()

    @contextmanager
    def one_forward(self, training: bool) -> Iterator[None]:
        """Let the forwards inside, which interrupt each other, count as one."""
        self._start_forward(training)
        self._count_as_one = True
        try:
            yield
        finally:
            self._count_as_one = False
        self.stop_forward()

    def saw_loss(self, loss: torch.Tensor) -> None:
        for observer in self.observers:
            observer.saw_loss(loss)

    def saw_batch_loss(self, loss: torch.Tensor) -> None:
        for observer in self.observers:
            observer.saw_batch_loss(loss)

    def start_backward(self) -> None:
        self._in_backward = True
        for observer in self.observers:
            observer.backward_starts()
        if self._enabled:
            self._timers(BACKWARD).start()
            self._timers(INNER).start()

    def start_reduce(self) -> None:
        """Begin what is left of the reductions: backward's gradients are all there."""
        for observer in self.observers:
            observer.reduction_starts()
        if self._enabled:
            if self._timers(INNER).started_:
                self._timers(INNER).stop()
            self._timers(REDUCE).start()

    def stop_backward(self) -> None:
        """End backward and its reductions; or, after a pipeline's last backward, those alone."""
        if self._enabled:
            self._timers(REDUCE).stop()
            if self._timers(BACKWARD).started_:
                self._timers(BACKWARD).stop()
        for observer in self.observers:
            observer.reduction_ended()
        if self._in_backward:
            self._in_backward = False
            for observer in self.observers:
                observer.backward_ended()

    def start_step(self) -> None:
        for observer in self.observers:
            observer.step_starts()
        if self._enabled:
            self._timers(STEP).start()

    def stop_step(self, global_steps: int) -> None:
        self._in_step = False
        self.throughput.stop(global_step=True, report_speed=False)
        if self._enabled:
            self._timers(STEP).stop()
            self.logged_phases = {}
            # Reading them waits for the device.
            if global_steps % (self._steps_per_print or 1) == 0:
                self._log_phases()
        for observer in self.observers:
            observer.step_ended()

    def _log_phases(self) -> None:
        phases, timers = [FORWARD, BACKWARD, INNER, REDUCE, STEP], self._timers
        known = [name for name in phases if timers.has_timer(name)]
        self.logged_phases = {name: timers(name).elapsed(reset=False) for name in known}
        timers.log(phases, ranks=[0])

    def summary(self) -> str:
        rate = self.throughput.avg_samples_per_sec()
        return f"samples/s={rate:.2f}" if rate > 0 else "samples/s=not known yet"

    def close(self) -> None:
        for observer in self.observers:
            observer.close()
        self.observers = ()

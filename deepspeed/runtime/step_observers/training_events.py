"""What the engine writes to the monitors after each optimizer step.

Upstream's names, over `global_samples`:

    Train/Samples/train_loss        mean over the step's micro-batches, of rank 0 (no rank is asked
                                    for it); of a pipeline, over all
    Train/Samples/lr                of the first parameter group
    Train/Samples/loss_scale        with fp16
    Train/Samples/grad_norm         global norm before clipping (an addition)
    Train/Samples/elapsed_time_ms_* forward, backward, backward_inner, backward_allreduce and step;
                                    with `wall_clock_breakdown`, on the steps that are logged, over
                                    the steps since the last log
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed.monitor.monitor import Event
from deepspeed.runtime.step_observers.step_observer import MeanLoss, StepObserver
from deepspeed.utils import timer

if TYPE_CHECKING:
    import torch

    from deepspeed.runtime.engine_parts.engine_state import WatchedEngine

PREFIX = "Train/Samples/"
LOSS = f"{PREFIX}train_loss"
# Timer -> what upstream calls its event.
PHASES = {
    timer.FORWARD_GLOBAL_TIMER: "forward",
    timer.BACKWARD_GLOBAL_TIMER: "backward",
    timer.BACKWARD_INNER_GLOBAL_TIMER: "backward_inner",
    timer.BACKWARD_REDUCE_GLOBAL_TIMER: "backward_allreduce",
    timer.STEP_GLOBAL_TIMER: "step",
}


class TrainingEvents(StepObserver):
    """Writes the engine's events."""

    def __init__(self, engine: WatchedEngine) -> None:
        self._engine = engine
        self._loss = MeanLoss()

    def saw_loss(self, loss: torch.Tensor) -> None:
        self._loss.add(loss)

    def step_ended(self) -> None:
        events: list[tuple[str, float | torch.Tensor]] = []
        loss = self._loss.take()
        if loss is not None:
            events.append((LOSS, loss))
        engine = self._engine
        events += [(f"{PREFIX}lr", lr) for lr in engine.get_lr()[:1]]
        if engine.fp16_enabled() and engine._sequence is not None:
            events.append((f"{PREFIX}loss_scale", engine._sequence.loss_scale))
        norm = engine.get_global_grad_norm()
        if norm is not None:
            events.append((f"{PREFIX}grad_norm", norm))
        phases = engine.timers.logged_phases
        events += [
            (f"{PREFIX}elapsed_time_ms_{event}", phases[timer])
            for timer, event in PHASES.items()
            if timer in phases
        ]
        self._write(events)

    def saw_batch_loss(self, loss: torch.Tensor) -> None:
        self._write([(LOSS, loss)])

    def _write(self, events: list[tuple[str, float | torch.Tensor]]) -> None:
        step = self._engine.global_samples
        points: list[Event] = [(name, float(value), step) for name, value in events]
        self._engine.monitor.write_events(points, of_engine=True)

"""What listens to the engine's steps: `observers_of` makes what the configuration asks for.

`step_observer` is the interface and what is small, `training_events` what goes to the monitors,
`step_figures` what `ds_watch` shows, `step_profile` the profiler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepspeed.runtime.engine_parts.engine_state import WatchedEngine
    from deepspeed.runtime.step_observers.step_observer import StepObserver


def observers_of(engine: WatchedEngine) -> list[StepObserver]:
    """The observers that the configuration asks for on this rank."""
    # optional: each is imported only for a run that asks for it.
    tree = engine._config.tree
    observers: list[StepObserver] = []
    if tree.memory_breakdown:
        # optional: as above
        from deepspeed.runtime.step_observers.step_observer import MemoryBreakdown

        observers.append(MemoryBreakdown())
    if engine.global_rank == 0 and tree.flops_profiler.enabled:
        # optional: as above
        from deepspeed.runtime.step_observers.step_profile import StepProfile

        observers.append(StepProfile(engine, tree.flops_profiler))
    if engine.global_rank == 0 and tree.watch.enabled:
        # optional: as above
        from deepspeed.runtime.step_observers.step_figures import StepFigures

        observers.append(StepFigures(engine))
    if engine.global_rank == 0 and engine._config.monitor_config.takes_events:
        # optional: as above
        from deepspeed.runtime.step_observers.training_events import TrainingEvents

        observers.append(TrainingEvents(engine))
    return observers

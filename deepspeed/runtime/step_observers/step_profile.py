"""`flops_profiler`: profiles one micro-batch of one step on rank 0, and reports at its end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deepspeed.profiling.flops_profiler.profiler import FlopsProfiler
from deepspeed.runtime.step_observers.step_observer import StepObserver
from deepspeed.utils.timer import Span, begin_span, end_span

if TYPE_CHECKING:
    from deepspeed.runtime.config_models.features import DeepSpeedFlopsProfilerConfig
    from deepspeed.runtime.engine_parts.engine_state import WatchedEngine


class StepProfile(StepObserver):
    """Profiles the first training forward after `profile_step` steps, its backward and its step: in
    a pipeline the first micro-batch's forward of stage 0, and the backward that comes first there.
    """

    def __init__(self, engine: WatchedEngine, config: DeepSpeedFlopsProfilerConfig) -> None:
        self._engine = engine
        self._config = config
        self._profiler: FlopsProfiler | None = None
        self._is_done = False
        # Marks and times of `utils.timer`.
        self._backward_started: Any = None
        self._backward: Span | None = None
        self._step_started: Any = None

    def forward_starts(self, training: bool) -> None:
        if self._is_done or not training or self._engine.global_steps < self._config.profile_step:
            return
        if self._profiler is not None and not self._profiler.started:
            return  # a later micro-batch of the profiled step
        # One that is still started profiled a forward that raised: this one takes its place.
        self.close()
        self._profiler = FlopsProfiler(
            self._engine.module, self._engine, self._config.recompute_fwd_factor
        )
        self._profiler.start_profile()

    def forward_ended(self) -> None:
        if self._profiler is not None:
            self._profiler.stop_profile()

    def backward_starts(self) -> None:
        if self._profiler is not None and self._backward is None:
            self._backward_started = begin_span()

    def backward_ended(self) -> None:
        if self._profiler is not None and self._backward_started is not None:
            self._backward = end_span(self._backward_started)
            self._backward_started = None

    def step_starts(self) -> None:
        if self._profiler is not None:
            self._step_started = begin_span()

    def step_ended(self) -> None:
        profiler, started = self._profiler, self._step_started
        if profiler is None or started is None:
            return
        profiler.step_duration = end_span(started).get_elapsed_msec() / 1e3
        if self._backward is not None:
            profiler.backward_duration = self._backward.get_elapsed_msec() / 1e3
        config = self._config
        profiler.print_model_profile(
            self._engine.global_steps - 1,
            config.module_depth,
            config.top_modules,
            config.detailed,
            config.output_file,
        )
        self.close()
        self._is_done = True

    def close(self) -> None:
        if self._profiler is not None:
            self._profiler.end_profile()
        self._profiler = None
        self._backward_started = self._step_started = self._backward = None

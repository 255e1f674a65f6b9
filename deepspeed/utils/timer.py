"""Timers: phases of a step on the device's own clock, and samples per second.

All durations are milliseconds unless a name says otherwise. On devices with streams a phase is
bracketed by events and read only when somebody asks, so that timing does not serialize what it
measures.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.utils.logging import logger, print_dist

FORWARD_MICRO_TIMER = "fwd_microstep"
FORWARD_GLOBAL_TIMER = "fwd"
BACKWARD_MICRO_TIMER = "bwd_microstep"
BACKWARD_GLOBAL_TIMER = "bwd"
BACKWARD_INNER_MICRO_TIMER = "bwd_inner_microstep"
BACKWARD_INNER_GLOBAL_TIMER = "bwd_inner"
BACKWARD_REDUCE_MICRO_TIMER = "bwd_allreduce_microstep"
BACKWARD_REDUCE_GLOBAL_TIMER = "bwd_allreduce"
STEP_MICRO_TIMER = "step_microstep"
STEP_GLOBAL_TIMER = "step"

BYTES_PER_GB = 1024**3

# A device is never so many steps behind its host: reading the oldest of more waits for nothing, and
# a long run does not keep its events.
MAX_UNREAD = 64


def trim_mean(data: Sequence[float], trim_percent: float) -> float:
    """The mean without the ``trim_percent`` smallest and the ``trim_percent`` largest values; 0 of
    no values.

    Args:
        data: the values; their number times ``trim_percent`` is rounded down.
        trim_percent: a share in 0..0.5, not a percentage.

    Raises:
        ValueError: the share is outside of that range.
    """
    if not 0.0 <= trim_percent < 0.5:
        raise ValueError(
            f"trim_percent={trim_percent} is not in 0..0.5; it is the share cut off at each end"
        )
    cut = int(len(data) * trim_percent)
    kept = sorted(data)[cut : len(data) - cut]
    return sum(kept) / len(kept) if kept else 0.0


class CudaEventTimer:
    """The time between two recorded events of the accelerator."""

    def __init__(self, start_event: Any, end_event: Any) -> None:
        self.start_event = start_event
        self.end_event = end_event

    def is_over(self) -> bool:
        """Whether reading it waits for nothing."""
        return bool(self.end_event.query())

    def get_elapsed_msec(self) -> float:
        """Milliseconds between the events; waits for the second one."""
        if not self.is_over():
            self.end_event.synchronize()
        return float(self.start_event.elapsed_time(self.end_event))


class _HostSpan:
    """The time between two readings of the host's clock."""

    def __init__(self, start: float, end: float) -> None:
        self._msec = (end - start) * 1e3

    def is_over(self) -> bool:
        return True

    def get_elapsed_msec(self) -> float:
        return self._msec


Span = CudaEventTimer | _HostSpan


def begin_span(on_device: bool = True) -> Any:
    """A mark in the current stream's work, for `end_span`; on the host its clock.

    The host waits for nothing: a device that is waited for as a whole while a receive is posted may
    wait for ever, and one that is waited for at all is not the one whose speed was asked for.

    Args:
        on_device: Read the device's clock if it has one.
    """
    accelerator = get_accelerator()
    if not on_device or accelerator.use_host_timers():
        return time.perf_counter()
    event = accelerator.Event(enable_timing=True)
    event.record()
    return event


def end_span(start: Any) -> Span:
    """The time from a mark of `begin_span` to here, to be read later."""
    if isinstance(start, float):
        return _HostSpan(start, time.perf_counter())
    return CudaEventTimer(start, begin_span())


def device_memory() -> tuple[int, int, int, int]:
    """Bytes that are allocated now and were at most, and those that the allocator holds."""
    device = get_accelerator()
    allocated = device.memory_allocated(), device.max_memory_allocated()
    return *allocated, device.memory_cached(), device.max_memory_cached()


class SynchronizedWallClockTimer:
    """Named timers: ``timers("fwd").start()`` and ``.stop()``, ``timers.log(["fwd"])``."""

    class Timer:
        """One timer. Several start-stop pairs add up until `reset`."""

        def __init__(self, name: str) -> None:
            self.name_ = name
            self.started_ = False
            self.use_host_timer = get_accelerator().use_host_timers()
            self._started_at: Any = None
            # Pairs of events are kept unread: reading one waits for the device.
            self._spans: list[Span] = []
            self._records: list[float] = []

        def start(self) -> None:
            """Start."""
            if self.started_:
                raise RuntimeError(f"timer {self.name_!r} is already running; stop it first")
            self._started_at = begin_span()
            self.started_ = True

        def stop(self, reset: bool = False, record: bool = False) -> None:
            """Stop.

            Args:
                reset: count this run only, not the ones before it.
                record: keep what has added up as one value for `mean`.

            Raises:
                RuntimeError: it does not run.
            """
            if not self.started_:
                raise RuntimeError(f"timer {self.name_!r} is not running; start it first")
            span = end_span(self._started_at)
            self._started_at = None
            self.started_ = False
            self._spans = [span] if reset else [*self._spans, span]
            if record:
                self._records.append(self.elapsed(reset=False))

        def reset(self) -> None:
            """Forget everything, a run in progress too."""
            self.started_ = False
            self._started_at = None
            self._spans = []
            self._records = []

        def elapsed(self, reset: bool = True) -> float:
            """Milliseconds of all finished runs since the last reset, and of one in progress."""
            running = self.started_
            if running:
                self.stop()
            total = sum(span.get_elapsed_msec() for span in self._spans)
            # Read events are folded into one number: a long run must not keep thousands of them.
            self._spans = [] if reset else [_HostSpan(0.0, total / 1e3)]
            if running:
                self.start()
            return total

        def mean(self) -> float:
            """The trimmed mean of the recorded values, in milliseconds."""
            self.elapsed(reset=False)
            return trim_mean(self._records, 0.1)

    def __init__(self) -> None:
        self.timers: dict[str, SynchronizedWallClockTimer.Timer] = {}

    def get_timers(self) -> dict[str, "SynchronizedWallClockTimer.Timer"]:
        """The timers by name."""
        return self.timers

    def has_timer(self, name: str) -> bool:
        """Whether a timer of that name was used."""
        return name in self.timers

    def __call__(self, name: str) -> "SynchronizedWallClockTimer.Timer":
        """The timer of that name, made at its first use."""
        timer = self.timers.get(name)
        if timer is None:
            timer = self.timers[name] = self.Timer(name)
        return timer

    @staticmethod
    def memory_usage() -> str:
        """The accelerator's memory in one line, in GB (2**30 bytes)."""
        names = ("mem_allocated", "max_mem_allocated", "cache_allocated", "max_cache_allocated")
        numbers = zip(names, device_memory(), strict=True)
        return "".join(f" | {name}: {value / BYTES_PER_GB:.4f} GB" for name, value in numbers)

    def log(
        self,
        names: Iterable[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Iterable[int] | None = None,
    ) -> None:
        """Print the elapsed times of the named timers in one line, but of those never used."""
        times = self._normalized(names, normalizer, lambda timer: timer.elapsed(reset=reset))
        parts = " | ".join(f"{name}: {value:.2f}" for name, value in times.items())
        memory = self.memory_usage() if memory_breakdown else ""
        print_dist(f"time (ms) | {parts}{memory}", ranks=[0] if ranks is None else ranks)

    def get_mean(
        self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True
    ) -> dict[str, float]:
        """The trimmed means in milliseconds of the named timers' records, by name; see `log`."""
        means = self._normalized(names, normalizer, lambda timer: timer.mean())
        if reset:
            for name in means:
                self.timers[name].reset()
        return means

    def _normalized(
        self,
        names: Iterable[str],
        normalizer: float,
        read: Callable[["SynchronizedWallClockTimer.Timer"], float],
    ) -> dict[str, float]:
        if normalizer <= 0:
            raise ValueError(f"normalizer={normalizer} is not positive; times are divided by it")
        return {name: read(self.timers[name]) / normalizer for name in names if name in self.timers}


class NoopTimer:
    """Takes the place of `SynchronizedWallClockTimer` when nothing is timed."""

    class Timer:
        """Does nothing and has measured nothing."""

        started_ = False

        def start(self) -> None:
            """Nothing."""

        def stop(self, reset: bool = False, record: bool = False) -> None:
            """Nothing."""

        def reset(self) -> None:
            """Nothing."""

        def elapsed(self, reset: bool = True) -> float:
            """0."""
            return 0.0

        def mean(self) -> float:
            """0."""
            return 0.0

    def __init__(self) -> None:
        self.timer = self.Timer()

    def __call__(self, name: str) -> "NoopTimer.Timer":
        return self.timer

    def get_timers(self) -> dict[str, "NoopTimer.Timer"]:
        """There are none."""
        return {}

    def has_timer(self, name: str) -> bool:
        """True, so that callers which ask first go on to their no-op."""
        return True

    def log(
        self,
        names: Iterable[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Iterable[int] | None = None,
    ) -> None:
        """Nothing."""

    def get_mean(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> None:
        """None."""


class ThroughputTimer:
    """Samples per second of a training loop.

    Args:
        config: has ``enabled`` and ``synchronized`` (count until the device has done its work, and
            not until the host has given it out).
        batch_size: samples per optimizer step; at least 1 is assumed.
        start_step: the first steps, which allocate and compile, that do not count.
        steps_per_output: report every so many steps; None means never.
        monitor_memory: add memory to the report.
        logging_fn: writes the report; default: the project's logger at INFO.
    """

    def __init__(
        self,
        config: Any,
        batch_size: int | None,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], Any] | None = None,
    ) -> None:
        self.config = config
        self.batch_size = batch_size or 1
        self.start_step = start_step
        self.steps_per_output = steps_per_output
        self.monitor_memory = monitor_memory
        self.logging = logging_fn or logger.info
        self.started = False
        self.epoch_count = 0
        self.micro_step_count = 0
        self.global_step_count = 0
        self._start: Any = None
        # Not yet added up, with whether a step ends there: reading one may wait for the device.
        self._unread: deque[tuple[Span, bool]] = deque()
        self._total_s = 0.0
        self._report_s = 0.0
        self._counted_steps = 0

    def update_epoch_count(self) -> None:
        """A new epoch: micro-steps are counted from zero."""
        self.epoch_count += 1
        self.micro_step_count = 0

    @property
    def total_elapsed_time(self) -> float:
        """Seconds of the steps that count; waits for the last of them."""
        self._add_up(all_of_them=True)
        return self._total_s

    @property
    def step_elapsed_time(self) -> float:
        """Seconds of those since the last report; waits for the last of them."""
        self._add_up(all_of_them=True)
        return self._report_s

    def _counts(self) -> bool:
        return self.global_step_count >= self.start_step

    def _add_up(self, all_of_them: bool = False) -> None:
        """Read what can be read without waiting, or everything."""
        unread = self._unread
        while unread and (all_of_them or len(unread) > MAX_UNREAD or unread[0][0].is_over()):
            span, ends_step = unread.popleft()
            seconds = span.get_elapsed_msec() / 1e3
            self._total_s += seconds
            self._report_s += seconds
            self._counted_steps += ends_step

    def start(self) -> None:
        """A micro-step begins."""
        if not self.config.enabled:
            return
        self.started = True
        if self._counts():
            self._start = begin_span(on_device=self.config.synchronized)

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """A micro-step ends; nothing happens when none has begun."""
        if not self.config.enabled or not self.started:
            return
        self.started = False
        self.micro_step_count += 1
        if self._start is not None:
            self._unread.append((end_span(self._start), global_step))
            self._start = None
            self._add_up()
        if not global_step:
            return
        self.global_step_count += 1
        every = self.steps_per_output
        due = bool(every) and self.global_step_count % (every or 1) == 0
        if report_speed and due and self.global_step_count > self.start_step:
            self._report()

    def _report(self) -> None:
        steps = min(self.steps_per_output or 1, max(self.global_step_count - self.start_step, 0))
        seconds = self.step_elapsed_time
        current = self.batch_size * steps / seconds if seconds > 0 else 0.0
        text = (
            f"epoch={self.epoch_count}/micro_step={self.micro_step_count}"
            f"/global_step={self.global_step_count}, "
            f"RunningAvgSamplesPerSec={self.avg_samples_per_sec()}, CurrSamplesPerSec={current}"
        )
        if self.monitor_memory:
            accelerator = get_accelerator()
            text += (
                f", MemAllocated={accelerator.memory_allocated() / BYTES_PER_GB:.2f}GB"
                f", MaxMemAllocated={accelerator.max_memory_allocated() / BYTES_PER_GB:.2f}GB"
            )
        self.logging(text)
        self._report_s = 0.0

    def avg_samples_per_sec(self) -> float:
        """Samples per second over the steps that count and are done; minus infinity before any."""
        self._add_up(all_of_them=self._counted_steps == 0)
        if self._counted_steps == 0 or self._total_s <= 0:
            return float("-inf")
        return self.batch_size * self._counted_steps / self._total_s

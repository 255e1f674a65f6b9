"""Timers on a clock that the tests turn, and on a device with events that they make."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.utils import timer as timer_module
from deepspeed.utils.timer import NoopTimer, SynchronizedWallClockTimer, ThroughputTimer, trim_mean
from unit.common import standing_in


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Seconds that pass when told to."""
    made = SimpleNamespace(now=100.0, perf_counter=lambda: made.now)
    monkeypatch.setattr(timer_module, "time", made)
    return made


class EventDevice(CPU_Accelerator):
    """A device with a clock of its own: every event is one millisecond after the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.synchronized: list[str] = []
        self.ticks = 0
        self.done = 0  # the last event that the device has come to

    def is_synchronized_device(self) -> bool:
        return False

    def synchronize(self, device_index: int | None = None) -> None:
        self.synchronized.append("device")

    @property
    def Event(self) -> Any:
        device = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                assert enable_timing

            def record(self) -> None:
                device.ticks += 1
                self.tick = device.ticks

            def query(self) -> bool:
                return self.tick <= device.done

            def synchronize(self) -> None:
                device.synchronized.append("event")

            def elapsed_time(self, end: "Event") -> float:
                return float(end.tick - self.tick)

        return Event


@pytest.fixture
def event_device() -> Iterator[EventDevice]:
    with standing_in(EventDevice()) as device:
        yield device


def test_runs_add_up_until_reset(clock: Any) -> None:
    timer = SynchronizedWallClockTimer()("fwd")
    for seconds in (1.0, 2.0):
        timer.start()
        clock.now += seconds
        timer.stop()
    assert timer.elapsed(reset=False) == pytest.approx(3000.0)
    assert timer.elapsed() == pytest.approx(3000.0)
    assert timer.elapsed() == 0.0
    timer.start()
    clock.now += 1
    assert timer.elapsed() == pytest.approx(1000.0) and timer.started_  # goes on
    clock.now += 2
    timer.stop(reset=True)
    assert timer.elapsed() == pytest.approx(2000.0)


def test_misuse_names_the_timer(clock: Any) -> None:
    timer = SynchronizedWallClockTimer()("bwd")
    with pytest.raises(RuntimeError, match="'bwd' is not running"):
        timer.stop()
    timer.start()
    with pytest.raises(RuntimeError, match="'bwd' is already running"):
        timer.start()
    timer.reset()
    timer.start()


def test_log_is_one_line_in_milliseconds(clock: Any, capsys: pytest.CaptureFixture[str]) -> None:
    timers = SynchronizedWallClockTimer()
    for name in ("fwd", "bwd"):
        timers(name).start()
        clock.now += 0.5
        timers(name).stop()
    timers.log(["fwd", "never", "bwd"], normalizer=2, memory_breakdown=True)
    text = capsys.readouterr().out
    assert "time (ms) | fwd: 250.00 | bwd: 250.00 | mem_allocated: " in text and "never" not in text
    assert timers("fwd").elapsed() == 0.0
    assert timers.has_timer("fwd") and not timers.has_timer("never")
    assert sorted(timers.get_timers()) == ["bwd", "fwd"]
    with pytest.raises(ValueError, match="normalizer=0"):
        timers.log(["fwd"], normalizer=0)


def test_means_of_records(clock: Any) -> None:
    timers = SynchronizedWallClockTimer()
    for seconds in (1.0, 3.0):
        timers("step").start()
        clock.now += seconds
        timers("step").stop(reset=True, record=True)
    assert timers.get_mean(["step", "never"], normalizer=2.0) == {"step": pytest.approx(1000.0)}
    assert timers("step").mean() == 0.0


def test_device_events_are_read_late(event_device: EventDevice) -> None:
    timer = SynchronizedWallClockTimer()("fwd")
    assert not timer.use_host_timer
    for _ in range(3):
        timer.start()
        timer.stop()
    assert event_device.synchronized == []  # timing has not waited for the device
    assert timer.elapsed() == 3.0
    assert event_device.synchronized == ["event"] * 3


def test_trim_mean() -> None:
    for data, share, expected in (
        ([], 0.1, 0.0),
        ([1, 2, 3, 100], 0.1, 26.5),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 100], 0.1, 5.5),
        ([1, 2, 3, 4, 100, 7, 7, 7, 7, 7], 0.25, 35 / 6),
    ):
        assert trim_mean(data, share) == pytest.approx(expected)
    with pytest.raises(ValueError, match="trim_percent=10"):
        trim_mean([1.0], 10)


def test_noop_timer_has_the_same_methods() -> None:
    timers = NoopTimer()
    timers("x").start()
    timers("x").stop(record=True)
    timers.log(["x"])
    assert timers("x").elapsed() == timers("x").mean() == 0.0 and not timers("x").started_
    real = SynchronizedWallClockTimer
    for one, noop in ((real, NoopTimer), (real.Timer, NoopTimer.Timer)):
        public = {name for name in vars(one) if not name.startswith("_")}
        assert public - {*vars(noop), "Timer"} <= {"memory_usage"}


def throughput(synchronized: bool = False, start_step: int = 0, **how: Any) -> ThroughputTimer:
    config = SimpleNamespace(enabled=True, synchronized=synchronized)
    return ThroughputTimer(config, start_step=start_step, **how)


def _steps(timer: ThroughputTimer, steps: int, clock: Any = None, seconds: float = 0.0) -> None:
    for _ in range(steps):
        timer.start()
        if clock is not None:
            clock.now += seconds
        timer.stop(global_step=True)


def test_throughput_skips_the_first_steps(clock: Any) -> None:
    lines: list[str] = []
    how: dict[str, Any] = {"steps_per_output": 2, "logging_fn": lines.append}
    timer = throughput(batch_size=8, start_step=2, **how)
    _steps(timer, 2, clock, 50.0)
    assert timer.avg_samples_per_sec() == float("-inf")
    assert lines == []  # no step counts yet: it would say -inf
    _steps(timer, 1, clock, 1.0)
    _steps(timer, 1, clock, 3.0)
    assert timer.avg_samples_per_sec() == pytest.approx(4.0)
    (line,) = lines
    assert "global_step=4, RunningAvgSamplesPerSec=4.0, CurrSamplesPerSec=4.0" in line
    timer.update_epoch_count()
    _steps(timer, 1, clock, 1.0)
    assert (timer.epoch_count, timer.micro_step_count, timer.global_step_count) == (1, 1, 5)


def test_throughput_adds_up_micro_steps(clock: Any) -> None:
    timer = throughput(batch_size=6)
    for last in (False, False, True):
        timer.start()
        clock.now += 1
        timer.stop(global_step=last)
    assert timer.avg_samples_per_sec() == pytest.approx(2.0)


@pytest.mark.parametrize("synchronized", [False, True])
def test_throughput_waits_for_no_device(event_device: EventDevice, synchronized: bool) -> None:
    # Kills: a device that is waited for as a whole, or at all, while it is being given work.
    timer = throughput(synchronized, batch_size=1)
    _steps(timer, 3)
    assert event_device.synchronized == []
    assert event_device.ticks == (6 if synchronized else 0)


def test_throughput_of_the_steps_that_the_device_has_done(event_device: EventDevice) -> None:
    # Kills: a rate that counts steps whose time is not known yet.
    timer = throughput(True, batch_size=3)
    _steps(timer, 4)
    event_device.done = 5
    assert timer.avg_samples_per_sec() == pytest.approx(3000.0)  # a millisecond per step
    # None was added up yet, so all were read: two were over, and two were waited for.
    assert len(event_device.synchronized) == 2
    _steps(timer, 1)
    assert timer.avg_samples_per_sec() == pytest.approx(3000.0)
    assert len(event_device.synchronized) == 2
    assert timer.total_elapsed_time == pytest.approx(5e-3)
    _steps(timer, 100)
    assert len(timer._unread) == timer_module.MAX_UNREAD  # a long run does not keep its events


def test_disabled_throughput_counts_nothing(clock: Any) -> None:
    timer = ThroughputTimer(SimpleNamespace(enabled=False, synchronized=True), batch_size=1)
    _steps(timer, 4, clock, 1.0)
    assert timer.global_step_count == 0

"""What is kept of a run for its page: as much for a million steps as for a thousand."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepspeed.monitor.watch.record import Line, RecordReader

# Points of a curve: at twice as many, neighbours become one.
POINTS = 300
# The first steps, which allocate and compile, do not count in means of times.
WARM_UP = 2
RECENT = 20
SKIPS_KEPT = DIGESTS_KEPT = 50
SCRIPT_CURVES = 24
PHASES = ("forward", "backward", "communication", "step")


class Point:
    """A few neighbouring steps."""

    __slots__ = ("first", "last", "skipped", "values")

    def __init__(self, x: float) -> None:
        self.first = self.last = x  # their range on the x axis
        self.values: dict[str, list[float]] = {}  # by name `[sum, count, lowest, highest]`
        self.skipped = 0

    def add(self, name: str, value: float) -> None:
        """One step's value; one that is not finite leaves a gap."""
        if math.isfinite(value):
            self._merge(name, [value, 1, value, value])

    def take(self, other: Point) -> None:
        """Become this point and a later one."""
        self.last = other.last
        self.skipped += other.skipped
        for name, numbers in other.values.items():
            self._merge(name, numbers)

    def _merge(self, name: str, numbers: list[float]) -> None:
        mine = self.values.get(name)
        if mine is None:
            self.values[name] = list(numbers)
        else:
            mine[0] += numbers[0]
            mine[1] += numbers[1]
            mine[2:] = min(mine[2], numbers[2]), max(mine[3], numbers[3])

    def mean(self, name: str) -> float | None:
        """Mean of the finite values of that name; None if there is none."""
        numbers = self.values.get(name)
        return numbers[0] / numbers[1] if numbers else None


class Curves:
    """Values over steps, in at most `2 * POINTS` points."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self._steps_per_point = 1
        self._in_last = 0

    def add(self, x: float, values: Mapping[str, float], skipped: bool = False) -> None:
        """Add a step's values. One that was there already was taken back by a load."""
        while self.points and self.points[-1].last >= x:
            self.points.pop()
            self._in_last = self._steps_per_point
        if not self.points or self._in_last >= self._steps_per_point:
            if len(self.points) >= 2 * POINTS:
                self._halve()
            self.points.append(Point(x))
            self._in_last = 0
        point = self.points[-1]
        point.last = x
        point.skipped += skipped
        self._in_last += 1
        for name, value in values.items():
            point.add(name, value)

    def _halve(self) -> None:
        for point, other in zip(self.points[::2], self.points[1::2], strict=True):
            point.take(other)
        self.points = self.points[::2]
        self._steps_per_point *= 2

    def at(self, x: float) -> Point | None:
        """The point that has that step; None if none has."""
        return next((p for p in reversed(self.points) if p.first <= x <= p.last), None)

    def over(self, first: float, last: float) -> Point:
        """All points that have one of these steps, as one."""
        found = [point for point in self.points if first <= point.last and point.first <= last]
        whole = Point(found[0].first)
        for point in found:
            whole.take(point)
        return whole

    def names(self) -> list[str]:
        """The names of all values, in the order in which they came."""
        return list(dict.fromkeys(name for point in self.points for name in point.values))


class Mean:
    """A mean of numbers that come one by one."""

    def __init__(self) -> None:
        self.sum = 0.0
        self.count = 0

    def add(self, value: float) -> None:
        """One more."""
        self.sum += value
        self.count += 1

    @property
    def value(self) -> float | None:
        """The mean; None of no number."""
        return self.sum / self.count if self.count else None


class Run:
    """One run, built from the lines of its record."""

    def __init__(self) -> None:
        self.about: Line = {}
        self.last: Line | None = None  # the last step's line; None before there is one
        self.steps = 0
        self.skipped = 0
        self.skips: deque[Line] = deque(maxlen=SKIPS_KEPT)  # the last of those, as lines
        self.digests: deque[tuple[int, str]] = deque(maxlen=DIGESTS_KEPT)  # the last, by step
        self.curves = Curves()  # of the values of steps, by the names of `values_of`
        # Curves of scripts' values by name, over what the script counts.
        self.scripts: dict[str, Curves] = {}
        self.left_out: set[str] = set()  # names of scripts' values for which there was no room
        self.means: dict[str, Mean] = {}  # of milliseconds by phase, and of `total`
        self.ended: float | None = None  # when it ended; None if it has not, or was killed
        self.error = ""  # what ended it, as text; empty otherwise
        self._recent: deque[dict[str, float]] = deque(maxlen=RECENT)
        self._counted = {"samples": Mean(), "tokens": Mean()}

    @classmethod
    def of_record(cls, path: Path) -> Run:
        """All that a record has."""
        run = cls()
        for line in RecordReader(path).new_lines():
            run.add(line)
        return run

    def add(self, line: Line) -> None:
        """One line of the record."""
        if "step" in line:
            self._add_step(line)
        elif "event" in line:
            self._add_event(line)
        elif "ended" in line:
            self.ended, self.error = line["ended"], str(line.get("error", ""))
        elif "watch" in line:
            self.about = line

    def _add_step(self, line: Line) -> None:
        self.last = line
        self.steps += 1
        skipped = bool(line.get("skipped"))
        if skipped:
            self.skipped += 1
            self.skips.append(line)
        if "digest" in line:
            self.digests.append((line["step"], line["digest"]))
        values = values_of(line)
        self.curves.add(line["step"], values, skipped)
        total = line.get("ms", {}).get("total")
        if self.steps <= WARM_UP or not total:
            return
        for phase, value in line["ms"].items():
            self.means.setdefault(phase, Mean()).add(value)
        amounts = {name: line[name] for name in self._counted if line.get(name)}
        for name, value in amounts.items():
            self._counted[name].add(value)
        self._recent.append({"total": total, **amounts})

    def _add_event(self, line: Line) -> None:
        name = str(line["event"])
        if name not in self.scripts:
            if len(self.scripts) >= SCRIPT_CURVES:
                self.left_out.add(name)
                return
            self.scripts[name] = Curves()
        self.scripts[name].add(line["at"], {name: float(line["value"])})

    def rate(self, of: str) -> float | None:
        """Samples or tokens per second over the last `RECENT` steps; None if they are not known."""
        counted = [entry for entry in self._recent if of in entry]
        if not counted:
            return None
        return 1e3 * sum(e[of] for e in counted) / sum(e["total"] for e in counted)

    def mean_rate(self, of: str) -> float | None:
        """The same over the whole run."""
        amount, total = self._counted[of].value, self.means.get("total", Mean()).value
        return 1e3 * amount / total if amount and total else None


def same_steps(run: Run, before: Run | None) -> tuple[Point, Point] | None:
    """Find the last steps that both runs have, as a point of each; None if there are none."""
    if not (before and run.curves.points and before.curves.points):
        return None
    last = min(each.curves.points[-1].last for each in (run, before))
    points = [each.curves.at(last) for each in (run, before)]
    if None in points:
        return None
    first = min(point.first for point in points if point)
    return run.curves.over(first, last), before.curves.over(first, last)


def values_of(line: Line) -> dict[str, float]:
    """What a step's line says, as one number by name: `norm.0` is the first of `group_norms`."""
    plain = ("loss", "norm", "loss_scale", "difficulty", "memory", "peak_memory")
    values: dict[str, float] = {name: float(line[name]) for name in plain if name in line}
    for name, key in (("norm", "group_norms"), ("lr", "lr")):
        values |= {f"{name}.{i}": float(value) for i, value in enumerate(line.get(key, ()))}
    times: Mapping[str, Any] = line.get("ms", {})
    values |= {f"ms.{phase}": float(value) for phase, value in times.items()}
    if total := times.get("total"):
        values["ms.other"] = max(0.0, total - sum(times.get(phase, 0.0) for phase in PHASES))
        for name in ("samples", "tokens"):
            if line.get(name):
                values[f"{name}/s"] = 1e3 * line[name] / total
    return values

"""What a page's curves are drawn from: plain data, read by `page.js`.

A chart has a title, a unit ("", "ms", "bytes"), series and skipped steps. A series has a label, the
name of a color of `utils.reports`, and lists `x`, `y`, and where points stand for several steps
`low` and `high`. A stacked chart's series lie on each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepspeed.monitor.watch.run import PHASES, Curves, Point, Run

COLORS = ("one", "two", "three", "four", "five", "six", "seven", "eight")
# More lines than that in one chart cannot be told apart; the table has all.
GROUPS_DRAWN = 7
MEMORY = (("peak_memory", "peak"), ("memory", "after the step"))
_DIGITS = 6


def charts_of(run: Run, before: Run | None) -> list[dict[str, Any]]:
    """All charts of a run that have something to show."""
    speed = "tokens" if "tokens/s" in run.curves.names() else "samples"
    charts = [
        _chart("loss", run, before, [("loss", "loss")], scale="choice"),
        _norms(run, before),
        _rates(run, before),
        _times(run, before),
        _chart(f"{speed}/s", run, before, [(f"{speed}/s", f"{speed}/s")], zero=True),
        _chart("memory of rank 0", run, before, MEMORY, unit="bytes", zero=True),
    ]
    if len({p.mean("loss_scale") for p in run.curves.points}) > 1:
        names = [("loss_scale", "loss scale")]
        charts.append(_chart("loss scale", run, before, names, scale="log"))
    names = [("difficulty", "difficulty")]
    charts.append(_chart("curriculum", run, before, names, zero=True))
    charts += [_script(name, run, before) for name in run.scripts]
    return [chart for chart in charts if chart["series"]]


def _chart(
    title: str,
    run: Run,
    before: Run | None,
    names: Sequence[tuple[str, str]],
    *,
    unit: str = "",
    scale: str = "linear",
    zero: bool = False,
) -> dict[str, Any]:
    """Named values of the run, and the first of them of the run before."""
    series = [
        _series(run.curves.points, name, label, color)
        for (name, label), color in zip(names, COLORS, strict=False)
    ]
    if before is not None and names:
        series.append(_series(before.curves.points, names[0][0], "before", COLORS[0], dashed=True))
    look = {"title": title, "unit": unit, "scale": scale, "zero": zero, "stacked": False}
    return look | {
        "x": "step",
        "skips": [point.last for point in run.curves.points if point.skipped],
        # Nothing of this run, nothing beside it.
        "series": [each for each in series if each["x"]] if series and series[0]["x"] else [],
    }


def _norms(run: Run, before: Run | None) -> dict[str, Any]:
    names = [("norm", "gradient norm")]
    groups = [name for name in run.curves.names() if name.startswith("norm.")]
    if len(groups) > 1:
        names += [(name, _group(run, name)) for name in groups[:GROUPS_DRAWN]]
    return _chart("gradient norm", run, before, names, scale="choice")


def _rates(run: Run, before: Run | None) -> dict[str, Any]:
    points = run.curves.points
    curves: dict[tuple[float | None, ...], list[str]] = {}
    for name in (name for name in run.curves.names() if name.startswith("lr.")):
        curves.setdefault(tuple(point.mean(name) for point in points), []).append(name)
    names = [
        (same[0], "all groups" if len(curves) == 1 else ", ".join(_group(run, n) for n in same))
        for same in list(curves.values())[: len(COLORS)]
    ]
    return _chart("learning rate", run, before, names, zero=True)


def _group(run: Run, name: str) -> str:
    index = int(name.split(".")[1])
    names = run.about.get("groups", ())
    return str(names[index]) if index < len(names) else f"group {index}"


def _times(run: Run, before: Run | None) -> dict[str, Any]:
    phases = [(f"ms.{phase}", phase) for phase in (*PHASES, "other")]
    chart = _chart("step time", run, None, phases, unit="ms", zero=True)
    chart["stacked"] = True
    if before is not None:
        line = _series(before.curves.points, "ms.total", "before", "text", dashed=True)
        chart["series"] += [line] if line["x"] else []
    return chart


def _script(name: str, run: Run, before: Run | None) -> dict[str, Any]:
    chart = _chart(name, run, None, [])
    series = [_series(run.scripts[name].points, name, name, COLORS[0])]
    theirs = before.scripts.get(name, Curves()) if before else Curves()
    series.append(_series(theirs.points, name, "before", COLORS[0], dashed=True))
    drawn = [each for each in series if each["x"]]
    return chart | {"x": "at", "skips": [], "scale": "choice", "series": drawn}


def _series(
    points: Sequence[Point], name: str, label: str, color: str, dashed: bool = False
) -> dict[str, Any]:
    known = [point for point in points if name in point.values]
    series: dict[str, Any] = {
        "label": label,
        "color": color,
        "dashed": dashed,
        "x": [point.last for point in known],
        "y": [_short(point.mean(name)) for point in known],
    }
    if any(point.values[name][1] > 1 for point in known):
        series["low"] = [_short(point.values[name][2]) for point in known]
        series["high"] = [_short(point.values[name][3]) for point in known]
    return series


def _short(value: float | None) -> float | None:
    """Digits that nobody sees take most of a page's room."""
    return None if value is None else float(f"{value:.{_DIGITS}g}")

"""The page of a run: figures and tables as plain HTML, curves drawn by its own script.

Everything is in the one file, which loads nothing. `page.js` writes the numbers that the reader
points at as they are written here.
"""

from __future__ import annotations

import html
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.resources import files
from typing import NamedTuple

from deepspeed.monitor.watch.charts import charts_of
from deepspeed.monitor.watch.run import PHASES, Point, Run, same_steps
from deepspeed.utils import reports

PAGE_NAME = "watch.html"
# Settings of the record's first line, with what a reader calls them.
SETTINGS = {
    "job": "job",
    "stage": "ZeRO stage",
    "dtype": "model dtype",
    "optimizer": "optimizer",
    "world_size": "ranks",
    "data_parallel": "data-parallel ranks",
    "batch": "samples per step",
    "micro_batch": "micro-batch",
    "accumulation": "micro-batches per step",
    "clip": "largest gradient norm",
    "device": "device",
    "host": "host of rank 0",
    "deepspeed": "deepspeed",
    "torch": "torch",
}
SKIPS_SHOWN = DIGESTS_SHOWN = 8
DIGITS_SHOWN = 16  # of a digest
NONE = "–"
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class Figure(NamedTuple):
    """One of the numbers at the top."""

    name: str
    value: str
    before: str = ""  # of the run before
    change: str = ""
    is_better: bool | None = None  # None where that cannot be said


def render(run: Run, before: Run | None, refresh_s: float = 0.0, unreadable: int = 0) -> str:
    """Draw the page, which looks for a newer one after `refresh_s` seconds (0: never)."""
    beside = before if before is not None and before.last is not None else None
    tables = _times(run, beside) + _groups(run, beside) + _skips(run)
    tables += _digests(run, beside) + _settings(run, beside)
    body = f'{_head(run)}{_figures(run, beside)}<div id="charts"></div>'
    body += f'<div class="tables">{tables}</div>{_foot(run, unreadable)}'
    data = {
        "charts": charts_of(run, beside),
        "refresh": refresh_s if run.ended is None else 0,
        "heard": _heard(run),
        "ended": run.ended,
        "step_ms": run.means["total"].value if "total" in run.means else None,
    }
    # A script of a page ends at the first "</", even inside of a text.
    encoded = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("</", "<\\/")
    body += f'<script type="application/json" id="data">{encoded}</script>'
    body += f"<script>{_asset('page.js')}</script>"
    return reports.page(f"{_title(run)} · ds_watch", body, _asset("page.css"))


def _asset(name: str) -> str:
    return files("deepspeed.monitor.watch").joinpath(name).read_text(encoding="utf-8")


def _title(run: Run) -> str:
    return str(run.about.get("job", "a run"))


def _heard(run: Run) -> float:
    if run.ended is not None:
        return run.ended
    line = run.last or run.about
    heard: float = line["time"] if "time" in line else line.get("began", 0.0)
    return heard


def _span(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _head(run: Run) -> str:
    about = run.about
    state = "failed" if run.error else "ended" if run.ended is not None else "training"
    failed = f'<p class="bad">{html.escape(run.error)}</p>' if run.error else ""
    parts = [f"ZeRO-{about['stage']}" if "stage" in about else ""]
    parts += [str(about.get(key, "")) for key in ("dtype", "optimizer")]
    if "world_size" in about:
        parts.append(f"{about['world_size']} × {about.get('device', 'device')}")
    if "batch" in about:
        parts.append(f"{about['batch']:,} samples per step")
    began = about.get("began")
    if began is not None:
        clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(began))
        parts.append(f"began {clock}, {_span(_heard(run) - began)}")
    said = " · ".join(html.escape(part) for part in parts if part)
    return (
        f'<header><h1>{html.escape(_title(run))} <span id="state" class="state {state}">{state}'
        f'</span></h1><p class="quiet">{said}</p>{failed}</header>'
    )


# Figures


def _figures(run: Run, before: Run | None) -> str:
    if run.last is None:
        return '<p class="quiet">No step has been recorded yet.</p>'
    line = run.last
    pair = same_steps(run, before)

    def of_step(title: str, name: str, value: float | None, better: bool | None) -> Figure:
        if pair is None:
            return Figure(title, number(value))
        mine, theirs = (point.mean(name) for point in pair)
        here = "" if _is_last(run, pair[0]) else f"{_which(pair[0])}, here {number(mine)}"
        shown = _compared(title, mine, theirs, here, better)
        return shown._replace(value=number(value))

    times = _mean_ms(run, "total"), _mean_ms(before, "total")
    reached = (before.last or {}).get("step", 0) if before else 0
    figures = [Figure("step", f"{line['step']:,}", f"{reached:,}" if before else "")]
    figures += [
        of_step("loss", "loss", _float(line.get("loss")), False),
        of_step("gradient norm", "norm", _float(line.get("norm")), None),
        of_step("learning rate", "lr.0", (line.get("lr") or [None])[0], None),
        _compared("step time, mean", *times, "", False, milliseconds),
        _speed(run, before),
    ]
    peak = _largest_peak(run), _largest_peak(before)
    figures.append(_compared("peak memory, rank 0", *peak, "", False, number_of_bytes))
    share = f"{run.skipped:,}" + (f" of {run.steps:,}" if run.skipped else "")
    theirs = f"{before.skipped:,}" if before else ""
    figures.append(Figure("skipped steps", share, theirs, "", not run.skipped or None))
    return f'<div class="figures">{"".join(map(_figure, figures))}</div>'


def _float(value: float | None) -> float | None:
    return None if value is None else float(value)


def _is_last(run: Run, point: Point) -> bool:
    """Whether a point is the run's last step and no other."""
    return run.last is not None and point.first == point.last == run.last["step"]


def _which(point: Point) -> str:
    if point.first == point.last:
        return f" at step {point.last:,.0f}"
    return f" in steps {point.first:,.0f} to {point.last:,.0f}"


def _speed(run: Run, before: Run | None) -> Figure:
    of = "tokens" if run.rate("tokens") else "samples"
    theirs = before.mean_rate(of) if before else None
    return _compared(f"{of}/s, last steps", run.rate(of), theirs, ", mean", True)


def _largest_peak(run: Run | None) -> float | None:
    if run is None:
        return None
    peaks = [p.values["peak_memory"][3] for p in run.curves.points if "peak_memory" in p.values]
    return max(peaks, default=None)


def _compared(
    title: str,
    mine: float | None,
    theirs: float | None,
    where: str,
    more_is_better: bool | None,
    write: Callable[[float | None], str] | None = None,
) -> Figure:
    write = write or number
    if mine is None or theirs is None:
        return Figure(title, write(mine), "" if theirs is None else write(theirs) + where)
    said = change(mine, theirs)
    better = None if more_is_better is None or not said else (mine > theirs) is more_is_better
    return Figure(title, write(mine), write(theirs) + where, said, better)


def _figure(figure: Figure) -> str:
    kind = {True: " good", False: " bad", None: ""}[figure.is_better]
    said = f' <b class="change{kind}">{html.escape(figure.change)}</b>' if figure.change else ""
    before = f"before {html.escape(figure.before)}{said}" if figure.before else "&nbsp;"
    return (
        f'<div class="figure" data-figure="{html.escape(figure.name)}">'
        f'<div class="name">{html.escape(figure.name)}</div>'
        f'<div class="value">{html.escape(figure.value)}</div>'
        f'<div class="before">{before}</div></div>'
    )


# Tables


def _table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]], note: str = "") -> str:
    """Cells are HTML; all columns but the first are numbers."""
    head = "".join(f"<th{' class=n' if i else ''}>{text}</th>" for i, text in enumerate(heads))
    cells = (
        "".join(f"<td{' class=n' if i else ''}>{c}</td>" for i, c in enumerate(row)) for row in rows
    )
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    below = f'<p class="quiet">{note}</p>' if note else ""
    return (
        f'<section><h2>{title}</h2><div class="wide"><table><tr>{head}</tr>{body}</table></div>'
        f"{below}</section>"
    )


def _times(run: Run, before: Run | None) -> str:
    times = (run.last or {}).get("ms", {})
    total = run.means["total"].value if "total" in run.means else None
    rows = []
    for phase in (*PHASES, "other", "total"):
        mine, theirs = (_mean_ms(each, phase) for each in (run, before))
        last = _other(times) if phase == "other" else times.get(phase)
        if last is None and mine is None:
            continue
        share = mine / total if mine is not None and total else 0.0
        bar = f'<i class="bar {phase}" style="width:{100 * share:.1f}%"></i>'
        name = f"<b>{phase}</b>" if phase == "total" else phase + bar
        rows.append([name, number(last), number(mine), *([number(theirs)] if before else [])])
    heads = ["milliseconds", "last step", "mean", *(["mean before"] if before else [])]
    note = (
        "Rank 0, on the device's clock. Communication is what is left of the reductions when "
        "autograd is done: what overlaps it is in backward, and waiting for it in step. Other is "
        "everything between the engine's phases, data and evaluation too."
    )
    return _table("Step time", heads, rows, note) if rows else ""


def _other(times: dict[str, float]) -> float | None:
    if not times.get("total"):
        return None
    return max(0.0, times["total"] - sum(times.get(phase, 0.0) for phase in PHASES))


def _mean_ms(run: Run | None, phase: str) -> float | None:
    if run is None:
        return None
    if phase == "other":
        return _other({name: mean.value or 0.0 for name, mean in run.means.items()})
    return run.means[phase].value if phase in run.means else None


def _groups(run: Run, before: Run | None) -> str:
    last = run.last or {}
    norms, rates = last.get("group_norms", ()), last.get("lr", ())
    names = run.about.get("groups", ())
    pair = same_steps(run, before)
    rows = []
    for index in range(max(len(norms), len(rates))):
        name = names[index] if index < len(names) else f"group {index}"
        row = [html.escape(str(name))]
        for values, key in ((norms, "norm"), (rates, "lr")):
            row.append(number(float(values[index]) if index < len(values) else None))
            if before:
                row.append(number(pair[1].mean(f"{key}.{index}") if pair else None))
        rows.append(row)
    heads = ["parameter group", "norm", "rate"]
    if before:
        heads = ["parameter group", "norm", "before", "rate", "before"]
    note = f"Before:{_which(pair[1])}." if pair and not _is_last(run, pair[1]) else ""
    return _table("Parameter groups", heads, rows, note) if rows else ""


def _skips(run: Run) -> str:
    if not run.skipped:
        return ""
    rows = [
        [f"{line['step']:,}", number(float(line["norm"])), number(line.get("loss_scale"))]
        for line in list(run.skips)[::-1][:SKIPS_SHOWN]
    ]
    note = "" if run.skipped <= len(rows) else f"The last {len(rows)} of {run.skipped:,}."
    return _table("Skipped steps", ["step", "norm", "loss scale"], rows, note)


def _digests(run: Run, before: Run | None) -> str:
    theirs = dict(before.digests) if before else {}
    rows = []
    for step, mine in list(run.digests)[::-1][:DIGESTS_SHOWN]:
        row = [f"{step:,}", mine[:DIGITS_SHOWN]]
        if theirs:
            other = theirs.get(step, NONE)
            row.append("equal" if other == mine else f"<b>{other[:DIGITS_SHOWN]}</b>")
        rows.append(row)
    heads = ["step", "digest of masters and optimizer state", *(["before"] if theirs else [])]
    note = "ds_diff tells the first step in which two runs differ, and the parameters."
    return _table("Digests", heads, rows, note) if rows else ""


def _settings(run: Run, before: Run | None) -> str:
    heads, rows = ["setting", "this run"], []
    theirs = before.about if before else {}
    if before:
        heads.append("before")
    for key, title in SETTINGS.items():
        mine, other = run.about.get(key), theirs.get(key)
        if mine is None and other is None:
            continue
        row = [html.escape(title), html.escape(str(mine))]
        if before:
            text = html.escape(str(other))
            row.append(text if mine == other else f"<b>{text}</b>")
        rows.append(row)
    return _table("Settings", heads, rows) if rows else ""


def _foot(run: Run, unreadable: int) -> str:
    notes = [
        "Dashed: the run before. A band is the range of neighbouring steps that share a point. Red "
        "marks are skipped steps. The loss is rank 0's, that of a pipeline and of steps with "
        "digests all ranks'."
    ]
    if run.left_out:
        notes.append(f"Not drawn, for want of room: {', '.join(sorted(run.left_out))}.")
    if unreadable:
        notes.append(f"{unreadable:,} lines of the record are not readable and were left out.")
    return f'<footer class="quiet">{" ".join(html.escape(note) for note in notes)}</footer>'


# Numbers


def number(value: float | None) -> str:
    """Four significant digits: 0.1235, 12,346, 3.2e-4; a dash for None."""
    if value is None:
        return NONE
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if value == 0:
        return "0"
    if size >= 999.95:
        return f"{value:,.0f}"
    if size < 1e-3:
        digits, exponent = f"{value:.3e}".split("e")
        return f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:.4g}"


def milliseconds(value: float | None) -> str:
    """Write a time with the unit that fits."""
    if value is None:
        return NONE
    return f"{number(value)} ms" if value < 1e4 else f"{number(value / 1e3)} s"


def number_of_bytes(value: float | None) -> str:
    """Write a size with the unit that fits."""
    if value is None:
        return NONE
    power = 0
    while value >= 1024 and power < len(_UNITS) - 1:
        value /= 1024
        power += 1
    return f"{number(value)} {_UNITS[power]}"


def change(now: float, before: float) -> str:
    """Say how `now` differs, as +1.2%; nothing where it cannot be said or rounds to nothing."""
    if not (math.isfinite(now) and math.isfinite(before)) or before == 0:
        return ""
    percent = 100 * (now - before) / abs(before)
    if abs(percent) < 0.05:
        return ""
    return f"{percent:+,.0f}%" if abs(percent) >= 99.95 else f"{percent:+.1f}%"

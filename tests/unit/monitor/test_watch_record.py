"""A run's record, what is kept of it, and the command that draws it."""

import json
import math
import re
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from deepspeed.monitor.config import get_monitor_config
from deepspeed.monitor.monitor import MonitorMaster
from deepspeed.monitor.watch import monitor
from deepspeed.monitor.watch import page as pages
from deepspeed.monitor.watch import run as runs
from deepspeed.monitor.watch.charts import charts_of
from deepspeed.monitor.watch.cli import MISUSED, main
from deepspeed.monitor.watch.page import PAGE_NAME, number, render
from deepspeed.monitor.watch.record import RecordReader, encoded, new_record, run_before
from deepspeed.monitor.watch.run import POINTS, RECENT, SCRIPT_CURVES, WARM_UP, Curves, Run
from deepspeed.utils.logging import logger


def step_line(step: int, **values: Any) -> dict[str, Any]:
    """A step as the engine records it, with numbers that follow from its own."""
    return {
        **{"step": step, "time": 1000.0 + step, "samples": 8, "tokens": 512, "loss": 4.0 / step},
        **{"norm": 1.0 + step, "group_norms": [1.0 + step, 0.5], "lr": [1e-3 * step, 2e-3]},
        "loss_scale": 1.0,
        "ms": {"forward": 2.0, "backward": 5.0, "communication": 1.0, "step": 1.0, "total": 10.0},
        **values,
    }


def write_run(folder: Path, steps: int, began: float = 1.0, **values: Any) -> Path:
    with new_record(folder) as file:
        file.write(encoded({"watch": 1, "began": began, "job": folder.name}))
        file.writelines(encoded(step_line(step, **values)) for step in range(1, steps + 1))
    return Path(file.name)


def test_a_record_reads_back_and_grows(tmp_path: Path) -> None:
    # Kills: numbers that are not finite as text that is no JSON, a line that is read before it is
    # whole or twice, a damaged line that ends the reading.
    path = write_run(tmp_path, 0)
    reader = RecordReader(path)
    assert [line["watch"] for line in reader.new_lines()] == [1]
    whole = encoded({"step": 1, "loss": math.nan, "group_norms": [math.inf, 1.5]})
    json.loads(whole, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    with open(path, "a") as file:
        file.write(whole + '{"step": 2, "lo')
    assert reader.new_lines() == [{"step": 1, "loss": "nan", "group_norms": ["inf", 1.5]}]
    assert reader.new_lines() == [] and reader.unreadable == 0
    with open(path, "a") as file:
        file.write('ss": 0.5}\n{"step": 3,\n[4]\n' + encoded({"step": 5}))
    assert reader.new_lines() == [{"step": 2, "loss": 0.5}, {"step": 5}]
    assert reader.unreadable == 2


def test_which_run_was_before(tmp_path: Path) -> None:
    # Kills: the newest of all runs, a run of another folder although this one has one, one that
    # began later; of ten thousand the one with the greatest name.
    first = write_run(tmp_path / "a", 1, began=1.0)
    later = write_run(tmp_path / "c", 1, began=9.0)
    second = write_run(tmp_path / "b", 1, began=5.0)
    third = write_run(tmp_path / "b", 1, began=6.0)
    assert run_before(first) is None
    assert run_before(second) == first
    assert run_before(third) == second
    assert run_before(later) == third
    assert [path.name for path in (second, third)] == ["run-0001.jsonl", "run-0002.jsonl"]
    last = third.rename(third.with_name("run-9999.jsonl"))
    assert run_before(write_run(tmp_path / "b", 1)) == last


def test_a_long_run_costs_no_more_than_a_short_one() -> None:
    # Kills: points that grow with the run, means that forget or weigh steps or are the range.
    curves, steps = Curves(), 16 * POINTS
    for step in range(1, steps + 1):
        curves.add(step, {"y": float(step), "odd": math.nan if step % 2 else 1.0})
    assert POINTS <= len(curves.points) <= 2 * POINTS
    assert curves.points[0].first == 1 and curves.points[-1].last == steps
    for point in curves.points:
        total, count, low, high = point.values["y"]
        assert (low, high, count) == (point.first, point.last, point.last - point.first + 1)
        assert total == pytest.approx((low + high) / 2 * count)
    assert sum(point.values["odd"][1] for point in curves.points) == steps / 2
    assert curves.at(steps / 2).last >= steps / 2 >= curves.at(steps / 2).first  # type: ignore[union-attr]  # it has points


def test_a_point_of_several_steps_is_drawn_as_their_mean_and_range() -> None:
    # Kills: the highest or the last step instead of the mean, a band that is not there.
    run = Run()
    for step in range(1, 4 * POINTS + 1):
        run.add(step_line(step, loss=10.0 if step % 2 else 30.0))
    loss = charts_of(run, run)[0]
    curves = [(s["label"], s["dashed"]) for s in loss["series"]]
    assert curves == [("loss", False), ("before", True)]
    series = loss["series"][0]
    assert [{*series[key]} for key in ("y", "low", "high")] == [{20.0}, {10.0}, {30.0}]
    assert series["x"] == list(range(2, 4 * POINTS + 1, 2))


def test_steps_taken_back_by_a_checkpoint_are_forgotten() -> None:
    curves = Curves()
    for step in (*range(1, 11), 6, 7):
        curves.add(step, {"y": float(step)})
    assert [point.last for point in curves.points] == [*range(1, 6), 6, 7]
    assert curves.at(7).last == 7 and curves.at(8) is None  # type: ignore[union-attr]  # it has 7


def test_what_is_kept_of_a_run() -> None:
    # Kills: the first steps in the means, a rate that is the mean of rates, skips that are not
    # counted, more curves of scripts than there is room for.
    run = Run()
    slow = {"total": 1000.0, "forward": 900.0}
    for step in range(1, WARM_UP + 1):
        run.add(step_line(step, ms=slow))
    for step in range(WARM_UP + 1, 40):
        skipped = {"skipped": True, "norm": "inf"} if step in (7, 9) else {}
        total = 10.0 if step % 2 else 30.0
        run.add(step_line(step, ms={"forward": 4.0, "total": total}, **skipped))
    assert run.means["forward"].value == 4.0 and run.steps == 39
    assert run.rate("tokens") == pytest.approx(1e3 * 512 * RECENT / (RECENT / 2 * (10 + 30)))
    assert (run.skipped, [line["step"] for line in run.skips]) == (2, [7, 9])
    assert [point.last for point in run.curves.points if point.skipped] == [7, 9]
    for number_of_script in range(SCRIPT_CURVES + 2):
        run.add({"event": f"mine {number_of_script}", "value": 1.0, "at": 8})
    assert len(run.scripts) == SCRIPT_CURVES and len(run.left_out) == 2
    assert "mine 25" in render(run, None)


def test_numbers() -> None:
    values = (None, 0, 1, 0.123456, 12345.6, 999.96, 0.00032, math.nan)
    assert [number(v) for v in values] == "– 0 1 0.1235 12,346 1,000 3.2e-4 nan".split()
    assert pages.number_of_bytes(3 * 2**29) == "1.5 GiB" and pages.milliseconds(12345) == "12.35 s"
    pairs = ((3.0, 2.0), (2.0, 2.0001), (1.0, 0.0), (30.0, 2.0))
    assert [pages.change(*pair) for pair in pairs] == ["+50.0%", "", "", "+1,400%"]


def figures(page: str) -> dict[str, tuple[str, str]]:
    """What a page shows at its top: name -> value, value of the run before with the change."""
    value = r'class="value">(.*?)</div><div class="before">(.*?)</div>'
    found = re.findall(rf'data-figure="(.*?)">.*?{value}', page)
    return {name: (value, re.sub("<.*?>", "", before)) for name, value, before in found}


def test_the_page_compares_with_the_run_before(tmp_path: Path) -> None:
    # Kills: the end of the run before instead of the same step, names that are HTML.
    write_run(tmp_path, 20)
    path = write_run(tmp_path, 5, loss=2.0)
    with open(path, "a") as file:
        file.write(encoded(step_line(6, loss=1.0, norm=math.nan, skipped=True)))
        file.write(encoded({"event": "</script><b>", "value": 0.5, "at": 48}))
    assert main([str(tmp_path)]) == 0
    page = (tmp_path / PAGE_NAME).read_text()
    shown = figures(page)
    assert shown["step"] == ("6", "before 20")
    assert shown["loss"] == ("1", "before 0.6667 +50.0%")
    assert shown["gradient norm"] == ("nan", "before 7")
    assert shown["learning rate"] == ("0.006", "before 0.006")
    assert shown["step time, mean"] == ("10 ms", "before 10 ms")
    assert shown["tokens/s, last steps"] == ("51,200", "before 51,200, mean")
    assert shown["skipped steps"] == ("1 of 6", "before 0")
    assert page.count("</script>") == 2
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")


def test_only_equal_steps_are_compared(tmp_path: Path) -> None:
    # Kills: a run's end against the earlier end of the run before, a single step against a mean of
    # several, steps that the run before did not have against its last ones.
    record = write_run(tmp_path, 4, loss=8.0)
    assert main([str(write_run(tmp_path, 8, loss=2.0))]) == 0
    shown = figures((tmp_path / PAGE_NAME).read_text())
    assert shown["loss"] == ("2", "before 8 at step 4, here 2 -75.0%")
    assert shown["gradient norm"] == ("9", "before 5 at step 4, here 5")
    resumed = Run()
    for step in range(5, 9):
        resumed.add(step_line(step, loss=1.0))
    assert runs.same_steps(resumed, Run.of_record(record)) is None
    assert figures(render(resumed, Run.of_record(record)))["loss"] == ("1", "&nbsp;")
    long, short = Run(), Run()
    for step in range(1, 4 * POINTS + 1):
        long.add(step_line(step, loss=10.0 if step % 2 else 30.0))
        if step < POINTS:
            short.add(step_line(step, loss=20.0))
    assert [point.mean("loss") for point in runs.same_steps(short, long) or ()] == [20.0, 20.0]


def test_the_command_follows_a_run_to_its_end(tmp_path: Path) -> None:
    # Kills: a page drawn once, a command that goes on after the end.
    path = write_run(tmp_path, 2)
    arguments = [str(path), "--follow", "--every", "0.05"]
    follower = threading.Thread(target=main, args=(arguments,), daemon=True)
    follower.start()
    with open(path, "a") as file:
        file.write(encoded(step_line(3)) + encoded({"ended": 5.0, "error": "ValueError: <x>"}))
    follower.join(timeout=30)
    assert not follower.is_alive()
    page = (tmp_path / PAGE_NAME).read_text()
    assert figures(page)["step"][0] == "3" and "ValueError: &lt;x&gt;" in page


def test_misuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, 1)
    for arguments, said in {
        "nowhere": "no record of a run there",
        "RUN --before nowhere": "no record of a run there",
        "RUN --output nowhere/page.html": "there is no folder",
        "RUN --every 0": "give a positive number",
    }.items():
        assert main(arguments.replace("RUN", str(tmp_path)).split()) == MISUSED
        assert said in capsys.readouterr().err


def test_scripts_values_and_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Kills: the engine's events twice, a record that ends training, a page drawn with each line.
    block = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    monitors = MonitorMaster(get_monitor_config({"watch": block}))
    monitors.describe({"watch": 1, "began": 2.0})
    drawn: list[int] = []
    monkeypatch.setattr(monitor, "render", lambda *args: drawn.append(1) or "")
    monitors.write_events([("accuracy", 1, 16)])
    monitors.write_events([("Train/Samples/lr", 0.1, 16)], of_engine=True)
    monitors.record(step_line(1))
    folder = tmp_path / "job"
    lines = RecordReader(folder / "run-0001.jsonl").new_lines()
    assert [next(iter(line)) for line in lines] == ["watch", "event", "step"] and drawn == [1]
    said: list[str] = []
    monkeypatch.setattr(logger, "warning", lambda text, *args: said.append(text % args))
    monkeypatch.setattr(monitor, "encoded", Mock(side_effect=OSError("full")))
    monitors.record(step_line(2))
    monitors.record(step_line(3))
    monitors.close()
    assert len(said) == 1 and "WatchMonitor" in said[0] and "full" in said[0]

"""Printed schedules: they read back, the grid shows who computes when, docs have the printer's."""

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed.runtime.pipe.schedule import (
    BackwardPass,
    ForwardPass,
    InferenceSchedule,
    ListedSchedule,
    OptimizerStep,
    PipeSchedule,
    make_schedule,
)
from deepspeed.runtime.pipe.schedule_text import (
    format_schedule,
    main,
    parse_schedule,
    parse_schedules,
    render_grid,
    render_svg,
)
from deepspeed.runtime.pipe.simulator import CostModel, simulate

PICTURES = Path(__file__).parents[4] / "docs" / "images"

GRIDS = {}
GRIDS["1f1b"] = """\
stage 0  | F0 F1 .  .  B0--- F2 B1--- .  B2---
stage 1  | .  F0 B0--- F1 B1--- F2 B2---
"""
GRIDS["zero_bubble"] = """\
stage 0  | F0 F1 .  I0 W0 F2 I1 W1 I2 W2
stage 1  | .  F0 I0 F1 I1 W0 F2 I2 W1 W2
"""


def stages_of(name: str, micro_batches: int = 3, stages: int = 2) -> list[PipeSchedule]:
    """The schedules of all stages."""
    return [make_schedule(name, micro_batches, stages, stage) for stage in range(stages)]


class TestLists:
    """Instruction lists."""

    @settings(max_examples=40, deadline=None)
    @given(st.data())
    def test_reads_back(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(["1f1b", "zero_bubble", "interleaved", "inference"]))
        stages = data.draw(st.integers(1, 5))
        stage, count = data.draw(st.integers(0, stages - 1)), data.draw(st.integers(1, 9))
        chunks = data.draw(st.integers(2, 3)) if name[:2] == "in" else 1
        make = InferenceSchedule if name == "inference" else functools.partial(make_schedule, name)
        schedule = make(count, stages, stage, chunks)
        read = parse_schedule(format_schedule(schedule))
        assert list(read.steps()) == list(schedule.steps())
        for of in ("micro_batches", "stages", "stage_id", "num_chunks"):
            assert getattr(read, of) == getattr(schedule, of)
        assert read.num_pipe_buffers() == schedule.num_pipe_buffers()
        assert format_schedule(read) == format_schedule(schedule)

    def test_any_arguments(self) -> None:
        odd = ForwardPass(0, micro_batch=None, chunk=0, note="a; b), [c", scale=-0.5, shape=(2, 3))
        steps = [[odd], [], [OptimizerStep()]]
        schedule = ListedSchedule(1, 1, 0, steps, num_buffers=1)
        assert list(parse_schedule(format_schedule(schedule)).steps()) == steps
        # A pipeline reads back and simulates.
        schedules = stages_of("zero_bubble", 5, 3)
        read = parse_schedules("\n".join(map(format_schedule, schedules)))
        assert simulate(read) == simulate(schedules)

    @pytest.mark.parametrize(
        ("line", "text"),
        [
            ("step 0: [Jump(buffer_id=0)]", "line 2 .*no instruction Jump"),
            ("step 0: [ForwardPass(0)]", "line 2 "),
            ("step 0: [ForwardPass(buffer_id=len('a'))]", "line 2 "),
            ("step 0: [ForwardPass()]", "line 2 .*buffer_id"),
            ("step 0: [ForwardPass(buffer_id=0]", "line 2 "),
            ("step 0: 3", "line 2 "),
            ("nothing", "line 2 "),
        ],
    )
    def test_refuses(self, line: str, text: str) -> None:
        header = format_schedule(ListedSchedule(1, 1, 0, [], num_buffers=1))
        with pytest.raises(ValueError, match=text):
            parse_schedule(header + line + "\n")
        with pytest.raises(ValueError, match="starts with 'schedule micro_batches="):
            parse_schedule("step 0: []\n")


class TestGrid:
    """Who computes when."""

    @pytest.mark.parametrize(("name", "grid"), GRIDS.items())
    def test_grid(self, name: str, grid: str) -> None:
        assert render_grid(simulate(stages_of(name), record=True).spans) == grid

    def test_chunks_are_told_apart(self) -> None:
        result = simulate([make_schedule("interleaved", 2, 1, 0, 2)], record=True)
        assert render_grid(result.spans).startswith("stage 0  | F0-- F0.1 B0.1----- F1-- B0-------")

    def test_uneven_times_do_not_overlap(self) -> None:
        result = simulate(stages_of("1f1b"), CostModel(1, 1.3, 0.9, 0.1), record=True)
        rows = [row.split()[3:] for row in render_grid(result.spans).splitlines()]
        labels = [" ".join(label.rstrip("-") for label in row if label != ".") for row in rows]
        assert labels == ["F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"]


class TestCommand:
    """`python -m deepspeed.runtime.pipe.schedule_text`."""

    def test_numbers(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--schedule", "1f1b", "--stages", "4", "--micro-batches", "8"]) == 0
        output = capsys.readouterr().out
        lines = dict(line.split(":") for line in output.splitlines() if ":" in line)
        assert lines["makespan"].strip() == "33"
        assert lines["bubble fraction"].strip() == "0.2727"
        assert lines["peak activations per stage"].split() == ["4", "3", "2", "1"]
        assert lines["needs asynchronous sends"].strip() == "yes"
        assert output.startswith("stage 0  | F0 F1 F2 F3 .")

    def test_inference_and_chunks(self, capsys: pytest.CaptureFixture[str]) -> None:
        arguments = "--schedule inference --stages 2 --micro-batches 4 --chunks 2"
        assert main(arguments.split()) == 0
        assert "makespan:                   4.5" in capsys.readouterr().out

    def test_marks_what_fails(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--stages", "2", "--micro-batches", "2", "--list"]) == 0
        listed = capsys.readouterr().out
        file = tmp_path / "schedule.txt"
        file.write_text(listed)
        assert main(["--read", str(file)]) == 0
        capsys.readouterr()
        lost = "SendActivation(buffer_id=1, micro_batch=1, chunk=0)"
        assert lost in listed
        file.write_text(listed.replace(lost + ", ", "").replace(lost, ""))
        assert main(["--read", str(file)]) == 1
        output = capsys.readouterr()
        marked = [line for line in output.out.splitlines() if "<-- fails: step" in line]
        assert len(marked) == 2
        assert marked[1].startswith("stage 1  | .  F0 B0---")
        assert "RecvActivation(buffer_id=1, micro_batch=1, chunk=0)" in marked[1]
        assert "deadlock" in output.err

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            (["--schedule", "zero_bubble", "--chunks", "2"], "num_chunks=2"),
            (["--stages", "0"], "--stages 0"),
            (["--micro-batches", "0"], "micro_batches=0"),
            (["--read", "there is no such file"], "no such file"),
        ],
    )
    def test_misused(self, arguments: list[str], text: str, capsys: Any) -> None:
        assert main(arguments) == 2
        assert text in capsys.readouterr().err

    def test_runs_as_a_module(self) -> None:
        command = [sys.executable, "-m", "deepspeed.runtime.pipe.schedule_text"]
        command += "--stages 2 --micro-batches 3".split()
        assert subprocess.check_output(command, text=True).startswith(GRIDS["1f1b"])


class TestPicture:
    """SVG."""

    def test_a_rectangle_per_pass(self) -> None:
        result = simulate(stages_of("1f1b"), record=True)
        root = ElementTree.fromstring(render_svg(result, "a < b & c"))
        space = {"svg": "http://www.w3.org/2000/svg"}
        assert root.findtext("svg:title", namespaces=space) == "a < b & c"
        groups = [group.findall("svg:rect", space) for group in root.findall("svg:g", space)]
        passes = [row for row in groups if row]
        assert [len(row) for row in passes] == [6, 6]
        # B is twice as wide as F.
        widths = [float(rect.get("width", 0)) for rect in passes[0]]
        kinds = [type(span.instruction) for span in result.spans[0]]
        assert dict(zip(kinds, widths, strict=True)) == {ForwardPass: 26.0, BackwardPass: 52.0}

    @pytest.mark.parametrize("name", ["1f1b", "interleaved", "zero_bubble"])
    def test_the_documentation_shows_what_the_printer_draws(self, name: str, tmp_path: Any) -> None:
        file = tmp_path / "schedule.svg"
        assert main(["--schedule", name, "--svg", str(file)]) == 0
        assert file.read_text() == (PICTURES / f"schedule-{name.replace('_', '-')}.svg").read_text()

"""Schedules for people: instruction lists that read back, grids of who computes when as text and as
SVG, and the command for them.

    python -m deepspeed.runtime.pipe.schedule_text --schedule 1f1b --stages 4 --micro-batches 8

Exit code 0: the schedule is right; 1: it has a fault, which the grid marks; 2: wrongly used.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from deepspeed.runtime.pipe import schedule as schedule_module
from deepspeed.runtime.pipe.schedule import (
    SCHEDULE_NAMES,
    BackwardInputPass,
    BackwardPass,
    BackwardWeightPass,
    BufferOpInstruction,
    ForwardPass,
    InferenceSchedule,
    ListedSchedule,
    PipeInstruction,
    PipeSchedule,
    make_schedule,
)
from deepspeed.runtime.pipe.simulator import (
    CostModel,
    Place,
    ScheduleError,
    Simulation,
    Span,
    needs_asynchronous_sends,
    simulate,
)

Spans = Sequence[Sequence[Span]]

FAILED, MISUSED = 1, 2
_KINDS: dict[str, type[PipeInstruction]] = {
    name: kind
    for name, kind in vars(schedule_module).items()
    if isinstance(kind, type) and issubclass(kind, PipeInstruction)
}
# What a schedule is made from, in the order of its first printed line.
_HEADER = ("micro_batches", "stages", "stage_id", "num_buffers", "num_chunks")


class _Look(NamedTuple):
    """How a pass is shown in a grid and in a picture."""

    letter: str
    meaning: str
    fill: str


_LOOKS: dict[type[PipeInstruction], _Look] = {
    ForwardPass: _Look("F", "forward", "#bcd6f7"),
    BackwardPass: _Look("B", "backward", "#b9e3c0"),
    BackwardInputPass: _Look("I", "backward of the input", "#b9e3c0"),
    BackwardWeightPass: _Look("W", "backward of the weights", "#f7dfa8"),
}


def format_schedule(schedule: PipeSchedule) -> str:
    """Print the instructions of one stage, a line per step; `parse_schedule` reads them back."""
    values = (
        schedule.micro_batches,
        schedule.stages,
        schedule.stage_id,
        schedule.num_pipe_buffers(),
        schedule.num_chunks,
    )
    lines = [
        "schedule "
        + " ".join(f"{name}={value}" for name, value in zip(_HEADER, values, strict=True))
    ]
    lines += [f"step {index}: {step}" for index, step in enumerate(schedule.steps())]
    return "\n".join(lines) + "\n"


def parse_schedule(text: str) -> ListedSchedule:
    """Read what `format_schedule` has printed; a ValueError names the line that is not that."""
    lines = [(at, line.strip()) for at, line in enumerate(text.splitlines(), 1) if line.strip()]
    header = lines[0][1] if lines else ""
    pattern = "schedule " + " ".join(rf"{name}=(\d+)" for name in _HEADER)
    match = re.fullmatch(pattern, header)
    if match is None:
        raise ValueError(
            "A printed schedule starts with 'schedule "
            f"{' '.join(f'{name}=...' for name in _HEADER)}', not {header!r}"
        )
    values = dict(zip(_HEADER, map(int, match.groups()), strict=True))
    return ListedSchedule(steps=[_parse_step(number, line) for number, line in lines[1:]], **values)


def parse_schedules(text: str) -> list[ListedSchedule]:
    """Read the printed schedules of several stages."""
    return [
        parse_schedule(part)
        for part in re.split(r"^(?=\s*schedule )", text, flags=re.MULTILINE)
        if part.strip()
    ]


def _parse_step(number: int, line: str) -> list[PipeInstruction]:
    problem = (
        f"line {number} is no step of a schedule, 'step INDEX: [Name(buffer_id=0, ...), ...]': "
        f"{line!r}"
    )
    match = re.fullmatch(r"step \d+: (\[.*\])", line)
    if match is None:
        raise ValueError(problem)
    try:
        calls = ast.parse(match.group(1), mode="eval").body
        return [_parse_instruction(call) for call in getattr(calls, "elts", [calls])]
    except (SyntaxError, TypeError, ValueError) as error:
        raise ValueError(f"{problem} ({error})") from error


def _parse_instruction(call: ast.expr) -> PipeInstruction:
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        raise ValueError("an instruction is Name(key=value, ...)")
    if call.func.id not in _KINDS:
        raise ValueError(
            f"there is no instruction {call.func.id}; there are {', '.join(sorted(_KINDS))}"
        )
    arguments = {
        keyword.arg: ast.literal_eval(keyword.value)
        for keyword in call.keywords
        if keyword.arg is not None
    }
    return _KINDS[call.func.id](**arguments)


def _label(instruction: BufferOpInstruction) -> str:
    """Name a pass: F3 is the forward of micro-batch 3, F3.1 that through chunk 1."""
    chunk = f".{instruction.chunk}" if instruction.chunk else ""
    return f"{_LOOKS[type(instruction)].letter}{instruction.micro_batch}{chunk}"


def _tick(spans: Spans) -> float:
    """The time of one column: the shortest pass that takes any."""
    lengths = [span.end - span.start for row in spans for span in row]
    return min((length for length in lengths if length > 0), default=1.0)


def render_grid(spans: Spans, failing: Sequence[Place] = ()) -> str:
    """Draw who computes when as text: a row per stage, a column per shortest pass, '.' where a
    stage waits, and at the end of a stage's row the places that fail.
    """
    tick = _tick(spans)
    width = 1 + max((len(_label(span.instruction)) for row in spans for span in row), default=1)
    lines = []
    for stage, row in enumerate(spans):
        cells, column = [], 0
        for span in row:
            first = max(column, round(span.start / tick))
            end = max(first + 1, round(span.end / tick))
            cells.append(".".ljust(width) * (first - column))
            cells.append(_label(span.instruction).ljust(width * (end - first) - 1, "-") + " ")
            column = end
        marks = [
            f"<-- fails: step {each.step}, {each.instruction or 'end'}"
            for each in failing
            if each.stage == stage
        ]
        lines.append(" ".join([f"stage {stage:<3}|", "".join(cells), *marks]).rstrip())
    return "\n".join(lines) + "\n"


def render_summary(simulation: Simulation, schedules: Sequence[PipeSchedule]) -> str:
    """Tell makespan, bubble, activations and buffers as text."""
    first = schedules[0]
    asynchronous = "yes" if needs_asynchronous_sends(schedules) else "no"
    rows = (
        ("stages", first.stages),
        ("model chunks per stage", first.num_chunks),
        ("micro-batches", first.micro_batches),
        ("makespan", f"{simulation.makespan:g}"),
        ("bubble fraction", f"{simulation.bubble_fraction:.4f}"),
        (
            "bubble fraction per stage",
            " ".join(f"{each:.4f}" for each in simulation.bubble_fractions),
        ),
        ("peak activations per stage", " ".join(map(str, simulation.peak_activations))),
        ("buffers per stage", " ".join(str(each.num_pipe_buffers()) for each in schedules)),
        ("needs asynchronous sends", asynchronous),
    )
    return "".join(f"{name + ':':<28}{value}\n" for name, value in rows)


_COLUMN, _ROW, _LEFT, _TOP = 26, 28, 72, 40


def render_svg(simulation: Simulation, title: str) -> str:
    """Draw a recorded simulation as a picture, with a legend, makespan and bubble fraction."""
    spans = simulation.spans
    scale = _COLUMN / _tick(spans)
    width = round(_LEFT + simulation.makespan * scale + 16)
    height = _TOP + _ROW * len(spans) + 62
    heading = title.replace("&", "&amp;").replace("<", "&lt;")
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="Helvetica, Arial, sans-serif" font-size="12">',
        f"  <title>{heading}</title>",
        f'  <rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'  <text x="12" y="24" font-size="15" fill="#111111">{heading}</text>',
    ]
    for stage, row in enumerate(spans):
        lines += _svg_row(stage, row, scale, simulation.makespan)
    lines += _svg_legend(simulation, _TOP + _ROW * len(spans))
    return "\n".join([*lines, "</svg>"]) + "\n"


def _svg_row(stage: int, row: Sequence[Span], scale: float, makespan: float) -> list[str]:
    top = _TOP + _ROW * stage
    lines = [
        f'  <text x="12" y="{top + 18}" fill="#222222">stage {stage}</text>',
        f'  <rect x="{_LEFT}" y="{top + 2}" width="{makespan * scale:.1f}" height="{_ROW - 4}" '
        'fill="#f0f0f0"/>',
        '  <g stroke="#555555" stroke-width="0.8">',
    ]
    texts = ['  <g text-anchor="middle" font-size="11" fill="#111111">']
    for span in row:
        left, wide = _LEFT + span.start * scale, (span.end - span.start) * scale
        # Later chunks are paler, so that a micro-batch can be followed through them.
        opacity = 1 / (1 + 0.8 * span.instruction.chunk)
        fill = _LOOKS[type(span.instruction)].fill
        shape = f'x="{left:.1f}" y="{top + 2}" width="{wide:.1f}" height="{_ROW - 4}"'
        lines.append(f'    <rect {shape} fill="{fill}" fill-opacity="{opacity:.2f}"/>')
        texts.append(
            f'    <text x="{left + wide / 2:.1f}" '
            f'y="{top + 18}">{span.instruction.micro_batch}</text>'
        )
    return [*lines, "  </g>", *texts, "  </g>"]


def _svg_legend(simulation: Simulation, top: int) -> list[str]:
    lines, left = [], 12
    used = {type(span.instruction) for row in simulation.spans for span in row}
    for look in (look for kind, look in _LOOKS.items() if kind in used):
        lines.append(
            f'  <rect x="{left}" y="{top + 12}" width="14" height="14" fill="{look.fill}" '
            'stroke="#555555"/>'
        )
        lines.append(f'  <text x="{left + 20}" y="{top + 24}" fill="#222222">{look.meaning}</text>')
        left += 40 + 7 * len(look.meaning)
    peak = max(simulation.peak_activations)
    num_chunks = 1 + max(
        (span.instruction.chunk for row in simulation.spans for span in row), default=0
    )
    unit = "" if num_chunks == 1 else f" of 1/{num_chunks} stage (paler: later chunks)"
    numbers = (
        f"makespan {simulation.makespan:g}, bubble {simulation.bubble_fraction:.1%}, at most "
        f"{peak} activations{unit} held"
    )
    return [*lines, f'  <text x="12" y="{top + 48}" fill="#222222">{numbers}</text>']


# Option -> type, default and what it is; the default is told where there is one.
_OPTIONS: dict[str, tuple[type, int | float | None, str]] = {
    "--stages": (int, 4, "stages of the pipeline"),
    "--micro-batches": (int, 8, "micro-batches per batch"),
    "--chunks": (int, None, "model chunks per stage (default: 2 for interleaved, else 1)"),
    "--forward": (float, 1.0, "time of a forward pass"),
    "--backward-input": (float, 1.0, "time of the gradient of the input"),
    "--backward-weight": (float, 1.0, "time of the gradient of the weights"),
    "--latency": (float, 0.0, "time of a message"),
}


def parser() -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="python -m deepspeed.runtime.pipe.schedule_text",
        description="Print, draw and check a pipeline schedule.",
    )
    names = (*SCHEDULE_NAMES, "inference")
    made.add_argument("--schedule", choices=names, default="1f1b", help="schedule (default: 1f1b)")
    for option, (kind, default, what) in _OPTIONS.items():
        told = what if default is None else f"{what} (default: {default:g})"
        made.add_argument(option, type=kind, default=default, help=told)
    made.add_argument(
        "--read", metavar="FILE", help="check schedules of a file that --list has printed, instead"
    )
    made.add_argument(
        "--list",
        action="store_true",
        help="print the instructions, in the form that --read takes, and nothing else",
    )
    made.add_argument("--svg", metavar="FILE", help="draw the grid")
    return made


def _schedules(arguments: argparse.Namespace) -> Sequence[PipeSchedule]:
    if arguments.read is not None:
        return parse_schedules(Path(arguments.read).read_text(encoding="utf-8"))
    stages, name = arguments.stages, arguments.schedule
    chunks = arguments.chunks if arguments.chunks is not None else 1 + (name == "interleaved")
    if stages < 1:
        raise ValueError(f"--stages {stages}: a pipeline has at least 1 stage")
    make: Callable[..., PipeSchedule] = (
        InferenceSchedule if name == "inference" else partial(make_schedule, name)
    )
    return [make(arguments.micro_batches, stages, stage, chunks) for stage in range(stages)]


def _title(arguments: argparse.Namespace, first: PipeSchedule) -> str:
    name = arguments.read or arguments.schedule
    chunks = f", {first.num_chunks} chunks per stage" if first.num_chunks > 1 else ""
    return f"{name}: {first.stages} stages{chunks}, {first.micro_batches} micro-batches"


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    arguments = parser().parse_args(argv)
    costs = CostModel(
        arguments.forward, arguments.backward_input, arguments.backward_weight, arguments.latency
    )
    try:
        schedules = _schedules(arguments)
        if arguments.list:
            sys.stdout.write("".join(map(format_schedule, schedules)))
            return 0
        simulation = simulate(schedules, costs, record=True)
    except ScheduleError as error:
        sys.stdout.write(render_grid(error.spans, error.places))
        sys.stderr.write(f"{error}\n")
        return FAILED
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return MISUSED
    sys.stdout.write(render_grid(simulation.spans) + "\n" + render_summary(simulation, schedules))
    if arguments.svg is not None:
        Path(arguments.svg).write_text(
            render_svg(simulation, _title(arguments, schedules[0])), encoding="utf-8"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""The command `ds_diff`: in which step two runs part, and by how much two checkpoints differ.

Runs are records of `ds_watch` with digests (`reproducibility.digest_every`), checkpoints tag
folders. Exit code 0: equal; 1: not; 2: they cannot be compared.
"""

from __future__ import annotations

import argparse
import html
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint.files import CheckpointError
from deepspeed.checkpoint.resharding.consolidation import ConsolidatedCheckpoint
from deepspeed.monitor.watch.record import Line, RecordReader, record_at
from deepspeed.utils.reports import page

EQUAL, DIFFERENT, MISUSED = 0, 1, 2
LISTED = 20  # differences in text
EPILOG = """\
  ds_diff logs/two_ranks logs/three_ranks      runs: the first step, and the parameters in it
  ds_diff run1/global_step40 run2/global_step40      checkpoints: how many elements, how far apart
"""


@dataclass(frozen=True)
class Difference:
    """One tensor that is not the same in both."""

    name: str  # of the parameter
    what: str  # "master", a tensor of the optimizer's state, or "digest" where only that is known
    elements: int = 0
    of: int = 0
    ulp: int = 0  # largest distance, in units of the last place
    first: int = 0  # number of the first such element
    text: str = ""  # what is to be said instead of numbers


@dataclass
class Comparison:
    """What was found."""

    left: str
    right: str
    compared: str  # of what it was
    step: int | None = None  # the first step in which runs differ
    differences: list[Difference] = field(default_factory=list)
    steps: list[tuple[int, bool]] = field(default_factory=list)  # of runs: step, and if equal

    @property
    def exit_code(self) -> int:
        return DIFFERENT if self.differences else EQUAL


class Misuse(Exception):
    """What was given cannot be compared."""


def ulp_distance(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Count, for each element of two floating tensors of one dtype, the numbers between them: int64
    of the same shape.
    """
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[left.element_size()]
    sign = torch.iinfo(bits).min

    def ordered(values: torch.Tensor) -> torch.Tensor:
        # Of negative numbers the bits count away from zero; both zeros become 0.
        whole = values.contiguous().view(bits)
        return torch.where(whole < 0, sign - whole, whole).to(torch.int64)

    return (ordered(left) - ordered(right)).abs()


def _tensor_difference(
    name: str, what: str, left: torch.Tensor, right: torch.Tensor
) -> Difference | None:
    if left.shape != right.shape or left.dtype != right.dtype:
        told = f"{left.dtype} {tuple(left.shape)} and {right.dtype} {tuple(right.shape)}"
        return Difference(name, what, text=told)
    flat = [value.contiguous().reshape(-1) for value in (left, right)]
    as_bits = [value.view(torch.uint8).view(value.numel(), -1) for value in flat]
    unequal = (as_bits[0] != as_bits[1]).any(dim=1).nonzero().reshape(-1)
    if not unequal.numel():
        return None
    ulp = 0
    if left.is_floating_point():
        ulp = int(ulp_distance(flat[0][unequal], flat[1][unequal]).max())
    return Difference(name, what, unequal.numel(), left.numel(), ulp, int(unequal[0]))


# Checkpoints


def compare_checkpoints(left: Path, right: Path) -> Comparison:
    """Compare masters, optimizer state and steps of every parameter, bit by bit."""
    states = [ConsolidatedCheckpoint(str(folder), {}) for folder in (left, right)]
    found = Comparison(str(left), str(right), "checkpoints")
    names = [set(state.names()) for state in states]
    for name in sorted(names[0] | names[1]):
        if name not in names[0] & names[1]:
            told = f"only in {left if name in names[0] else right}"
            found.differences.append(Difference(name, "parameter", text=told))
            continue
        found.differences += _differences_of(name, *states)
    return found


def _differences_of(
    name: str, left: ConsolidatedCheckpoint, right: ConsolidatedCheckpoint
) -> Iterator[Difference]:
    slots = [set(state.slots(name)) for state in (left, right)]
    for slot in sorted(slots[0] ^ slots[1]):
        yield Difference(name, slot, text="only in one of them")
    for slot in sorted(slots[0] & slots[1]):
        pairs = zip(left.slices(name, slot), right.slices(name, slot), strict=True)
        for one, other in pairs:
            difference = _tensor_difference(name, slot, one, other)
            if difference is not None:
                yield difference
    shared = [dict(state.shared(name)) for state in (left, right)]
    for key in sorted(shared[0].keys() & shared[1].keys()):
        values = [float(each[key]) for each in shared]
        if values[0] != values[1]:
            yield Difference(name, key, text=f"{values[0]:g} and {values[1]:g}")


# Runs


def digests_of(record: Path) -> dict[int, Line]:
    """The lines with digests, by step; of a step that was taken twice the last."""
    lines = RecordReader(record).new_lines()
    return {line["step"]: line for line in lines if "digests" in line}


def compare_runs(left: Path, right: Path) -> Comparison:
    """Compare digests, and mean losses of all ranks, of the steps that both have."""
    runs = [digests_of(record) for record in (left, right)]
    common = sorted(runs[0].keys() & runs[1].keys())
    if not common:
        steps = " and ".join(
            f"{record} has digests of {len(run)} steps"
            for record, run in zip((left, right), runs, strict=True)
        )
        raise Misuse(
            f"{steps}, none of them the same: set reproducibility.digest_every, with watch.enabled"
        )
    found = Comparison(str(left), str(right), "runs")
    for step in common:
        differences = list(_line_differences(*(run[step] for run in runs)))
        found.steps.append((step, not differences))
        if differences and found.step is None:
            found.step, found.differences = step, differences
    return found


def _line_differences(left: Line, right: Line) -> Iterator[Difference]:
    digests = [line["digests"] for line in (left, right)]
    for name in sorted(digests[0].keys() | digests[1].keys()):
        if digests[0].get(name) != digests[1].get(name):
            yield Difference(name, "digest", text="masters or optimizer state")
    # A loss is that of rank 0 alone, or rounded by the script, where it is not said of how many.
    compared = ["loss"] if left.get("losses", 0) == right.get("losses") else []
    if digests[0] != digests[1]:
        compared.append("norm")
    for key in compared:
        if key in left and key in right and left[key] != right[key]:
            yield Difference(key, key, text=f"{left[key]!r} and {right[key]!r}")


# What is told


def text_of(found: Comparison) -> str:
    """Lines for a terminal."""
    if not found.differences:
        of_steps = f", {len(found.steps)} steps with digests" if found.steps else ""
        return f"equal: {found.left} and {found.right}{of_steps}\n"
    where = f" in step {found.step}" if found.step is not None else ""
    lines = [f"different{where}: {found.left} and {found.right}"]
    lines += [f"  {told(each)}" for each in found.differences[:LISTED]]
    rest = len(found.differences) - LISTED
    return "\n".join([*lines, *([f"  and {rest} more"] if rest > 0 else [])]) + "\n"


def told(difference: Difference) -> str:
    """One difference in words."""
    if difference.text:
        return f"{difference.name} ({difference.what}): {difference.text}"
    return (
        f"{difference.name} ({difference.what}): {difference.elements} of {difference.of} "
        f"elements, up to {difference.ulp} units in the last place, first element "
        f"{difference.first}"
    )


def page_of(found: Comparison) -> str:
    """An HTML page: what differs, drawn, and told."""
    if found.steps:
        bars = [(f"step {step}", 1.0, equal) for step, equal in found.steps]
        note = "Steps, red where runs differ."
    else:
        bars = [(told(e), e.elements / e.of if e.of else 1.0, False) for e in found.differences]
        note = "Tensors that differ, as high as the share of their elements that do."
    rows = "".join(f"<li>{html.escape(told(each))}</li>" for each in found.differences)
    head = html.escape(text_of(found).splitlines()[0])
    picture = f'{_drawn(bars)}<p class="quiet">{note}</p>' if bars else ""
    return page("ds_diff", f"<h1>{head}</h1>{picture}<ul>{rows}</ul>")


def _drawn(bars: list[tuple[str, float, bool]]) -> str:
    """Bars beside one another, whose heights are shares; good ones and bad ones."""
    width = 900 / len(bars)
    drawn = "".join(
        f'<rect x="{number * width:.2f}" y="{40 - height:.2f}" width="{width:.2f}" '
        f'height="{height:.2f}" fill="var(--{"good" if good else "bad"})">'
        f"<title>{html.escape(text)}</title></rect>"
        for number, (text, share, good) in enumerate(bars)
        for height in [2 + 38 * share]
    )
    size = 'viewBox="0 0 900 40" width="100%" height="60" preserveAspectRatio="none"'
    return f"<svg {size}>{drawn}</svg>"


# The command


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="ds_diff",
        description="Tell in which step two runs part, or by how much two checkpoints differ.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    text = "folder or file of a record of ds_watch, or a checkpoint's tag folder"
    made.add_argument("left", metavar="RUN_A", help=text)
    made.add_argument("right", metavar="RUN_B", help=text)
    made.add_argument("--json", metavar="FILE", help="write what was found as JSON")
    made.add_argument("--page", metavar="FILE", help="write it as a page with a picture")
    return made


def compare(left: Path, right: Path) -> Comparison:
    """Compare two runs or two checkpoints; `Misuse` if they are neither."""
    records = [record_at(path) for path in (left, right)]
    if records[0] is not None and records[1] is not None:
        return compare_runs(records[0], records[1])
    for path in (left, right):
        if not path.is_dir():
            raise Misuse(f"{path}: neither a record of ds_watch nor a checkpoint's folder")
    try:
        return compare_checkpoints(left, right)
    except (CheckpointError, OSError) as error:
        raise Misuse(str(error)) from error


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    arguments = parser().parse_args(argv)
    try:
        found = compare(Path(arguments.left), Path(arguments.right))
    except Misuse as error:
        sys.stderr.write(f"ds_diff: {error}\n")
        return MISUSED
    sys.stdout.write(text_of(found))
    content: dict[str, Any] = {**asdict(found), "equal": not found.differences}
    for path, text in (
        (arguments.json, json.dumps(content, indent=1)),
        (arguments.page, page_of(found)),
    ):
        if path:
            Path(path).write_text(text, encoding="utf-8")
    return found.exit_code


def command() -> None:
    """Entry point of the command."""
    raise SystemExit(main())

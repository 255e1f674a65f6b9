"""A run's record: one JSON object per line, appended and never changed.

The first line says what run it is (`watch`: version of the format, `began`: seconds since 1970, and
settings), then come steps (`step`, and what is listed in docs/monitoring.md), values of scripts
(`event`, `value`, `at`) and at last `ended`. Numbers that are not finite are the texts "nan", "inf"
and "-inf", for which JSON has no number. A line that a killed run has left unfinished is no line.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any, TextIO

FORMAT = 1
Line = dict[str, Any]
_NAME = re.compile(r"run-(\d+)\.jsonl")


def records_in(folder: Path) -> list[Path]:
    """The records in a folder, oldest first."""
    matches = [(_NAME.fullmatch(path.name), path) for path in folder.iterdir()]
    found = [(int(match[1]), path) for match, path in matches if match]
    return [path for _, path in sorted(found)]


def record_at(path: Path) -> Path | None:
    """The record that a path names: itself, or the newest of a folder; None: there is none."""
    if path.is_file():
        return path
    records = records_in(path) if path.is_dir() else []
    return records[-1] if records else None


def new_record(folder: Path) -> TextIO:
    """A file for one more run of a folder, which is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    number = 0
    if records := records_in(folder):
        number = int(_NAME.fullmatch(records[-1].name)[1])  # type: ignore[index]  # it matched
    while True:
        number += 1
        try:
            return open(folder / f"run-{number:04d}.jsonl", "x", encoding="utf-8")
        except FileExistsError:  # of a run that began in this moment
            continue


def encoded(line: Mapping[str, Any]) -> str:
    """A line of a record, with its end."""
    return json.dumps(_plain(line), allow_nan=False, separators=(",", ":")) + "\n"


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


class RecordReader:
    """Reads a record from its beginning, and later what was added."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.unreadable = 0  # whole lines so far that are no JSON object; they are left out
        self._position = 0

    def new_lines(self) -> list[Line]:
        """The lines that have been added, without one that is being written."""
        with open(self.path, "rb") as file:
            file.seek(self._position)
            added = file.read()
        whole = added[: added.rfind(b"\n") + 1]
        self._position += len(whole)
        decoded = [_decoded(text) for text in whole.splitlines()]
        lines = [line for line in decoded if line is not None]
        self.unreadable += len(decoded) - len(lines)
        return lines


def _decoded(text: bytes) -> Line | None:
    try:
        line = json.loads(text)
    except ValueError:  # no JSON, or no UTF-8
        return None
    return line if isinstance(line, dict) else None


def run_before(path: Path) -> Path | None:
    """Find the record of the run before: in the same folder, else in those beside it."""
    # By number, not by name: the ten-thousandth has a longer one.
    earlier = list(takewhile(lambda record: record.name != path.name, records_in(path.parent)))
    if earlier:
        return earlier[-1]
    began = _began(path)
    beside = [
        (other, record)
        for folder in path.resolve().parent.parent.iterdir()
        if folder.is_dir() and folder != path.resolve().parent
        for record in records_in(folder)[-1:]
        if (other := _began(record)) < began
    ]
    return max(beside)[1] if beside else None


def _began(path: Path) -> float:
    with open(path, "rb") as file:
        line = _decoded(file.readline()) or {}
    return float(line.get("began", math.inf))

"""The command `ds_watch`: draws the page of a run from its record.

Exit code 0: the page is written; 2: the command was used wrongly.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from deepspeed.monitor.watch.monitor import write_page
from deepspeed.monitor.watch.page import PAGE_NAME, render
from deepspeed.monitor.watch.record import RecordReader, record_at, run_before
from deepspeed.monitor.watch.run import Run

MISUSED = 2
EPILOG = """\
RUN_DIR is output_path/job_name of the configuration's watch block; see docs/monitoring.md.

  ds_watch logs/run1
  ds_watch logs/run1 --before logs/baseline --follow
"""


class Misuse(Exception):
    """What the command was given does not make sense."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="ds_watch",
        description="Draw a run and the run before it as one HTML file, which loads nothing.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    text = "folder of records, of which the newest is drawn, or a record"
    add("run", metavar="RUN_DIR", help=text)
    text = "what to show beside it (default: the run before)"
    add("--before", metavar="RUN_DIR", help=text)
    add("--output", metavar="FILE", help=f"default: {PAGE_NAME} beside the record")
    text = "draw again whenever the record grows, to its end"
    add("--follow", action="store_true", help=text)
    text = "seconds between two drawings (2)"
    add("--every", metavar="S", type=float, default=2.0, help=text)
    return made


def find_record(given: str) -> Path:
    """The record that an argument names: itself, or the newest of a folder."""
    record = record_at(Path(given))
    if record is None:
        named = "output_path/job_name of the configuration's watch block, or a file run-NNNN.jsonl"
        raise Misuse(f"{given}: no record of a run there; give {named}")
    return record


class Watcher:
    """One record, its page, and what is beside it."""

    def __init__(self, record: Path, before: Path | None, output: Path, refresh_s: float) -> None:
        self._reader = RecordReader(record)
        self._before = None if before is None else Run.of_record(before)
        self._output = output
        self._refresh_s = refresh_s
        self.run = Run()

    def look(self) -> bool:
        """Draw the page if the record has grown; whether it has."""
        lines = self._reader.new_lines()
        for line in lines:
            self.run.add(line)
        if lines:
            text = render(self.run, self._before, self._refresh_s, self._reader.unreadable)
            write_page(self._output, text)
        return bool(lines)


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    arguments = parser().parse_args(argv)
    try:
        record = find_record(arguments.run)
        before = find_record(arguments.before) if arguments.before else run_before(record)
        if arguments.every <= 0:
            raise Misuse(f"--every {arguments.every:g}: give a positive number of seconds")
        output = Path(arguments.output) if arguments.output else record.with_name(PAGE_NAME)
        if not output.resolve().parent.is_dir():
            raise Misuse(f"--output {output}: there is no folder {output.resolve().parent}")
    except Misuse as error:
        sys.stderr.write(f"ds_watch: {error}\n")
        return MISUSED
    watcher = Watcher(record, before, output, arguments.every)
    watcher.look()
    beside = "the first run here" if before is None else f"beside it {before}"
    sys.stdout.write(f"{output}: {record}, {watcher.run.steps} steps; {beside}\n")
    try:
        while arguments.follow and watcher.run.ended is None:
            time.sleep(arguments.every)
            watcher.look()
    except KeyboardInterrupt:  # the way to end it while the run goes on
        pass
    return 0


def command() -> None:
    """Entry point of the command."""
    raise SystemExit(main())

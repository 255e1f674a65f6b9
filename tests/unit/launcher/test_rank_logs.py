"""What the launcher shows of processes' output: read through real pipes, without processes."""

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from unit.launcher.starting import until

from deepspeed.launcher.logs import RankLogs


class Screen:
    """Stands in for sys.stdout or sys.stderr and keeps what is written."""

    def __init__(self) -> None:
        self.buffer = io.BytesIO()

    @property
    def text(self) -> str:
        return self.buffer.getvalue().decode()


Screens = tuple[Screen, Screen]


@pytest.fixture
def screens(monkeypatch: pytest.MonkeyPatch) -> Screens:
    screens = Screen(), Screen()
    for name, screen in zip(("stdout", "stderr"), screens, strict=True):
        monkeypatch.setattr(sys, name, screen)
    return screens


@pytest.fixture
def logs(tmp_path: Path, screens: Screens) -> Iterator[RankLogs]:
    logs = RankLogs(tmp_path, [0, 1])
    logs.start()
    yield logs
    logs.stop()


def write(path: Path, data: bytes) -> None:
    with open(path, "wb", buffering=0) as pipe:
        pipe.write(data)


def test_lines_carry_their_rank(logs: RankLogs, screens: Screens) -> None:
    write(logs.stdout_path(1), b"one\n\ntwo\n")
    write(logs.stderr_path(0), b"warn\n")
    logs.stop()
    assert screens[0].text == "[rank1]: one\n\n[rank1]: two\n"
    assert screens[1].text == "[rank0]: warn\n"
    assert list(logs.history[0].stderr_tail) == [b"warn"]


def test_progress_bars_stay_on_one_line(logs: RankLogs, screens: Screens) -> None:
    write(logs.stderr_path(0), b"\r10%\r20%\r30%\n")
    logs.stop()
    assert screens[1].text == "\r[rank0]: 10%\r[rank0]: 20%\r[rank0]: 30%\n"


def test_a_prefix_of_torchs_is_not_doubled(logs: RankLogs, screens: Screens) -> None:
    said = b"[rank1]: Traceback (most recent call last):\n[rank1]: ValueError\n"
    write(logs.stderr_path(1), said)
    logs.stop()
    assert screens[1].text.count("[rank1]: ") == 2
    assert logs.history[1].traceback_at is not None


def test_nothing_is_lost_at_the_end(logs: RankLogs, screens: Screens) -> None:
    write(logs.stdout_path(0), b"x" * 60000 + b"\nunfinished")
    write(logs.stdout_path(1), b"also unfinished")
    logs.stop()
    lines = ["[rank0]: unfinished", "[rank0]: " + "x" * 60000, "[rank1]: also unfinished"]
    assert sorted(screens[0].text.splitlines()) == lines


def test_an_unfinished_line_is_shown_when_alone(logs: RankLogs, screens: Screens) -> None:
    write(logs.stdout_path(0), b"continue? ")
    until(lambda: screens[0].text == "[rank0]: continue? ")
    write(logs.stdout_path(0), b"yes\n")
    until(lambda: screens[0].text == "[rank0]: continue? yes\n")


def test_no_rank_writes_into_anothers_line(logs: RankLogs, screens: Screens) -> None:
    write(logs.stdout_path(0), b"half")
    until(lambda: "half" in screens[0].text)
    write(logs.stdout_path(1), b"whole\n")
    until(lambda: "whole" in screens[0].text)
    write(logs.stdout_path(0), b" rest\n")
    logs.stop()
    assert screens[0].text == "[rank0]: half\n[rank1]: whole\n[rank0]:  rest\n"


def test_each_rank_gets_its_file(tmp_path: Path, screens: Screens) -> None:
    # Kills: a line that one rank has left unfinished ended in another rank's file.
    logs = RankLogs(tmp_path, [0, 1], log_dir=str(tmp_path / "logs"))
    files = [next((tmp_path / "logs").glob(f"*_rank{rank}.log")) for rank in (0, 1)]
    logs.start()
    write(logs.stdout_path(0), b"half")
    until(lambda: files[0].read_bytes() == b"half")
    write(logs.stdout_path(1), b"out\n")
    until(lambda: files[1].read_bytes() != b"")
    write(logs.stdout_path(0), b" rest\n")
    until(lambda: files[0].read_bytes().endswith(b"rest\n"))
    write(logs.stderr_path(0), b"end\n")
    logs.stop()
    assert [file.read_bytes() for file in files] == [b"half rest\nend\n", b"out\n"]
    assert screens[0].text == ""


PYTHON = [sys.executable, "-S", "-c"]


def test_the_end_of_a_process_is_noticed_without_reaping_it(logs: RankLogs) -> None:
    process = subprocess.Popen([*PYTHON, "raise SystemExit(7)"])
    write(logs.control_path, f"1 {process.pid} 1\n".encode())
    until(lambda: logs.history[1].exited_at is not None)
    assert logs.history[1].pid == process.pid
    assert process.wait() == logs.history[1].code == 7


def test_a_process_that_its_parent_has_reaped_first_has_no_code(logs: RankLogs) -> None:
    process = subprocess.Popen([*PYTHON, "import time; time.sleep(600)"])
    write(logs.control_path, f"1 {process.pid} 1\n".encode())
    until(lambda: logs.history[1].pid is not None)
    with patch.object(os, "waitid", side_effect=ChildProcessError):
        process.kill()
        until(lambda: logs.history[1].exited_at is not None)
    assert logs.history[1].code is None
    assert process.wait() == -9

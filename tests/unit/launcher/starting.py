"""Starts launchers in a folder of their own, reads what is said, waits."""

import json
import os
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from unit.common import python_path
from unit.launcher import forked

ROOT = Path(__file__).resolve().parents[3]
RUNNER = "deepspeed.launcher.runner"
TIMEOUT = 120.0
SHOW = """
import json, os, sys
seen = {**os.environ, "argv": sys.argv[1:], "cores": sorted(os.sched_getaffinity(0))}
if "MARK_FD" in os.environ:
    seen["descriptor"] = os.fdopen(int(os.environ["MARK_FD"])).read()
print(json.dumps(seen))
"""
Process = subprocess.Popen[str]


def free_pair() -> int:
    """A port that is free, and the next one too."""
    while True:
        with socket.create_server(("", 0)) as first:
            port = int(first.getsockname()[1])
            try:
                socket.create_server(("", port + 1)).close()
            except (OSError, OverflowError):
                continue
            return port


def until(condition: Callable[[], object], seconds: float = TIMEOUT, say: Any = str) -> None:
    """Wait for what comes soon; `say` gives the words of the failure."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, say()
        time.sleep(0.005)


def start(
    folder: Path,
    *words: str,
    module: str = RUNNER,
    is_forked: bool = False,
    output: int | IO[Any] = subprocess.PIPE,
    variables: dict[str, str | None],
    **how: Any,
) -> Process:
    """A module as a program in `folder`, with `variables`, of which None are taken away."""
    given = {
        **os.environ,
        **{"PYTHONPATH": python_path(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        **{"TMPDIR": str(folder), **variables},
    }
    how.update(cwd=folder, env={name: value for name, value in given.items() if value is not None})
    how.update(stdin=subprocess.DEVNULL, stdout=output, stderr=output, text=True)
    begin = forked.start if is_forked else subprocess.Popen
    return begin([sys.executable, "-m", module, *words], **how)


class Commands:
    """Programs in one folder; those that still run at the end of the block are killed."""

    def __init__(self, folder: Path, is_forked: bool = False, **variables: str | None) -> None:
        self.folder, self.is_forked, self.variables = folder, is_forked, variables
        self.processes: list[Process] = []

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *raised: object) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()

    def script(self, text: str, name: str = "script.py") -> str:
        """Write a program into the folder."""
        path = self.folder / name
        path.write_text(textwrap.dedent(text).lstrip())
        path.chmod(0o755)
        return str(path)

    def start(self, *words: str, **how: Any) -> Process:
        how = {"is_forked": self.is_forked, "variables": self.variables, **how}
        self.processes.append(start(self.folder, *words, **how))
        return self.processes[-1]

    def run(self, *words: str, **how: Any) -> tuple[int, str, str]:
        """The exit code and both outputs."""
        process = self.start(*words, **how)
        out, err = process.communicate(timeout=TIMEOUT)
        return process.returncode, out, err


def shown(output: str) -> dict[int, dict[str, Any]]:
    """The JSON that ranks printed, by the rank that the launcher put before the line."""
    lines = [line for line in output.splitlines() if line.startswith("[rank")]
    return {int(line[5 : line.index("]")]): json.loads(line.partition(": ")[2]) for line in lines}

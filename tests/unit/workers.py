"""Spreads the tests of a folder over the cores by pytest-xdist, if installed; a pytest plugin.

A run of one file, with a debugger, or with `-n 0` stays in one process: starting workers takes as
long as a small file. Each worker has a rank template of its own (`rank_server`).
"""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

# Ranks of a test are processes too, so more workers than this only wait for each other.
MAX_WORKERS = 8
# Many tests wait: for time limits, for launchers, for processes that start. Engines' do not.
FOR_THOSE_THAT_WAIT, ENGINES = 1, "v1"
# Files whose tests look at what one fixture of the file has taken long to make.
KEPT_WHOLE = ("/clients/test_", "/test_packaging.py")
# Without it each of a thousand processes compiles the package, and each worker its tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def num_workers(config: pytest.Config) -> int:
    """How many processes share the tests; 0 for this one alone."""
    paths = [Path(argument.partition("::")[0]) for argument in config.args]
    if len(paths) == 1 and paths[0].is_file():
        return 0
    cores = len(os.sched_getaffinity(0))
    waiting = 0 if all(ENGINES in path.parts for path in paths) else FOR_THOSE_THAT_WAIT
    return min(cores + waiting, MAX_WORKERS) if cores > 1 else 0


def unit_of(nodeid: str) -> str:
    """What of a test's name runs on one worker: its class or file, or all of it."""
    path, _, name = nodeid.partition("::")
    if path.startswith("tests/style"):  # each process parses all files for itself
        return "tests/style"
    if any(part in f"/{path}" for part in KEPT_WHOLE):
        return path
    owner, _, _ = name.partition("[")[0].rpartition("::")
    return f"{path}::{owner}" if owner else nodeid


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Before xdist reads its options: choose what the command line leaves open."""
    option = config.option
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    if is_worker or not config.pluginmanager.hasplugin("xdist"):
        return
    watched = option.usepdb or option.collectonly or option.capture == "no"
    if option.numprocesses is None and option.dist == "no" and not watched:
        option.numprocesses = num_workers(config)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand out tests unit by unit, the largest first, unless the command line says how."""
    if config.option.dist != "load":
        return None
    # optional: xdist calls this, so it is there
    from xdist.scheduler import LoadScopeScheduling

    class LoadUnitScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

    return LoadUnitScheduling(config, log)

"""Spreads the tests of a folder over the cores by pytest-xdist, where that is installed.

A run of one file, with a debugger, or with `-n 0` stays in one process: starting workers
takes as long as a small file. Each worker has a rank template of its own (`rank_server`).

This module is a pytest plugin: ``tests/unit/conftest.py`` imports its hooks.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Ranks of a test are processes too, so more workers than this only wait for each other.
MAX_WORKERS = 8


def num_workers(config: pytest.Config) -> int:
    """How many processes share the tests; 0 for this one alone."""
    paths = [Path(argument.partition("::")[0]) for argument in config.args]
    if len(paths) == 1 and paths[0].is_file():
        return 0
    cores = len(os.sched_getaffinity(0))
    return min(cores, MAX_WORKERS) if cores > 1 else 0


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Before xdist reads its options: choose what the command line leaves open."""
    option = config.option
    is_worker = hasattr(config, "workerinput")
    if is_worker or not config.pluginmanager.hasplugin("xdist"):
        return
    watched = option.usepdb or option.collectonly or option.capture == "no"
    if option.numprocesses is None and option.dist == "no" and not watched:
        option.numprocesses = num_workers(config)
    if option.numprocesses and option.dist == "no":
        option.dist = "loadgroup"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of a class together: its fixtures and its folder are made once. Tests that
    share a module's fixture say so by `pytest.mark.xdist_group`.
    """
    for item in items:
        if getattr(item, "cls", None) is not None and not item.get_closest_marker("xdist_group"):
            name = item.nodeid.rpartition("::")[0].partition("[")[0]
            item.add_marker(pytest.mark.xdist_group(name))

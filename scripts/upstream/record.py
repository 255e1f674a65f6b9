"""A pytest plugin for tests that come with a checkout, under their own harness: it writes down when a
test begins and how it has ended, and runs those that it is asked for until its time is over.

Its settings come from the environment, which the processes of any harness have:
``UPSTREAM_RECORD`` is the file that it writes, a JSON list per line, ``[test]`` for one that begins
and ``[test, outcome, seconds]`` for one that has ended; ``UPSTREAM_ONLY`` has the names of the tests
to run, a JSON list (none: all); ``UPSTREAM_SECONDS`` the time after which no test begins.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

_BEGIN = time.monotonic()
_outcomes: dict[str, str] = {}


def _write(*values: str | float) -> None:
    with Path(os.environ["UPSTREAM_RECORD"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(values) + "\n")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what is not asked for."""
    only = set(json.loads(os.environ.get("UPSTREAM_ONLY", "[]")))
    if only:
        items[:] = [item for item in items if item.nodeid in only]


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that cannot be imported has failed."""
    if report.outcome == "failed":
        _write(report.nodeid, "failed", 0.0)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep the worst of setup, call and teardown."""
    if report.when == "call" or report.outcome != "passed":
        if _outcomes.get(report.nodeid) != "failed":
            _outcomes[report.nodeid] = report.outcome


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Write down the beginning and the end."""
    begin = time.monotonic()
    _write(item.nodeid)
    result = yield
    _write(item.nodeid, _outcomes.get(item.nodeid, "failed"), time.monotonic() - begin)
    limit_s = float(os.environ.get("UPSTREAM_SECONDS", "inf"))
    if time.monotonic() - _BEGIN > limit_s:
        item.session.shouldstop = "no time is left"
    return result

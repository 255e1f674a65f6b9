"""A pytest plugin that tells how each test has ended, counts by file, and hands the counts over when
a file has come to its end.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

GIVEN_UP = "did not end within"
"""What the harness says of ranks that it has given up."""


class Tally:
    """Counts.

    Args:
        keep: Is called for each file with its path and its counts: ``passed``, ``failed``,
            ``skipped`` and ``given_up``.
        tell: Is called for each test with its name, its outcome and its seconds.
    """

    def __init__(
        self,
        keep: Callable[[Path, dict[str, int]], None],
        tell: Callable[[str, str, float], None] = lambda test, outcome, seconds: None,
    ) -> None:
        self._keep = keep
        self._tell = tell
        self._outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the worst of setup, call and teardown."""
        if report.when != "call" and report.outcome == "passed":
            return
        outcome: str = report.outcome
        if outcome == "failed" and GIVEN_UP in report.longreprtext:
            outcome = "given_up"
        if self._outcomes.get(report.nodeid) not in ("failed", "given_up"):
            self._outcomes[report.nodeid] = outcome

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, Any, Any]:
        """Tell the outcome; after the last test of a file hand its counts over."""
        begin = monotonic()
        result = yield
        name = f"{item.path.name}::{item.nodeid.partition('::')[2]}"
        self._tell(name, self._outcomes.get(item.nodeid, "no outcome"), monotonic() - begin)
        if nextitem is None or nextitem.path != item.path:
            counts = dict.fromkeys(("passed", "failed", "skipped", "given_up"), 0)
            for outcome in self._outcomes.values():
                counts[outcome] += 1
            self._outcomes.clear()
            self._keep(item.path, counts)
        return result

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported has failed."""
        if report.outcome == "failed":
            self._keep(Path(report.fspath), {"failed": 1})

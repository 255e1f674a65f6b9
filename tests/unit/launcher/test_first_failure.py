"""Which rank is blamed, and what is shown of it: pure decisions over what was seen of each
process.
"""

import signal

import pytest

from deepspeed.launcher.failures import describe_exit, first_failure
from deepspeed.launcher.logs import RankHistory


def seen(exited_at: float | None, traceback_at: float | None = None) -> RankHistory:
    return RankHistory(pid=1, exited_at=exited_at, traceback_at=traceback_at)


@pytest.mark.parametrize(
    ("codes", "history", "rank"),
    [
        pytest.param({0: 1, 1: 1}, [seen(2.0), seen(1.0)], 1, id="ended-first"),
        pytest.param(
            {0: 1, 1: 1}, [seen(5.0, 4.9), seen(5.2, 4.0)], 1, id="raised-first-but-slow-to-end"
        ),
        pytest.param(
            {0: 1, 1: -15}, [seen(5.0, 4.9), seen(5.2, 4.0)], 1, id="raised-then-ended-by-agent"
        ),
        pytest.param(
            {0: 1, 1: 3}, [seen(50.0, 49.9), seen(49.8)], 1, id="silent-death-before-a-traceback"
        ),
        pytest.param(
            {0: -15, 1: 3}, [seen(50.1, 2.0), seen(50.0)], 1, id="old-traceback-was-handled"
        ),
        pytest.param({0: -15, 1: 3}, [seen(None), seen(None)], 1, id="no-times-known"),
        pytest.param({0: -15, 1: -9}, [seen(50.1), seen(50.0)], 1, id="killed"),
    ],
)
def test_first_failure(codes: dict[int, int], history: list[RankHistory], rank: int) -> None:
    assert first_failure(codes, history) == rank


def test_last_traceback_keeps_its_chain() -> None:
    history = RankHistory()
    old = [b"Traceback (most recent call last):", b"KeyError: handled long ago", b"other output"]
    cause = [b"Traceback (most recent call last):", b"  File x", b"ValueError: cause", b""]
    link = [b"During handling of the above exception, another exception occurred:", b""]
    effect = [b"Traceback (most recent call last):", b"RuntimeError: effect"]
    history.stderr_tail.extend([*old, *cause, *link, *effect])
    assert history.last_traceback() == [*cause, *link, *effect]


def test_without_a_traceback_the_last_lines_are_shown() -> None:
    history = RankHistory()
    history.stderr_tail.extend(f"line {number}".encode() for number in range(50))
    assert history.last_traceback() == [f"line {number}".encode() for number in range(30, 50)]


def test_describe_exit() -> None:
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-signal.SIGKILL) == "signal SIGKILL (9)"
    assert describe_exit(-63) in ("signal 63", "signal SIGRTMAX-1 (63)")

"""Which rank is blamed, and what is shown of it: decisions, and a share of the campaign's."""

import signal
from pathlib import Path

import pytest
from unit.launcher.blame import Round, hearing_hangups, play

from deepspeed.launcher.failures import (
    End,
    Exit,
    cause_of,
    describe_exit,
    ends_of,
    failed_before,
    make_failure,
)
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
        # Kills: the first traceback as the cause: connections of the killed close before its end.
        pytest.param({0: -15, 1: -9}, [seen(50.3, 49.9), seen(50.0)], 1, id="peer-of-killed"),
        pytest.param({0: 1, 1: -9}, [seen(50.3, 49.9), seen(50.4)], 1, id="killed-is-slow-to-go"),
        pytest.param({0: 1, 1: -9}, [seen(50.0, 49.9), seen(56.0)], 0, id="killed-much-later"),
        pytest.param({0: -6, 1: -9}, [seen(50.3), seen(50.4)], 1, id="killed-and-peer-aborts"),
        pytest.param({0: -15, 1: -6}, [seen(50.3, 49.9), seen(50.0)], 1, id="peer-of-aborted"),
        pytest.param({0: 1, 1: -11}, [seen(50.3, 49.9), seen(50.0)], 1, id="peer-of-crashed"),
        pytest.param({0: 1, 1: -6}, [seen(50.3, 49.9), seen(50.4)], 0, id="aborted-after-an-end"),
        pytest.param({0: -15, 1: -15}, [seen(50.3, 49.9), seen(50.0)], 1, id="terminated-by-user"),
        pytest.param({0: -15, 1: -9}, [seen(50.3, 49.9), seen(None)], 1, id="killed-as-it-began"),
        pytest.param({0: -15, 1: -9}, [seen(50.3), seen(None)], 1, id="killed-before-its-id"),
        pytest.param({0: -15, 1: 1}, [seen(50.3), seen(None)], 1, id="ended-before-its-id"),
        pytest.param({0: -6, 1: -11}, [seen(50.3, 49.9), seen(50.0)], 1, id="raises-then-aborts"),
    ],
)
def test_the_cause(codes: dict[int, int], history: list[RankHistory], rank: int) -> None:
    ends = ends_of(codes, history)
    assert list(ends)[cause_of(list(ends.values()))] == rank
    failure = make_failure({rank: Exit(1, code) for rank, code in codes.items()}, history)
    code = codes[rank]
    raised = code == -signal.SIGTERM and history[rank].exited_at != 50.0
    assert failure.code == (1 if raised else 128 - code if code < 0 else code)
    assert failure.how == ("an exception" if raised else describe_exit(code))


def test_an_abort_that_speaks_of_a_lost_peer_is_no_cause() -> None:
    # NCCL's watchdog aborts the peers of one that raised, which may take long to end.
    history = [seen(52.0, 49.9), seen(50.0)]
    history[1].stderr_tail.append(b"terminate called after throwing 'c10::DistBackendError'")
    assert make_failure({0: Exit(1, 1), 1: Exit(1, -6)}, history).code == 1


@pytest.mark.parametrize(
    ("ends", "cause"),
    [
        ([End(50.0, 50.0), End(49.9, 50.5)], 1),
        ([End(50.0, 50.0, signal.SIGSEGV), End(49.9, 50.5)], 0),
        ([End(50.0, 50.0, signal.SIGSEGV), End(49.9, 49.95)], 1),
        ([End(50.0, 50.0, signal.SIGKILL), End(49.9, 49.95)], 0),
        ([End(50.0, 50.0, signal.SIGKILL), End(30.0, 49.95)], 1),
    ],
)
def test_the_cause_among_launchers(ends: list[End], cause: int) -> None:
    assert cause_of(ends) == cause


def test_a_death_just_before_a_stop_is_reported() -> None:
    # Kills: a stop from a peer's launcher that comes before the agent has reported the cause.
    history = [seen(50.0), seen(50.6, 49.9), seen(50.5)]
    history[0].code, history[2].code = -9, -15
    failure = failed_before(50.4, history, 4)
    assert failure is not None
    assert (failure.subject, failure.code, failure.signal) == ("rank 4 (process 1)", 137, 9)
    history[0].code, history[0].exited_at = 0, 49.5
    failure = failed_before(50.4, history, 4)
    assert failure is not None
    assert (failure.subject, failure.code, failure.how) == ("rank 5 (process 1)", 1, "an exception")
    assert failed_before(49.0, history) is None


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


ROUNDS = {
    "killed": Round("SIGKILL", 1, 0.1, is_light=True),
    "terminated from outside": Round("SIGTERM", 1, 0.1),
    "crashes": Round("crash", 0, 0.1, is_light=True),
    "aborts on one of two nodes": Round("abort", 1, 0.1, nodes=2, is_light=True),
    "raises": Round("raise", 1, 0.1, is_light=True),
}


@pytest.mark.parametrize("name", ROUNDS)
def test_the_one_that_ended_is_named(name: str, tmp_path: Path) -> None:
    with hearing_hangups():
        assert play(ROUNDS[name], tmp_path) == ""

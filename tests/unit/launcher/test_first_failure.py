"""Which rank is blamed, and what is shown of it: decisions, and a share of the campaign's."""

import signal
from pathlib import Path

import pytest
from unit.launcher.blame import Round, hearing_hangups, play

from deepspeed.launcher import failures
from deepspeed.launcher.failures import End, Exit, cause_of, describe_exit, make_failure
from deepspeed.launcher.logs import RankHistory


def seen(exited_at: float | None, traceback_at: float | None = None) -> RankHistory:
    return RankHistory(pid=1, exited_at=exited_at, traceback_at=traceback_at)


CAUSES: dict[str, tuple[dict[int, int], list[RankHistory], int]] = {
    "ended-first": ({0: 1, 1: 1}, [seen(2.0), seen(1.0)], 1),
    "raised-first-but-slow-to-end": ({0: 1, 1: 1}, [seen(5.0, 4.9), seen(5.2, 4.0)], 1),
    "raised-then-ended-by-agent": ({0: 1, 1: -15}, [seen(5.0, 4.9), seen(5.2, 4.0)], 1),
    "silent-death-before-a-traceback": ({0: 1, 1: 3}, [seen(50.0, 49.9), seen(49.8)], 1),
    "old-traceback-was-handled": ({0: -15, 1: 3}, [seen(50.1, 2.0), seen(50.0)], 1),
    "no-times-known": ({0: -15, 1: 3}, [seen(None), seen(None)], 1),
    "killed": ({0: -15, 1: -9}, [seen(50.1), seen(50.0)], 1),
    # Kills: the first traceback as the cause: connections of the killed close before its end.
    "peer-of-killed": ({0: -15, 1: -9}, [seen(50.3, 49.9), seen(50.0)], 1),
    "killed-is-slow-to-go": ({0: 1, 1: -9}, [seen(50.3, 49.9), seen(50.4)], 1),
    "killed-much-later": ({0: 1, 1: -9}, [seen(50.0, 49.9), seen(56.0)], 0),
    "killed-and-peer-aborts": ({0: -6, 1: -9}, [seen(50.3), seen(50.4)], 1),
    "peer-of-aborted": ({0: -15, 1: -6}, [seen(50.3, 49.9), seen(50.0)], 1),
    "peer-of-crashed": ({0: 1, 1: -11}, [seen(50.3, 49.9), seen(50.0)], 1),
    "aborted-after-an-end": ({0: 1, 1: -6}, [seen(50.3, 49.9), seen(50.4)], 0),
    "terminated-by-user": ({0: -15, 1: -15}, [seen(50.3, 49.9), seen(50.0)], 1),
    "killed-as-it-began": ({0: -15, 1: -9}, [seen(50.3, 49.9), seen(None)], 1),
    "killed-before-its-id": ({0: -15, 1: -9}, [seen(50.3), seen(None)], 1),
    "ended-before-its-id": ({0: -15, 1: 1}, [seen(50.3), seen(None)], 1),
    "raises-then-aborts": ({0: -6, 1: -11}, [seen(50.3, 49.9), seen(50.0)], 1),
}


@pytest.mark.parametrize("name", CAUSES)
def test_the_cause(name: str) -> None:
    codes, history, rank = CAUSES[name]
    ends = failures.ends_of(codes, history)
    assert list(ends)[cause_of(list(ends.values()))] == rank
    failure = make_failure({rank: Exit(1, code) for rank, code in codes.items()}, history)
    code = codes[rank]
    raised = code == -signal.SIGTERM and history[rank].exited_at != 50.0
    assert failure.code == (1 if raised else 128 - code if code < 0 else code)
    assert failure.how == ("an exception" if raised else describe_exit(code))


def test_who_speaks_of_a_lost_peer_is_no_cause_of_a_crash() -> None:
    # Kills: a busy machine, where a peer has raised and ended before the crash is seen.
    history = [seen(50.3, 49.9), seen(50.4)]
    start, lost = b"Traceback (most recent call last):", b"RuntimeError: Connection closed by peer"
    history[0].stderr_tail.extend([start, lost])
    history[1].stderr_tail.append(lost)  # of something that it could do without
    failure = make_failure({0: Exit(1, 1), 1: Exit(1, -6)}, history)
    assert (failure.code, failure.signal) == (134, signal.SIGABRT)
    history[1].exited_at = 56.0
    failure = make_failure({0: Exit(1, 1), 1: Exit(1, -6)}, history)
    assert failure.code == 1 and failure.is_of_lost_peer
    # Kills: an exception taken for what was logged and handled before it.
    history[1].exited_at = 50.4
    history[0].stderr_tail.extend([b"", start, b"ValueError: boom"])
    assert make_failure({0: Exit(1, 1), 1: Exit(1, -6)}, history).code == 1


def test_an_abort_that_speaks_of_a_lost_peer_is_no_cause() -> None:
    # NCCL's watchdog aborts the peers of one that raised, which may take long to end.
    history = [seen(52.0, 49.9), seen(50.0)]
    history[1].stderr_tail.append(b"terminate called after throwing 'c10::DistBackendError'")
    assert make_failure({0: Exit(1, 1), 1: Exit(1, -6)}, history).code == 1


def test_the_cause_among_launchers() -> None:
    crash, kill = signal.SIGSEGV, signal.SIGKILL
    for first, second, cause in (
        (End(50.0, 50.0), End(49.9, 50.5), 1),
        (End(50.0, 50.0, crash), End(49.9, 50.5), 0),
        (End(50.0, 50.0, crash), End(49.9, 49.95), 1),
        (End(50.0, 50.0, kill), End(49.9, 49.95), 0),
        (End(50.0, 50.0, kill), End(30.0, 49.95), 1),
        (End(50.0, 50.0, crash), End(49.9, 49.95, is_of_lost_peer=True), 0),
    ):
        assert cause_of([first, second]) == cause


def test_a_death_just_before_a_stop_is_reported() -> None:
    # Kills: a stop from a peer's launcher that comes before the agent has reported the cause.
    history = [seen(50.0), seen(50.6, 49.9), seen(50.5)]
    history[0].code, history[2].code = -9, -15
    failure = failures.failed_before(50.4, history, 4)
    assert failure is not None
    assert (failure.subject, failure.code, failure.signal) == ("rank 4 (process 1)", 137, 9)
    history[0].code, history[0].exited_at = 0, 49.5
    failure = failures.failed_before(50.4, history, 4)
    assert failure is not None
    assert (failure.subject, failure.code, failure.how) == ("rank 5 (process 1)", 1, "an exception")
    assert failures.failed_before(49.0, history) is None


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

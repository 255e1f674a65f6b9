"""The coordinator of a job and its launchers: who is blamed, when all go, nothing waits."""

import json
import signal
import socket
import time
from collections.abc import Iterator

import pytest
from unit.launcher.starting import until

from deepspeed.launcher.constants import NODE_TIMEOUT_VARIABLE, START_TIMEOUT_VARIABLE, node_timeout
from deepspeed.launcher.failures import Failure
from deepspeed.launcher.job.client import CoordinatorClient
from deepspeed.launcher.job.coordinator import Coordinator, CoordinatorAddress, Verdict

WAIT = 30.0


@pytest.fixture(autouse=True)
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NODE_TIMEOUT_VARIABLE, "1.5")
    monkeypatch.setenv(START_TIMEOUT_VARIABLE, "20")


def served() -> Coordinator:
    coordinator = Coordinator(["node 0 (a)", "node 1 (b)"], ["127.0.0.1"])
    coordinator.start()
    return coordinator


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    coordinator = served()
    yield coordinator
    coordinator.close()


def connect(
    coordinator: Coordinator, member: int, stops: list[int | None] | None = None
) -> CoordinatorClient:
    hear = (stops if stops is not None else []).append
    return CoordinatorClient(coordinator.address, member, 29500 + member, hear)


def ended(coordinator: Coordinator) -> Verdict:
    verdict = coordinator.wait(WAIT)
    assert verdict is not None, "the job never ended"
    return verdict


def subjects(coordinator: Coordinator) -> list[str]:
    return [failure.subject for _, failure in ended(coordinator).failures]


def test_all_go_together_and_end_well(coordinator: Coordinator) -> None:
    with connect(coordinator, 0) as first, connect(coordinator, 1) as second:
        # Kills: a port of the wrong launcher, which does not start rank 0.
        assert first.join() == second.join() == ("127.0.0.1", 29500)
        first.report_end(None)
        assert coordinator.wait(0.1) is None, "the other one still runs"
        second.report_end(None)
        assert first.wait() == second.wait() == ended(coordinator) == Verdict(0, [])


def test_the_older_failure_is_the_cause_whoever_reports_first(coordinator: Coordinator) -> None:
    # Kills: the order of arrival: a rank that raised ends slowly, its peer's loss is told before.
    stops: list[int | None] = []
    with connect(coordinator, 0) as first, connect(coordinator, 1, stops) as second:
        first.join(), second.join()
        first.report_end(Failure("rank 0", "exit code 1", 1, age=0.1))
        until(lambda: bool(stops))
        assert coordinator.wait(0.1) is None, "the other launcher's words are waited for"
        said = {"heading": "said:", "last_words": ["boom"]}
        second.report_end(Failure("rank 3", "exit code 13", 13, age=5.0, **said))
        verdict = first.wait()
    assert stops[0] == signal.SIGTERM
    assert verdict.code == ended(coordinator).code == 13
    told = [(label, failure.subject) for label, failure in verdict.failures]
    assert told == [("node 1 (b)", "rank 3"), ("node 0 (a)", "rank 0")]
    assert verdict.failures[0][1].last_words == ["boom"]


def test_a_killed_rank_is_the_cause_of_an_older_traceback(coordinator: Coordinator) -> None:
    # Kills: ordering launchers' reports by their moments alone.
    stops: list[int | None] = []
    with connect(coordinator, 0) as first, connect(coordinator, 1, stops) as second:
        first.join(), second.join()
        first.report_end(Failure("rank 0", "exit code 1", 1, age=2.5, lasted=2.0))
        until(lambda: bool(stops))
        second.report_end(Failure("rank 3", "signal SIGSEGV (11)", 139, age=1.0, signal=11))
        assert first.wait().code == 139
    assert subjects(coordinator) == ["rank 3", "rank 0"]


def test_what_speaks_of_a_lost_peer_is_no_cause_of_a_crash(coordinator: Coordinator) -> None:
    # Kills: a report that loses this on its way.
    stops: list[int | None] = []
    with connect(coordinator, 0) as first, connect(coordinator, 1, stops) as second:
        first.join(), second.join()
        first.report_end(Failure("rank 0", "exit code 1", 1, age=2.5, is_of_lost_peer=True))
        until(lambda: bool(stops))
        second.report_end(Failure("rank 3", "signal SIGABRT (6)", 134, age=1.0, signal=6))
        assert first.wait().code == 134


def test_a_closed_connection_ends_the_others(coordinator: Coordinator) -> None:
    stops: list[int | None] = []
    with connect(coordinator, 0, stops) as first:
        with connect(coordinator, 1) as second:
            first.join(), second.join()
        until(lambda: bool(stops))
        first.report_end(None)
        assert first.wait().code == 1
    (cause,) = ended(coordinator).failures
    assert (cause[1].subject, cause[1].how.split(":")[0]) == ("node 1 (b)", "a lost connection")


def test_the_loss_of_a_launcher_is_the_cause_of_its_peers_errors(coordinator: Coordinator) -> None:
    # Kills: the moment a busy coordinator reads a connection's end taken for that of the loss.
    with connect(coordinator, 0) as first:
        with connect(coordinator, 1) as second:
            first.join(), second.join()
            first.report_end(Failure("rank 0", "exit code 1", 1, age=0.5))
        first.wait()
    assert subjects(coordinator) == ["node 1 (b)", "rank 0"]


def test_a_silent_launcher_is_lost_after_the_timeout(coordinator: Coordinator) -> None:
    # Kills: trusting an open connection: a cut network leaves it open on both sides.
    place = ("127.0.0.1", coordinator.address.port)
    with connect(coordinator, 0) as first, socket.create_connection(place) as silent:
        hello = {"type": "hello", "token": coordinator.address.token, "member": 1}
        silent.sendall(json.dumps(hello).encode() + b"\n")
        first.join()
        began = time.monotonic()
        until(lambda: first.stopped_at is not None)
        assert time.monotonic() - began > 0.5 * node_timeout()
        first.report_end(None)
        assert "no sign of life for 1.5 seconds" in ended(coordinator).failures[0][1].how


def test_a_silent_coordinator_is_lost_after_the_timeout() -> None:
    stops: list[int | None] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = CoordinatorAddress(["127.0.0.1"], server.getsockname()[1], "word")
        with CoordinatorClient(address, 0, 0, stops.append) as line:
            assert line.join() is None
            assert line.lost and stops == [None]
            assert "no sign of life" in line.wait().failures[0][1].how


def test_a_launcher_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(START_TIMEOUT_VARIABLE, "0.3")
    coordinator = served()
    with connect(coordinator, 0) as first:
        assert first.join() is None
        first.report_end(None)
        assert first.wait().code == 1
    how = ended(coordinator).failures[0][1].how
    assert how == "no word from its launcher within 0.3 seconds of the start"
    coordinator.close()


def test_an_engine_that_ends_before_all_have_come(coordinator: Coordinator) -> None:
    with connect(coordinator, 0) as first:
        until(lambda: coordinator._state.members[0].writer is not None)
        coordinator.fail(0, "node 0", "is ignored: it has come", 9)
        coordinator.fail(1, "node 1 (b)", "exit code 255 of ssh", 255)
        assert first.join() is None
        first.report_end(None)
        assert first.wait().code == 255
    assert subjects(coordinator) == ["node 1 (b)"]


def test_a_signal_is_passed_on_and_a_second_one_is_urgent(coordinator: Coordinator) -> None:
    stops: list[int | None] = []
    with connect(coordinator, 0, stops) as first, connect(coordinator, 1) as second:
        first.join(), second.join()
        coordinator.stop(signal.SIGTERM)
        coordinator.stop(signal.SIGTERM)
        until(lambda: len(stops) == 2)
        assert stops == [signal.SIGTERM, signal.SIGINT]
        # A rank that dies of the signal is no failure of its own.
        first.report_end(Failure("rank 0", "exit code 1", 1))
        second.report_end(None)
        assert first.wait().code == 128 + signal.SIGTERM
    assert ended(coordinator).code == 128 + signal.SIGTERM


def test_strangers_are_sent_away(coordinator: Coordinator) -> None:
    own = coordinator.address
    strangers = {
        "it belongs to another job": (CoordinatorAddress(own.addresses, own.port, "other"), 1),
        "number 2 is not in 0..1": (own, 2),
        "node 0 (a) has come already": (own, 0),
    }
    with connect(coordinator, 0):
        for why, (address, member) in strangers.items():
            with CoordinatorClient(address, member, 0, lambda signum: None) as stranger:
                assert stranger.join() is None
                assert why in stranger.wait().failures[0][1].how
                assert coordinator.wait(0.05) is None, "a stranger must not end the job"


def test_noise_on_the_port_is_ignored(coordinator: Coordinator) -> None:
    for noise in (b"GET / HTTP/1.0\r\n\r\n", b"[]\n", b"\xff\xfe\n"):
        with socket.create_connection(("127.0.0.1", coordinator.address.port)) as stranger:
            stranger.sendall(noise)
    with connect(coordinator, 0) as first, connect(coordinator, 1) as second:
        assert first.join() == second.join()


def test_no_coordinator_at_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(START_TIMEOUT_VARIABLE, "0.1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    nowhere = CoordinatorClient(CoordinatorAddress(["127.0.0.1"], port, ""), 0, 0, print)
    with pytest.raises(ConnectionError, match=f"at port {port} .*DS_LAUNCH_ADDRESS"), nowhere:
        pass


def test_address_round_trip() -> None:
    address = CoordinatorAddress(["10.0.0.1", "fd00::2"], 1234, "word")
    assert CoordinatorAddress.decode(address.encode()) == address
    with pytest.raises(ValueError, match="--coordinator=nonsense"):
        CoordinatorAddress.decode("nonsense")


def test_timeouts_are_positive_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("0", "-1", "soon"):
        monkeypatch.setenv(NODE_TIMEOUT_VARIABLE, text)
        with pytest.raises(ValueError, match=f"{NODE_TIMEOUT_VARIABLE}={text}"):
            node_timeout()

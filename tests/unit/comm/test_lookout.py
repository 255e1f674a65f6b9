"""The thread that looks while somebody waits, and waits of a device (`runtime/`: of hosts)."""

import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from deepspeed.comm import process_groups
from deepspeed.comm.watch import lone_waits
from deepspeed.comm.watch.lone_waits import LoneWaits
from deepspeed.comm.watch.lookout import Lookout, stop_all
from unit.launcher.starting import until

LIMIT_S = 10.0


class Waiter:
    """Somebody who waits, and is looked at."""

    def __init__(self, pause_s: float) -> None:
        self.waits = False
        self.num_looks = 0
        self.lookout = Lookout("test", self._look, lambda: self.waits, lambda: pause_s)

    def _look(self) -> None:
        self.num_looks += 1

    def wait_for_look(self) -> None:
        self.waits = True
        self.lookout.call()
        before = self.num_looks
        until(lambda: self.num_looks != before, LIMIT_S)
        self.waits = False

    def wait_for_end(self) -> None:
        until(lambda: not self.lookout.is_alive, LIMIT_S)


def test_it_ends_and_begins_anew() -> None:
    waiter = Waiter(0.01)
    for _ in range(3):
        waiter.wait_for_look()
        waiter.wait_for_end()


def test_no_wait_is_missed_while_it_ends() -> None:
    # A wait begins when the thread has just heard that nobody waits. Kills: `retires` without its
    # second question.
    waiter = Waiter(0.01)
    answers = []

    def is_wanted() -> bool:
        answers.append(waiter.waits)
        if len(answers) == 3:
            waiter.lookout.call()
            waiter.waits = True
        return answers[-1]

    waiter.lookout.is_wanted = is_wanted
    waiter.lookout.call()
    until(lambda: waiter.num_looks, LIMIT_S)
    waiter.waits = False
    waiter.wait_for_end()


def test_only_the_idle_are_stopped() -> None:
    # Kills: a wait that nobody looks at any more since something else has ended.
    waiter = Waiter(0.01)
    waiter.waits = True
    waiter.lookout.call()
    stop_all(if_idle=True)
    assert waiter.lookout.is_alive
    waiter.wait_for_look()
    stop_all(if_idle=True)
    assert not waiter.lookout.is_alive
    assert not [thread for thread in threading.enumerate() if thread.name == "test"]


AT_EXIT = """
import sys, time
import torch.distributed as dist
from deepspeed.comm.watch.lookout import Lookout
server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
store = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
Lookout("test", lambda: store.check(["key"]), lambda: True, lambda: 0.0).call()
time.sleep(0.1)
"""


def test_none_is_in_the_store_when_the_process_ends() -> None:
    # Kills: "terminate called without an active exception"; see [Note: threads at exit].
    done = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


REPORT_S = 0.2


class Stream:
    """Work of a device: `passed` events behind it have, and one was asked `num_questions` times."""

    def __init__(self) -> None:
        self.num_events = self.passed = self.num_questions = 0

    def record(self) -> Any:
        """An event behind what was issued so far."""
        number, stream = self.num_events, self
        self.num_events += 1

        class Recorded:
            def query(self) -> bool:
                stream.num_questions += 1
                return number < stream.passed

        return Recorded()


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    made = Stream()
    monkeypatch.setattr(lone_waits, "_event", made.record)
    monkeypatch.setattr(process_groups, "get_world_size", lambda: 2)
    monkeypatch.setattr(process_groups, "is_initialized", lambda: True)
    return made


class Heard(LoneWaits):
    """Keeps in `told` what it would write."""

    def __init__(self, report_s: float = REPORT_S) -> None:
        super().__init__()
        self.report_s = report_s
        self.told: list[str] = []

    def _report(self, wait: Any) -> None:
        wait.is_reported = True
        self.told.append(wait.what())

    def issue(self, *names: str) -> None:
        """As a program does whose host does not wait."""
        for name in names:
            with self.waiting(lambda name=name: name):  # type: ignore[misc]  # mypy infers no lambda with a default
                pass


def test_the_oldest_is_told_once(stream: Stream) -> None:
    # Kills: one that is complete; what stands behind the oldest; a report for every look.
    watch = Heard()
    watch.issue("first", "second", "third")
    stream.passed = 3  # the device is within the second
    until(lambda: watch.told)
    time.sleep(2 * REPORT_S)
    assert watch.told == ["second"]
    stream.passed = 6
    until(lambda: not watch.lookout.is_alive)
    assert watch.told == ["second"]


def test_what_the_device_has_not_come_to(stream: Stream) -> None:
    # Kills: a long step taken for a wait, where the host is far ahead of the device.
    watch = Heard()
    watch.issue("far ahead")
    time.sleep(4 * REPORT_S)
    assert not watch.told
    stream.passed = 1
    until(lambda: watch.told)


def test_nobody_is_asked_before_it_is_due(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    # Kills: questions at every look, which a graph that is recorded meanwhile does not survive.
    monkeypatch.setattr(lone_waits, "_LOOK_S", 0.1)
    watch = Heard(report_s=LIMIT_S)
    watch.issue("it")
    time.sleep(0.35)
    assert stream.num_questions == 0 and watch.lookout.is_alive
    stream.passed = 2
    watch.issue("the next")
    assert stream.num_questions == 1
    watch.forget()
    until(lambda: not watch.lookout.is_alive)


def test_the_end_of_an_engine(stream: Stream) -> None:
    # Kills: a thread that goes on with what nobody will ever ask about.
    watch = Heard()
    watch.issue("it")
    watch.forget()
    until(lambda: not watch.lookout.is_alive)
    assert not watch.told


def test_a_wait_that_raises(stream: Stream) -> None:
    # Kills: a wait of the host that stays after it has ended by an error.
    watch = Heard()
    with pytest.raises(RuntimeError), watch.waiting(lambda: "it"):
        raise RuntimeError
    time.sleep(2 * REPORT_S)
    assert not watch.told
    until(lambda: not watch.lookout.is_alive)


def test_one_within_another(stream: Stream) -> None:
    # Kills: an outer wait that is forgotten when an inner one is over.
    watch = Heard()
    with watch.waiting(lambda: "outer"):
        with watch.waiting(lambda: "inner"):
            pass
        stream.passed = stream.num_events
        until(lambda: watch.told)
    assert watch.told == ["outer"]


def test_never(stream: Stream) -> None:
    watch = Heard(report_s=0)
    watch.issue("it")
    assert not watch.lookout.is_alive and not stream.num_events

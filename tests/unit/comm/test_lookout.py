"""The thread that looks while somebody waits, and waits of a device (`runtime/`: of hosts)."""

import hashlib
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

import deepspeed
from deepspeed import comm as dist
from deepspeed.accelerator.sim_accelerator import Sim_Accelerator, simulate
from deepspeed.comm import process_groups
from deepspeed.comm.watch import backend_threads, lone_waits
from deepspeed.comm.watch.lone_waits import LoneWaits
from deepspeed.comm.watch.lookout import Lookout, stop_all
from unit.common import DistributedTest
from unit.launcher.starting import until
from unit.models import config_of, drawn, linears, sgd
from unit.one_process import mean_square

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

# As gloo's thread beside a busy program: complete is what it does, and let go of it is nothing yet.
AT_REST = """
import hashlib, os, threading
from deepspeed.comm.watch import backend_threads; backend_threads._LIMIT_S = 60.0
def let_go():
    hashlib.pbkdf2_hmac("sha256", b"", b"", 200_000)  # without the interpreter
    os.write(1, b"let go")
threading.Thread(target=let_go, daemon=True).start()
"""


@pytest.mark.parametrize(("program", "said"), [(AT_EXIT, b""), (AT_REST, b"let go")])
def test_none_is_inside_torch_when_the_process_ends(program: str, said: bytes) -> None:
    # Kills: "terminate called without an active exception"; see [Note: threads at exit].
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, said, b"")


def test_a_thread_that_never_rests_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_threads, "_LIMIT_S", 0.05)
    monkeypatch.setattr(backend_threads, "_threads", lambda: [["Name:\tx", "State:\tR (running)"]])
    backend_threads.wait_until_at_rest()


REPORT_S = 0.2


class Stream:
    """Work of a device: `passed` events behind it have, and `askers` asked about one each."""

    def __init__(self) -> None:
        self.num_events = self.passed = 0
        self.askers: list[threading.Thread] = []

    def record(self) -> Any:
        """An event behind what was issued so far."""
        number, stream = self.num_events, self
        self.num_events += 1

        class Recorded:
            def query(self) -> bool:
                stream.askers.append(threading.current_thread())
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


@pytest.fixture
def standing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program waits for its device from now on, whatever it does."""
    monkeypatch.setattr(lone_waits._Standing, "seconds", lambda *_: float("inf"))


def test_the_oldest_is_told_once(stream: Stream, standing: None) -> None:
    # Kills: one that is complete; what stands behind the oldest; a report for every look.
    watch = Heard()
    watch.issue("first")
    stream.passed = 3  # the device is within the second
    watch.issue("second", "third")
    until(lambda: watch.told)
    time.sleep(2 * REPORT_S)
    stream.passed = 6
    watch.issue("fourth")
    time.sleep(REPORT_S / 2)
    assert watch.told == ["second"]
    watch.forget()


def test_what_the_device_has_not_come_to(stream: Stream, standing: None) -> None:
    # Kills: a long step taken for a wait, where the host is far ahead of the device.
    watch = Heard(3 * REPORT_S)  # on a busy machine some sleeps take longer
    for _ in range(20):
        watch.issue("far ahead")
        time.sleep(REPORT_S / 5)
    assert not watch.told
    stream.passed = 1
    watch.issue("the next")
    until(lambda: watch.told)


def test_only_who_issues_asks(stream: Stream, standing: None) -> None:
    # Kills: questions of the thread that looks, which a graph that is recorded meanwhile does not
    # survive; questions when nothing is issued any more.
    watch = Heard()
    watch.issue("first", "second")
    asked = len(stream.askers)
    until(lambda: watch.told)
    time.sleep(2 * REPORT_S)
    assert watch.lookout.is_alive and len(stream.askers) == asked
    stream.passed = 4
    watch.issue("third")
    assert set(stream.askers) == {threading.current_thread()}
    watch.forget()


def test_only_a_program_that_waits_is_told(stream: Stream) -> None:
    # Kills: an error about the last operations of a program that goes on, or sleeps.
    watch, begun = Heard(), threading.Event()

    def program(last: Any) -> None:
        watch.issue("it")
        begun.set()
        last()

    for last in (lambda: time.sleep(4 * REPORT_S), lambda: until(lambda: watch.told, REPORT_S * 4)):
        with suppress(AssertionError):
            program(last)
        assert not watch.told
        watch.forget()

    def busy(num_told: int) -> bool:
        """In one call, without the interpreter, as in one that waits for CUDA; again if the thread
        that looks got no turn meanwhile.
        """
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000)
        return len(watch.told) >= num_told

    alone = partial(until, partial(busy, 1))
    threading.Thread(target=program, args=(alone,), daemon=True).start()
    begun.wait()
    until(lambda: watch.told)
    watch.forget()
    # Issued in backward, in a thread of autograd's: the main one waits for it.
    backward = threading.Thread(target=watch.issue, args=("of backward",))
    backward.start()
    backward.join()
    until(partial(busy, 2))
    assert watch.told == ["it", "of backward"]


class TestOnADevice(DistributedTest):
    world_size = 2
    backend = "gloo"

    def test_a_graph_is_captured_while_it_looks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Kills: a watcher that asks the device, a program that asks while it captures, operations
        # that are over and stay.
        monkeypatch.setattr(lone_waits, "_LOOK_S", 0.01)
        watch, askers = lone_waits.watch, set[threading.Thread]()
        has_passed = Sim_Accelerator.has_passed

        def noted(device: Any, event: Any) -> bool:
            askers.add(threading.current_thread())
            return has_passed(device, event)

        monkeypatch.setattr(Sim_Accelerator, "has_passed", noted)
        with simulate() as device:
            verify = {"lone_gather_report": 0.05}
            config = config_of(3, 1, optimizer=sgd(0.1), verify=verify)
            engine = deepspeed.initialize(model=linears(3, 8), config=config)[0]
            for _ in range(2):
                engine.backward(mean_square(engine, drawn(dist.get_rank(), 1, 8)))
                engine.step()
            assert watch._on_device and askers == {threading.main_thread()}
            device.synchronize()
            before = list(watch._on_device)
            askers.clear()
            with device.capture_to_graph(device.create_graph()):
                mean_square(engine, drawn(dist.get_rank(), 1, 8))
                time.sleep(0.2)
                done = watch._on_device[0].done
                assert done is not None
                for wait in (device.synchronize, done.query, device.current_stream().query):
                    with pytest.raises(RuntimeError, match="captures a graph"):
                        wait()
            assert not askers and watch.lookout.is_alive
            engine.backward(mean_square(engine, drawn(dist.get_rank(), 1, 8)))
            engine.step()
            assert not {*map(id, before)} & {*map(id, watch._on_device)}
            engine.destroy()
            assert not watch._on_device


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

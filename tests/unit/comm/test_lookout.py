"""The thread that looks while somebody waits."""

import subprocess
import sys
import threading
import time

from deepspeed.comm.watch.lookout import Lookout, stop_all

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
        before, end = self.num_looks, time.monotonic() + LIMIT_S
        while self.num_looks == before:
            assert time.monotonic() < end, "nobody looks"
            time.sleep(1e-4)
        self.waits = False

    def wait_for_end(self) -> None:
        end = time.monotonic() + LIMIT_S
        while self.lookout.is_alive:
            assert time.monotonic() < end, "the thread does not end"
            time.sleep(1e-3)


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
    end = time.monotonic() + LIMIT_S
    while not waiter.num_looks:
        assert time.monotonic() < end, "nobody looks"
        time.sleep(1e-3)
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

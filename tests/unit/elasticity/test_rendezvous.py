"""What an elastic job's nodes notice of each other, over a real store and without ranks."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from deepspeed.launcher.job.rendezvous import NodeWatch, Round, WatchedRendezvous
from unit.launcher.starting import Process, until

TIMEOUT = 1.0
SERVER = """
import sys
from torch.distributed.elastic.utils.distributed import create_c10d_store
store = create_c10d_store(True, "127.0.0.1", 0, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def server() -> Iterator[Process]:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    yield process
    process.kill()
    process.communicate()


def test_a_silent_node_is_lost_and_a_silent_rendezvous_is_a_cut(server: Process) -> None:
    # Kills: beats not sent, a word already there as a sign of life, answers nobody waits for.
    assert server.stdout is not None
    endpoint = f"127.0.0.1:{int(server.stdout.readline())}"
    cut = threading.Event()
    stays, goes = NodeWatch(endpoint, TIMEOUT, cut.set), NodeWatch(endpoint, TIMEOUT, cut.set)
    first, second = Round("a", 0, 2), Round("a", 1, 2)
    stays.round, goes.round = first, second
    until(lambda: bool(first.words.get(1)) and bool(second.words.get(0)))
    said = first.words[1]
    until(lambda: first.words[1] != said)
    assert not first.lost and not first.gave_up
    goes.tell_giving_up()
    assert first.gave_up
    goes.end()
    until(lambda: first.lost)
    assert not cut.is_set()
    server.send_signal(signal.SIGSTOP)
    assert cut.wait(60)
    stays.end()


def test_silence_is_counted_from_the_last_new_word(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    # Kills: silence counted from the round's begin; a node that never spoke counted as alive.
    spoke = (0.0, "", False), (9.0, "b 1", False), (18.0, "b 1", False), (20.0, "b 1", True)
    for said in (spoke, ((0.0, "", False), (10.5, "", True))):
        seen = Round("a", 0, 2)
        for now[0], word, lost in said:
            seen.listen(1, word, 10.0)
            assert seen.lost is lost


AT_EXIT = """
import contextlib, datetime, time
import torch.distributed as dist
from deepspeed.launcher.job import rendezvous

class Slow:
    def __init__(self, *where, **how):
        self.store = dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False)
    def set(self, key, value):
        pass
    def check(self, keys):
        with contextlib.suppress(dist.DistStoreError):
            self.store.wait(["absent"], datetime.timedelta(milliseconds=30))

class Last:
    # Makes the interpreter's end long.
    def __del__(self, sleep=time.sleep):
        sleep(0.2)

last = Last()
rendezvous.beat_interval = lambda timeout: 0.0
rendezvous.create_c10d_store = Slow
server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
watch = rendezvous.NodeWatch(f"127.0.0.1:{server.port}", 30.0, lambda: None)
while not watch._answers:
    time.sleep(0.001)
"""


def test_no_sign_of_life_is_under_way_when_the_process_ends() -> None:
    # Kills: a good launch, or Ctrl-C, that ends with "terminate called without an active...".
    done = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr  # torch tells of each wait there


ASKED = [(0, 0, 0, 0), (2, 0, 0, 2), (0, 1, 0, 1), (0, 1, 1, 0), (2, 1, 1, 2)]


@pytest.mark.parametrize(("waiting", "lost", "closed", "expected"), ASKED)
def test_a_lost_node(waiting: int, lost: int, closed: int, expected: int) -> None:
    # It asks for a new round. Kills: one that is asked for after a node's good end.
    torchs: Any = SimpleNamespace(num_nodes_waiting=lambda: waiting, is_closed=lambda: bool(closed))
    watch: Any = SimpleNamespace(round=None)
    rendezvous = WatchedRendezvous(torchs, watch)
    assert rendezvous.num_nodes_waiting() == waiting
    watch.round = Round("a", 0, 2, lost=bool(lost))
    assert rendezvous.num_nodes_waiting() == expected
    watch.round.gave_up = True
    # Kills: a node that waits for one that has given up, which closes the rendezvous too.
    assert rendezvous.num_nodes_waiting() == (waiting or 1)

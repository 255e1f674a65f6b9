"""A signal is lost nowhere between the launcher's first line and its ranks, nor swallowed.

No delays that have to be lucky: the launcher sends the signal to itself, at a named moment of its
start and within the callback of a weak reference, of which the import system has one per module.
"""

import signal
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from unit.common import python_path
from unit.launcher.starting import ROOT, start
from unit.launcher.zombies import LEFT_SECONDS, MARK, hearing_hangups, kill, leftovers

from deepspeed.launcher import nodes, signals
from deepspeed.launcher.signals import Interrupted, noting_signals, raising_signals

PLANTED = """
import os, signal, sys, weakref
class Holder:
    pass
def plant(event, text, count, number, is_swallowed):
    def send(*_):
        os.kill(os.getpid(), number)
        for _ in range(10):
            pass
    def hook(seen, args):
        nonlocal count
        if seen == event and text in str(args):
            count -= 1
            if count == 0 and is_swallowed:
                holder = Holder()
                kept.append(weakref.ref(holder, send))
            elif count == 0:
                send()
    sys.addaudithook(hook)
kept = []
signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
if "deepspeed.launcher.runner" in sys.orig_argv:
    for moment in eval(os.environ["MOMENTS"]):
        plant(*moment)
"""
"""A sitecustomize."""


@dataclass(frozen=True)
class Moment:
    """The `count`-th audit event of that name with `text`; `is_swallowed`: its raise is lost."""

    event: str
    text: str
    count: int = 1
    number: int = signal.SIGINT
    is_swallowed: bool = True


RANK_STARTS = ("subprocess.Popen", "worker_exec.py")
AGENT = "torch.distributed.elastic.agent"
STARTS: dict[str, tuple[tuple[Moment, ...], int]] = {
    # Kills: Python's own handler while modules load.
    "this package loads": ((Moment("import", "'deepspeed.launcher.launch'"),), -signal.SIGINT),
    "torch loads": ((Moment("import", "'torch._C'"),), -signal.SIGINT),
    # Kills: a handler that raises while the launch is set up, what was noted then not looked at.
    "the agent loads": ((Moment("import", AGENT, number=signal.SIGTERM),), 128 + signal.SIGTERM),
    # Kills: a watch that does not repeat the signal; handlers in place of what `nohup` ignores.
    "a rank starts": (
        (Moment(*RANK_STARTS, 1, signal.SIGHUP, False), Moment(*RANK_STARTS, 2)),
        128 + signal.SIGINT,
    ),
}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are found in /proc")
def test_a_signal_while_it_starts_ends_it(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(PLANTED)
    (tmp_path / "rank.py").write_text("import time\ntime.sleep(600)\n")

    def play(moments: tuple[Moment, ...]) -> tuple[int, list[str]]:
        word = uuid.uuid4().hex
        places = [(at.event, at.text, at.count, int(at.number), at.is_swallowed) for at in moments]
        words = ("-q", "--num_gpus=2", "rank.py")
        variables = {
            "PYTHONPATH": python_path(tmp_path, ROOT),
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "2",
        }
        variables |= {"MOMENTS": str(places), MARK: word}
        how = {"output": subprocess.DEVNULL, "start_new_session": True}
        launcher = start(tmp_path, *words, variables=variables, **how)
        with suppress(subprocess.TimeoutExpired):
            launcher.wait(120)
        left = leftovers(word, LEFT_SECONDS if launcher.returncode is not None else 0.0)
        kill(left)
        return launcher.wait(), [line for _, line in left]

    with ThreadPoolExecutor(2) as threads:
        ends = threads.map(play, (moments for moments, _ in STARTS.values()))
        found = dict(zip(STARTS, ends, strict=True))
    assert found == {name: (code, []) for name, (_, code) in STARTS.items()}


def test_what_is_noted_is_raised_once() -> None:
    # Kills: notes that are lost, and notes that end a second wait too.
    with noting_signals():
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Interrupted) as stopped, raising_signals():
            pytest.fail("the wait began")
        assert stopped.value.signum == signal.SIGTERM
        with raising_signals():
            pass
        with pytest.raises(Interrupted), raising_signals():
            signal.raise_signal(signal.SIGINT)


def test_a_job_over_nodes_hears_what_was_noted() -> None:
    # Kills: a Ctrl-C between the reaper's start and the engine's that nobody looks at again.
    stops: list[int] = []
    coordinator: Any = SimpleNamespace(stop=stops.append)
    with noting_signals():
        signal.raise_signal(signal.SIGINT)
        with nodes._signals_stop(coordinator):
            assert stops == [signal.SIGINT]
    assert signals.take_noted() == []


def test_a_job_in_the_background_of_a_script_hears_sigint() -> None:
    # Kills: a launch that lives on, as a shell's `command &` ignores SIGINT.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(Interrupted), raising_signals():
            signal.raise_signal(signal.SIGINT)
        with signals.dying_at_once():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_ignored_signal_stays_ignored() -> None:
    with hearing_hangups():
        assert signal.SIGHUP in signals.ending_signals()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert signal.SIGHUP not in signals.ending_signals()
        with raising_signals():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN

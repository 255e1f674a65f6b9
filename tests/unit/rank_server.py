"""Runs a function on several ranks, each a process forked from a template that has everything
imported.

The template is forked when collection is over and no test has run. It stays single-threaded and
makes no process group, so that forking it is safe; a rank costs milliseconds instead of the seconds
that importing torch takes. When pytest's end of the socket closes, however it ends, the template
kills what runs and exits. Each rank leads a process group of its own, which is killed when the rank
is done.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import importlib.metadata
import io
import os
import pickle
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# How long the other ranks may go on after one has failed: enough to notice its death and report it
# themselves.
GRACE_AFTER_FAILURE_S = 5.0
# How long a rank that is being given up gets to write its stacks.
DUMP_S = 0.2

# What is imported when it is first needed, by most ranks: of this package, and of others.
PRELOADED = (
    *(f"deepspeed.accelerator.{kind}_accelerator" for kind in ("cuda", "xpu", "npu", "hpu", "mps")),
    "deepspeed.accelerator.cpu_accelerator",
    "deepspeed.runtime.engine",
    "deepspeed.runtime.zero.model_sharding",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.config_models.refusals",
    "deepspeed.runtime.config_models.training",
    *(f"deepspeed.ops.{kind}" for kind in ("adagrad", "lamb", "lion", "muon")),
    "deepspeed.runtime.optimizers.muon_groups",
)
OTHERS_PRELOADED = (
    "psutil",
    "pydantic",
    # The first optimizer of a process imports it, which takes more than a second.
    "torch._dynamo",
    "torch._subclasses.schema_check_mode",
    "torch.profiler._cupti_monitor",
    "torch.utils.serialization.config",
)

# What compiling with "aot_eager" imports, for more than a second: as `Job.imports`.
COMPILER = (
    "torch._dynamo.backends.debugging",
    "torch._dynamo.backends.distributed",
    "torch._inductor.compile_fx",
    "torch.distributed.tensor.experimental",
    "torch.export._trace",
)

PASSED, SKIPPED, XFAILED, FAILED = "passed", "skipped", "xfailed", "failed"


@dataclass
class Job:
    """What every rank runs: ``body(rank, payload)``, in at most `timeout_s` and with `env` set.

    `body` is named, because functions of test modules do not all pickle. `imports` are modules that
    the template imports first, and has from then on.
    """

    body: tuple[str, str]
    payload: Any
    num_ranks: int
    timeout_s: float
    env: dict[str, str] = field(default_factory=dict)
    directory: str = ""
    imports: tuple[str, ...] = ()


@dataclass
class RankResult:
    """How one rank ended; `text` is a skip's reason or a failure's traceback, `output` what it
    wrote. One that was given up has an infinite `ended_at`, and `stacks`.
    """

    rank: int
    outcome: str
    text: str = ""
    output: str = ""
    ended_at: float = float("inf")
    stacks: str = ""


# -- in a rank -------------------------------------------------------------------------------------


def _redirect_output(path: Path) -> None:
    """Send fd 1 and 2 to a file: what the template inherited is pytest's capture."""
    output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    files = (io.FileIO(number, "w", closefd=False) for number in (1, 2))
    at_once = {"line_buffering": True, "write_through": True}
    sys.stdout, sys.stderr = (io.TextIOWrapper(file, **at_once) for file in files)


def _write_result(directory: Path, rank: int, outcome: str, text: str) -> None:
    partial = directory / f"rank{rank}.partial"
    partial.write_bytes(pickle.dumps((outcome, text, time.monotonic())))
    partial.rename(directory / f"rank{rank}.result")


def _outcome_of(error: BaseException) -> tuple[str, str]:
    # optional: pytest is only needed to tell its exceptions apart.
    import pytest

    if isinstance(error, pytest.skip.Exception):
        return SKIPPED, str(error)
    if isinstance(error, pytest.xfail.Exception):
        return XFAILED, str(error)
    # The harness's own frames come first and explain nothing.
    frames = error.__traceback__
    while (
        frames is not None
        and Path(frames.tb_frame.f_code.co_filename).parent == Path(__file__).parent
    ):
        if Path(frames.tb_frame.f_code.co_filename).stem not in ("rank_server", "common"):
            break
        frames = frames.tb_next
    lines = traceback.format_exception(type(error), error, frames or error.__traceback__)
    return FAILED, "".join(lines)


def _run_rank(job: Job, rank: int) -> None:
    directory = Path(job.directory)
    os.environ.update(job.env)
    _redirect_output(directory / f"rank{rank}.out")
    # It stays open until the process ends.
    stacks = open(directory / f"rank{rank}.stacks", "w", encoding="utf-8")
    faulthandler.enable(file=stacks, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    finish: Callable[[], None] | None = None
    try:
        module, name = job.body
        finish = getattr(importlib.import_module(module), name)(rank, pickle.loads(job.payload))
    except BaseException as error:  # a rank's end, whatever it is, is the test's result
        _write_result(directory, rank, *_outcome_of(error))
        return
    # Written before the ranks take leave of each other, so that a peer that fails is not reported
    # as our failure.
    _write_result(directory, rank, PASSED, "")
    if finish is not None:
        with contextlib.suppress(Exception):
            finish()


# -- in the template -------------------------------------------------------------------------------


def _receive(connection: socket.socket) -> bytes | None:
    """One length-prefixed message; None when the other end is closed."""
    header = _receive_exactly(connection, 8)
    return None if header is None else _receive_exactly(connection, struct.unpack("!Q", header)[0])


def _receive_exactly(connection: socket.socket, count: int) -> bytes | None:
    parts = []
    while count:
        part = connection.recv(min(count, 1 << 20))
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _send(connection: socket.socket, message: bytes) -> None:
    connection.sendall(struct.pack("!Q", len(message)) + message)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


class _Watch:
    """The ranks of one job, from fork to reaping."""

    def __init__(self, job: Job, connection: socket.socket, wakeup: int) -> None:
        self.job = job
        self.connection = connection
        self.wakeup = wakeup
        self.rank_of: dict[int, int] = {}  # pid -> rank, of those that still run
        self.statuses: dict[int, int] = {}  # rank -> exit status as os.waitpid gives it
        self.given_up: set[int] = set()
        self.deadline = time.monotonic() + job.timeout_s

    def start(self) -> None:
        for rank in range(self.job.num_ranks):
            pid = os.fork()
            if pid == 0:
                _become_rank(self.job, rank, self.connection)
            self.rank_of[pid] = rank
            # Both sides set it, so that neither can be too early.
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)

    def _reap(self) -> None:
        for pid in list(self.rank_of):
            reaped, status = os.waitpid(pid, os.WNOHANG)
            if reaped:
                _kill_group(pid)  # whatever the rank started and left behind
                rank = self.rank_of.pop(pid)
                self.statuses[rank] = status
                if not self._passed(rank):
                    self.deadline = min(self.deadline, time.monotonic() + GRACE_AFTER_FAILURE_S)

    def _passed(self, rank: int) -> bool:
        result = Path(self.job.directory) / f"rank{rank}.result"
        return (
            self.statuses[rank] == 0
            and result.exists()
            and pickle.loads(result.read_bytes())[0] == PASSED
        )

    def wait(self) -> bool:
        """Until all ranks have ended or were given up. False when pytest is gone."""
        while True:
            self._reap()
            if not self.rank_of:
                return True
            left = self.deadline - time.monotonic()
            if left <= 0:
                self._give_up()
                return True
            watched: list[Any] = [self.wakeup, self.connection]
            readable, _, _ = select.select(watched, [], [], left)
            if self.wakeup in readable:
                os.read(self.wakeup, 4096)
            if self.connection in readable:
                # pytest sends nothing while a job runs: it has closed its end.
                self.kill()
                return False

    def _give_up(self) -> None:
        self.given_up = set(self.rank_of.values())
        for pid in self.rank_of:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        # The handler writes within microseconds unless the process is stopped; nothing tells when
        # it is done.
        time.sleep(DUMP_S)
        self.kill()

    def kill(self) -> None:
        for pid, rank in self.rank_of.items():
            _kill_group(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self.statuses[rank] = os.waitpid(pid, 0)[1]
        self.rank_of.clear()


def _become_rank(job: Job, rank: int, connection: socket.socket) -> None:
    code = 1
    try:
        os.setpgid(0, 0)
        connection.close()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        _run_rank(job, rank)
        code = 0
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        # Not sys.exit: pytest's exit handlers and the template's stack must not run here.
        os._exit(code)


def seed_the_host_alone() -> None:
    """Where torch is built for the host alone, let `torch.manual_seed` leave out the devices: it
    would write down each seed for every kind of them, with the stack of the call, which takes a
    millisecond where tests call it.
    """
    import torch

    if not any(getattr(torch.version, kind, None) for kind in ("cuda", "hip", "xpu")):
        for module in (torch.cuda, torch.xpu, torch.mtia):
            module.manual_seed_all = lambda seed: None


def look_for_fake_tensors_where_some_may_be() -> None:
    """Let `torch.load` ask whether tensors are fake only where a mode or a trace could make them
    so: it asks three times for each tensor, which takes a third of the time of small files.
    """
    import torch

    guards, detect = torch._guards, torch._guards.detect_fake_mode

    def detect_fake_mode(inputs: Any = None) -> Any:
        if inputs is None and not torch._C._len_torch_dispatch_stack():
            if guards.TracingContext.try_get() is None:
                return None
        return detect(inputs)

    guards.detect_fake_mode = detect_fake_mode


# After so many a run has others to come.
MANY_JOBS = 20
HUGE = 1 << 21  # bytes of the pages that most processors have beside small ones
MADV_COLLAPSE = 25  # Linux 6.1 and later


def let_gloo_wait() -> None:
    """Give way, in the thread that polls the connections of gloo, to those that use them: it asks
    again and again for what they hold, a quarter of what exchanging small tensors takes.
    """
    for name in Path("/proc/self/task").glob("*/comm"):  # none but on Linux
        with contextlib.suppress(OSError):  # others end
            if name.read_text(encoding="utf-8").startswith("gloo"):
                os.setpriority(os.PRIO_PROCESS, int(name.parent.name), 10)


def use_huge_pages() -> None:
    """Move this process' memory to huge pages, where the kernel can: forking it, and ending what
    was forked, takes a third of the time then. This takes as long as forking fifty ranks saves.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        addresses, access, _, _, inode, *_ = line.split()
        start, end = (int(address, 16) for address in addresses.split("-"))
        first, last = -(-start // HUGE) * HUGE, end // HUGE * HUGE
        if inode == "0" and access == "rw-p" and first < last:
            for page in range(first, last, HUGE):
                libc.madvise(page, HUGE, MADV_COLLAPSE)  # or not: a page that is not in use


def forget_accelerator() -> None:
    """Let `get_accelerator` look at the machine and the environment again."""
    real_accelerator = sys.modules.get("deepspeed.accelerator.real_accelerator")
    if real_accelerator is not None:
        vars(real_accelerator)["ds_accelerator"] = None


def find_the_host() -> None:
    """Choose the accelerator for all ranks where it is the host. Looking for plug-ins reads a file
    of each installed package.
    """
    from deepspeed.accelerator import real_accelerator

    # Devices, and the simulated one, begin with the rank that uses them.
    wanted = os.environ.get(real_accelerator.ACCELERATOR_ENV, "cpu")
    if wanted != "cpu" or real_accelerator.get_accelerator()._name != "cpu":
        forget_accelerator()


def become_template(with_deepspeed: bool = True) -> None:
    """Make this process one that ranks are forked from: do here once what every rank would do at
    its start. ``with_deepspeed`` imports this package, and builds what every engine asks: patterns
    and the configuration's models, which take as long as a small test. Nothing else of it runs: a
    warning that is given once, or a counter, would not be as new in the ranks.
    """
    import torch

    if hasattr(os, "SCHED_BATCH"):
        # There are more ranks than cores. The thread that a message wakes would push its sender off
        # the core while that still holds the connection, and gloo polls until it has let go: half
        # of all time. Threads of this class do not push others off when they wake.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    torch.set_num_threads(1)
    for name in (*OTHERS_PRELOADED, *(PRELOADED if with_deepspeed else ())):
        # A broken import is the tests' to report: they meet it again in the rank.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    if with_deepspeed:
        with contextlib.suppress(Exception):
            from deepspeed._absent import reason
            from deepspeed.runtime.config_models.features import DeepSpeedMonitorConfig
            from deepspeed.runtime.config_models.reader import read_block
            from deepspeed.runtime.config_models.training import TrainingConfig
            from deepspeed.runtime.engine import DeepSpeedEngine
            from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

            # Compiles the patterns that each new engine asks by.
            for kind in (*DeepSpeedEngine.__mro__, *DeepSpeedZeroOptimizer_Stage3.__mro__):
                reason(f"{kind.__module__}.{kind.__qualname__}", "")
            read_block(TrainingConfig, {})
            DeepSpeedMonitorConfig()
        with contextlib.suppress(Exception):
            find_the_host()
    # Python remembers the folders of packages, among which each rank looks for accelerators.
    importlib.metadata.entry_points(group="deepspeed")
    gc.collect()
    # This keeps the collector from touching, and thereby copying, shared pages in every rank.
    gc.freeze()


def _serve(connection: socket.socket) -> None:
    """The template: run jobs one after the other until pytest closes the connection."""
    # A terminal's Ctrl-C goes to pytest; the template ends when pytest closes the socket.
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    wakeup, wakeup_write = os.pipe()
    os.set_blocking(wakeup_write, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    become_template()
    jobs = 0
    while (message := _receive(connection)) is not None:
        jobs += 1
        if jobs == MANY_JOBS:
            use_huge_pages()
        watch = _Watch(pickle.loads(message), connection, wakeup)
        for name in watch.job.imports:
            # As above; and other versions of torch have other modules.
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        watch.start()
        if not watch.wait():
            return
        _send(connection, pickle.dumps((watch.statuses, watch.given_up)))


# -- in pytest -------------------------------------------------------------------------------------


class RankServer:
    """pytest's end: one template, made at the first use or by `start`."""

    def __init__(self) -> None:
        self._connection: socket.socket | None = None
        self._pid = 0
        self._owner = 0

    def start(self) -> None:
        """Fork the template, unless there is one."""
        if self._connection is not None:
            return
        ours, theirs = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        self._owner = os.getpid()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                ours.close()
                _serve(theirs)
                code = 0
            finally:
                os._exit(code)
        theirs.close()
        self._connection, self._pid = ours, pid

    def stop(self) -> None:
        """End the template and everything it runs."""
        if self._connection is None or self._owner != os.getpid():
            return
        self._connection.close()
        self._connection = None
        os.waitpid(self._pid, 0)

    def run(self, job: Job) -> list[RankResult]:
        """Run a job to its end; one result per rank. RuntimeError if the template is gone."""
        job.directory = tempfile.mkdtemp(prefix="ranks-")
        job.payload = pickle.dumps(job.payload)
        try:
            self.start()
            if self._connection is None:
                raise AssertionError("start() left no connection to the template")
            _send(self._connection, pickle.dumps(job))
            reply = _receive(self._connection)
            if reply is None:
                self.stop()
                what = "the process from which ranks are forked has died; its output is above"
                raise RuntimeError(what)
            statuses, given_up = pickle.loads(reply)
            directory = Path(job.directory)
            ranks = range(job.num_ranks)
            return [_collect(directory, rank, statuses[rank], rank in given_up) for rank in ranks]
        except BaseException:
            # An interrupt may have left a job running and its reply unread.
            self.stop()
            raise
        finally:
            shutil.rmtree(job.directory, ignore_errors=True)


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _own_frames(stacks: str) -> str:
    """faulthandler's text without the frames of the harness and of pytest."""
    kept: list[str] = []
    skipping = False
    for line in stacks.splitlines():
        if not line.startswith("  File "):
            skipping = False
        elif line.endswith(" in _run_rank"):
            skipping = True
        if not skipping and not line.startswith("Extension modules:"):
            kept.append(line)
    return "\n".join(kept)


def _collect(directory: Path, rank: int, status: int, given_up: bool) -> RankResult:
    output = _read(directory / f"rank{rank}.out")
    stacks = _own_frames(_read(directory / f"rank{rank}.stacks"))
    result = directory / f"rank{rank}.result"
    code = os.waitstatus_to_exitcode(status)
    how = f"ended the process with exit code {code}"
    if code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
    if result.exists():
        outcome, text, ended_at = pickle.loads(result.read_bytes())
        if outcome == PASSED and code and not given_up:
            # After the others' failures, of which it may be a consequence.
            text, after_all = f"passed the test and {how} afterwards", sys.float_info.max
            return RankResult(rank, FAILED, text, output, after_all, stacks)
        return RankResult(rank, outcome, text, output, ended_at, stacks if given_up else "")
    if given_up:
        return RankResult(rank, FAILED, "did not end", output, stacks=stacks)
    return RankResult(rank, FAILED, how, output, ended_at=0.0, stacks=stacks)

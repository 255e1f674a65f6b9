"""What the launched processes print: on the launcher's own output, by rank, or in files.

Owns the named pipes that they write to, the thread that reads them, and the memory of when each
ended and what it last wrote to stderr. Pipes instead of files that are followed: nothing
accumulates on disk, and a line appears when it is written.
"""

import contextlib
import os
import selectors
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

TRACEBACK_START = b"Traceback (most recent call last):"
CHAIN_LINKS = (b"During handling of the above", b"The above exception was the direct cause")
IDLE_FLUSH_SECONDS = 0.1
MEMORY_LINES = 400


@dataclass
class _Page:
    """What is read as one text: the launcher's stdout with its stderr, or a rank's file."""

    open_line: "_Stream | None" = None  # the stream whose line at the end is unfinished


@dataclass
class _Stream:
    """One rank's stdout or stderr while it is read."""

    local_rank: int
    descriptor: int
    sink: BinaryIO
    page: _Page
    prefix: bytes
    is_stderr: bool
    pending: bytes = b""
    mid_line: bool = False


@dataclass
class RankHistory:
    """What is known of one process."""

    pid: int | None = None  # its process id; None until it has started
    exited_at: float | None = None  # monotonic seconds of its end; None while it runs
    # Negative for a signal; None while it runs, and where its parent took the code first.
    code: int | None = None
    traceback_at: float | None = None  # monotonic seconds of the last traceback on its stderr
    # Its last lines on stderr, without prefix.
    stderr_tail: deque[bytes] = field(default_factory=lambda: deque(maxlen=MEMORY_LINES))

    def forget(self) -> None:
        """Begin anew, for another process in the same place."""
        self.pid = self.exited_at = self.code = self.traceback_at = None
        self.stderr_tail.clear()

    def last_traceback(self) -> list[bytes]:
        """Return the last traceback with those it is chained to, or else the last 20 lines."""
        lines = list(self.stderr_tail)
        starts = [index for index, line in enumerate(lines) if TRACEBACK_START in line]
        if not starts:
            return lines[-20:]
        first = starts.pop()
        while starts:
            between = b"\n".join(lines[max(first - 3, 0) : first])
            if not any(link in between for link in CHAIN_LINKS):
                break
            first = starts.pop()
        return lines[first:]


class RankLogs:
    """Reads what the local processes write, on a thread of its own.

    Call order: construct, `start()`, let the processes open `stdout_path(n)` and `stderr_path(n)`
    and write "<local rank> <pid> <rank>" to `control_path`, wait for them, `stop()`. `history` may
    be read after `stop()`, as may `first_rank`, the global rank of local rank 0, which an elastic
    agent changes when it restarts processes.

    Args:
        folder: existing folder for the pipes; the caller removes it afterwards.
        global_ranks: the global rank of each local rank.
        log_dir: write each rank to `<log_dir>/<time>_rank<n>.log` instead of this process's output.
        on_start: called on the reading thread with (global rank, pid) of a new process.
    """

    def __init__(
        self,
        folder: Path,
        global_ranks: list[int],
        log_dir: str | None = None,
        on_start: Callable[[int, int], None] | None = None,
    ) -> None:
        self.history = [RankHistory() for _ in global_ranks]
        self.control_path = folder / "control"
        self.first_rank = global_ranks[0]
        self._folder = folder
        self._on_start = on_start
        self._selector = selectors.DefaultSelector()
        self._files: list[BinaryIO] = []
        self._thread = threading.Thread(target=self._pump, name="deepspeed-rank-logs", daemon=True)
        self._stopping = threading.Event()
        self._control_pending = b""
        self._pidfds: dict[int, int] = {}
        self._control = self._make_pipe(self.control_path)
        self._selector.register(self._control, selectors.EVENT_READ, None)
        stamp = time.strftime("%Y%m%d%H%M%S")
        page = _Page()
        for local_rank, rank in enumerate(global_ranks):
            sinks: tuple[BinaryIO, BinaryIO] = (sys.stdout.buffer, sys.stderr.buffer)
            prefix = f"[rank{rank}]: ".encode()
            if log_dir:
                Path(log_dir).mkdir(parents=True, exist_ok=True)
                file = open(Path(log_dir) / f"{stamp}_rank{rank}.log", "wb")  # noqa: SIM115 closed in stop()
                self._files.append(file)
                sinks, prefix, page = (file, file), b"", _Page()
            paths = (self.stdout_path(local_rank), self.stderr_path(local_rank))
            for path, sink, is_stderr in zip(paths, sinks, (False, True), strict=True):
                stream = _Stream(local_rank, self._make_pipe(path), sink, page, prefix, is_stderr)
                self._selector.register(stream.descriptor, selectors.EVENT_READ, stream)

    def stdout_path(self, local_rank: int) -> Path:
        """Return the pipe that a process opens as its stdout."""
        return self._folder / f"stdout{local_rank}"

    def stderr_path(self, local_rank: int) -> Path:
        """Return the pipe that a process opens as its stderr."""
        return self._folder / f"stderr{local_rank}"

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def stop(self) -> None:
        """Read what is left, end the thread, and close pipes and files. Idempotent."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            os.close(key.fd)
        self._selector.close()
        for file in self._files:
            file.close()

    @staticmethod
    def _make_pipe(path: Path) -> int:
        os.mkfifo(path, 0o600)
        # The reader must come first: a writer's open blocks until there is one. Being a writer too
        # keeps the pipe from reporting an end of file again and again when no process has it open.
        return os.open(path, os.O_RDWR | os.O_NONBLOCK)

    def _pump(self) -> None:
        """Read until stopped, then until every pipe is empty: no word of a dead process is lost."""
        while True:
            last_round = self._stopping.is_set()
            events = self._selector.select(timeout=0 if last_round else IDLE_FLUSH_SECONDS)
            progressed = [self._handle(key) for key, _ in events]
            if not any(progressed):
                self._flush_idle(force=last_round)
                if last_round:
                    return

    def _handle(self, key: selectors.SelectorKey) -> bool:
        """Take what one descriptor has; False if that was nothing."""
        if isinstance(key.data, int):
            self._mark_exited(key.data)
            return True
        try:
            chunk = os.read(key.fd, 65536)
        except BlockingIOError:
            return False
        if key.data is None:
            self._read_control(chunk)
        else:
            self._take(key.data, chunk)
        return True

    def _read_control(self, chunk: bytes) -> None:
        *lines, self._control_pending = (self._control_pending + chunk).split(b"\n")
        for line in lines:
            local_rank, pid, rank = map(int, line.split())
            self.first_rank = rank - local_rank
            self._begin_again(local_rank, rank)
            self.history[local_rank].pid = pid
            self._watch(local_rank, pid)
            if self._on_start:
                self._on_start(rank, pid)

    def _begin_again(self, local_rank: int, rank: int) -> None:
        """Forget the process that this one replaces after a restart, maybe as another rank."""
        if local_rank in self._pidfds:
            # Its end may not have been read yet, and would be taken for the new one's.
            self._mark_exited(local_rank)
        if self.history[local_rank].pid is not None:
            self.history[local_rank].forget()
        for key in self._selector.get_map().values():
            stream = key.data
            if isinstance(stream, _Stream) and stream.local_rank == local_rank and stream.prefix:
                stream.prefix = f"[rank{rank}]: ".encode()

    def _watch(self, local_rank: int, pid: int) -> None:
        """Have the selector report the process's end.

        The agent looks at its processes one after the other and every so often, so that two ends
        look simultaneous to it; which one came first tells the cause from its consequence.
        """
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self.history[local_rank].exited_at = time.monotonic()
        except (AttributeError, OSError):
            # No pidfd on this platform: exited_at stays None and the agent's own order decides.
            return
        else:
            self._pidfds[local_rank] = descriptor
            self._selector.register(descriptor, selectors.EVENT_READ, local_rank)

    def _mark_exited(self, local_rank: int) -> None:
        seen, moment = self.history[local_rank], time.monotonic()
        descriptor = self._pidfds.pop(local_rank)
        with contextlib.suppress(ChildProcessError):
            # The agent takes the code from the kernel; it may ask later than this thread, or never.
            ended = os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if ended is not None:
                exited = ended.si_code == os.CLD_EXITED
                seen.code = ended.si_status if exited else -ended.si_status
        # Last: who waits for the end may take the code from the kernel.
        seen.exited_at = moment
        self._selector.unregister(descriptor)
        os.close(descriptor)

    def _take(self, stream: _Stream, chunk: bytes) -> None:
        """Pass on whole lines; a carriage return ends one too, so that progress bars do not mix."""
        text = stream.pending + chunk
        end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
        stream.pending = text[end:]
        if end == 0:
            return
        if stream.is_stderr:
            self._remember(stream.local_rank, text[:end])
        pieces = text[:end].splitlines(keepends=True)
        lead, page = b"", stream.page
        if page.open_line is not None and page.open_line is not stream:
            lead = b"\n"
            page.open_line.mid_line = False
        page.open_line = None
        marked = [pieces[0] if stream.mid_line else self._mark(stream, pieces[0])]
        marked.extend(self._mark(stream, piece) for piece in pieces[1:])
        stream.mid_line = False
        self._write(stream, lead + b"".join(marked))

    def _flush_idle(self, force: bool) -> None:
        """Show unfinished lines, such as a question, once nothing has followed them for a while."""
        for key in list(self._selector.get_map().values()):
            stream = key.data
            if not isinstance(stream, _Stream) or not stream.pending:
                continue
            lead, page = b"", stream.page
            if page.open_line is not None and page.open_line is not stream:
                if not force:
                    continue
                lead = b"\n"
            if force and stream.is_stderr:
                self._remember(stream.local_rank, stream.pending)
            text = stream.pending if stream.mid_line else self._mark(stream, stream.pending)
            self._write(stream, lead + text + (b"\n" if force else b""))
            stream.pending = b""
            stream.mid_line = not force
            page.open_line = None if force else stream

    @staticmethod
    def _mark(stream: _Stream, line: bytes) -> bytes:
        # torch prefixes tracebacks itself in a process group; an empty line has nothing to mark.
        if line.startswith(stream.prefix) or not line.strip(b"\r\n"):
            return line
        return stream.prefix + line

    def _remember(self, local_rank: int, text: bytes) -> None:
        history = self.history[local_rank]
        for line in text.splitlines():
            if TRACEBACK_START in line:
                history.traceback_at = time.monotonic()
            history.stderr_tail.append(line)

    def _write(self, stream: _Stream, data: bytes) -> None:
        try:
            stream.sink.write(data)
            stream.sink.flush()
        except BrokenPipeError:
            # Our reader is gone (`deepspeed ... | head`): hand the broken pipe on to the writer.
            self._selector.unregister(stream.descriptor)
            os.close(stream.descriptor)

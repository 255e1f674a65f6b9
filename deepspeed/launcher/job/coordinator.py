"""Where the launchers of one job meet, so that the end of one is the end of all, its cause known.

It runs in the command that the user started, or on node 0 where nodes are started by hand.

The protocol, one JSON object per line, over one TCP connection per launcher:

1. `hello` (token, member, port) introduces a launcher; `go` (address, port) answers once all have
   come, with where the ranks meet. `refused` (why) answers a stranger.
2. `beat` goes both ways all the time. Silence for the timeout, or a closed connection, is the loss
   of the peer.
3. `done`: all processes of a launcher ended well. `failed` (failure): one did not; the rest of its
   node has been ended.
4. `stop` (signal) goes to all after the first failure, loss or signal; each ends its processes and
   answers `stopped` (failure, or null where nothing had failed before).
5. `end` (code, failures) goes to all when each is done, stopped or lost. Its code is that of the
   whole job.
"""

import asyncio
import base64
import contextlib
import ipaddress
import json
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from deepspeed.launcher.constants import LOCAL_MASTER_ADDR, node_timeout, start_timeout
from deepspeed.launcher.failures import End, Failure, cause_of

LOST_CODE = 1
LINE_LIMIT = 1 << 22
# For the answers to `stop`: half a minute of patience with the processes, and their cleaning up.
STOP_PATIENCE_SECONDS = 45.0
MAX_BEAT_SECONDS = 2.0
# How long a closed connection may be noticed late. The ranks of a killed launcher die with it, and
# their peers' errors would else look older than the loss, which is their cause: a launcher never
# ends by itself before it is told the job's end.
NOTICE_SECONDS = 2.0


def beat_interval(timeout: float) -> float:
    """Return the seconds between signs of life: several fit into the timeout."""
    return min(MAX_BEAT_SECONDS, timeout / 5)


@dataclass(frozen=True)
class CoordinatorAddress:
    """Where launchers find the coordinator: addresses in order, a port, a word of the job."""

    addresses: list[str]
    port: int
    token: str

    def encode(self) -> str:
        """Return it as one shell-safe word."""
        return base64.urlsafe_b64encode(json.dumps(asdict(self)).encode()).decode()

    @classmethod
    def decode(cls, text: str) -> "CoordinatorAddress":
        """Read what `encode` wrote."""
        try:
            return cls(**json.loads(base64.urlsafe_b64decode(text)))
        except (ValueError, TypeError) as error:
            remedy = "start this through the `deepspeed` command"
            raise ValueError(f"--coordinator={text}: not a launch's address; {remedy}") from error


@dataclass(frozen=True)
class Verdict:
    """The job's exit code, and every failure with its launcher's name, the cause first."""

    code: int
    failures: list[tuple[str, Failure]]


@dataclass
class _Member:
    """One launcher; `settled`: it has nothing left to do."""

    label: str
    writer: asyncio.StreamWriter | None = None
    port: int = 0
    settled: bool = False


@dataclass
class _State:
    """What the coordinator's thread alone touches."""

    members: list[_Member]
    failures: list[tuple[float, str, Failure]] = field(default_factory=list)
    stopping: bool = False
    interrupted_by: int | None = None


class Coordinator:
    """Serves the launchers of one job from a thread.

    Call order: construct, `start()`, start the launchers with `address`, `wait()`, `close()`.

    Args:
        labels: one name per launcher, as error messages say it.
        addresses: this machine's addresses as the launchers see them.
        master_addr: where the ranks meet; "" finds out where rank 0 can be reached.
        port: port to listen on; 0 is any.
        token: the word that launchers must say; a random one if not given.
    """

    def __init__(
        self,
        labels: list[str],
        addresses: list[str],
        master_addr: str = "",
        port: int = 0,
        token: str | None = None,
    ) -> None:
        dual = socket.has_dualstack_ipv6()
        self._listener = socket.create_server(
            ("", port),
            family=socket.AF_INET6 if dual else socket.AF_INET,
            dualstack_ipv6=dual,
            backlog=len(labels) + 8,
        )
        self._state = _State([_Member(label) for label in labels])
        self._timeout, self._start_timeout = node_timeout(), start_timeout()
        self._master_addr = master_addr
        port, word = self._listener.getsockname()[1], secrets.token_hex(8)
        self.address = CoordinatorAddress(addresses, port, word if token is None else token)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="deepspeed-coordinator", daemon=True)
        self._finished = threading.Event()
        self._verdict: Verdict | None = None
        self._ending = asyncio.Event()

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def wait(self, timeout: float | None = None) -> Verdict | None:
        """Return how the job ended, or None when it has not within `timeout` seconds."""
        self._finished.wait(timeout)
        return self._verdict

    def stop(self, signum: int) -> None:
        """End the job, without waiting; a second call cuts the processes' grace short."""
        self._call(lambda: self._interrupt(signum))

    def fail(self, member: int | None, subject: str, how: str, code: int) -> None:
        """Report a failure for a launcher that cannot; None stands for all that have not come."""
        self._call(lambda: self._fail_from_outside(member, Failure(subject, how, code)))

    def close(self) -> None:
        """End the thread and the connections; the launchers take that as the loss of their job."""
        self._call(self._ending.set)
        self._thread.join()

    def _call(self, action: Callable[[], None]) -> None:
        # After the end there is no loop to call into, and nothing left to do.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(action)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve_all())
        finally:
            self._loop.close()
            self._finished.set()

    async def _serve_all(self) -> None:
        server = await asyncio.start_server(self._serve, sock=self._listener, limit=LINE_LIMIT)
        late = self._loop.call_later(self._start_timeout, self._miss_late_ones)
        beats = self._loop.create_task(self._beat())
        await self._ending.wait()
        late.cancel()
        beats.cancel()
        for member in self._state.members:
            if member.writer is not None:
                member.writer.close()
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _beat(self) -> None:
        while True:
            self._broadcast({"type": "beat"})
            await asyncio.sleep(beat_interval(self._timeout))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Talk with one launcher until it or the job is gone."""
        member: _Member | None = None
        why, age = "a lost connection: its launcher was killed, or its machine went down", None
        try:
            member = self._welcome(await self._read(reader), writer)
            while member is not None:
                self._take(member, await self._read(reader))
        except asyncio.TimeoutError:
            cut = "its network is cut, or its machine is down or stopped"
            why, age = f"no sign of life for {self._timeout:g} seconds: {cut}", self._timeout
        except (OSError, ValueError, TypeError, EOFError):
            # The connection broke, or a stranger speaks another protocol; `why` says it.
            pass
        finally:
            writer.close()
        if member is not None and not member.settled:
            self._lose(member, why, NOTICE_SECONDS if age is None else age)

    async def _read(self, reader: asyncio.StreamReader) -> dict[str, Any]:
        line = await asyncio.wait_for(reader.readline(), self._timeout)
        if not line.endswith(b"\n"):
            raise EOFError
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError(f"not a message: {message!r}")
        return message

    def _welcome(self, hello: dict[str, Any], writer: asyncio.StreamWriter) -> _Member | None:
        number, members = hello.get("member"), self._state.members
        why = None
        if hello.get("token") != self.address.token:
            why = "it belongs to another job; start all nodes with the same hostfile and flags"
        elif not isinstance(number, int) or not 0 <= number < len(members):
            why = f"number {number} is not in 0..{len(members) - 1}"
        elif members[number].writer is not None:
            label = members[number].label
            why = f"{label} has come already; give each node a --node_rank of its own"
        elif self._state.stopping:
            why = "it comes too late: the job has failed or was stopped"
        if why is not None or not isinstance(number, int):
            _send(writer, {"type": "refused", "why": why})
            return None
        member = members[number]
        member.writer, member.port = writer, int(hello.get("port") or 0)
        if all(other.writer is not None for other in members):
            port = members[0].port
            go = {"type": "go", "master_addr": self._find_master(), "master_port": port}
            self._broadcast(go)
        return member

    def _find_master(self) -> str:
        """Return the address at which the other nodes reach rank 0: each connection has shown one
        that works. Where rank 0 came over the loopback, it runs on this machine, which the others
        know by the address that they came to.
        """
        if self._master_addr:
            return self._master_addr
        writers = [member.writer for member in self._state.members if member.writer is not None]
        peer, own = (_host(writers[0].get_extra_info(side)) for side in ("peername", "sockname"))
        # An address of this machine that it reaches itself at need not lead here from elsewhere.
        others = writers[1:] if peer == own else []
        candidates = [*(_host(writer.get_extra_info("sockname")) for writer in others), peer]
        far = (host for host in candidates if not ipaddress.ip_address(host).is_loopback)
        return next(far, LOCAL_MASTER_ADDR)

    def _take(self, member: _Member, message: dict[str, Any]) -> None:
        kind = message.get("type")
        if kind == "beat":
            return
        if message.get("failure") is not None:
            self._add_failure(member.label, Failure(**message["failure"]))
        member.settled = True
        if kind == "failed":
            self._stop_all()
        self._end_if_settled()

    def _add_failure(self, label: str, failure: Failure) -> None:
        # Clocks of machines differ; the age by the sender's own clock gives the moment by ours.
        self._state.failures.append((time.monotonic() - failure.age, label, failure))

    def _lose(self, member: _Member, why: str, age: float = 0.0) -> None:
        member.settled = True
        self._stop_for(Failure(member.label, why, LOST_CODE, age))

    def _fail_from_outside(self, number: int | None, failure: Failure) -> None:
        members = self._state.members
        gone = [members[number]] if number is not None else self._absent()
        waiting = [member for member in gone if member.writer is None and not member.settled]
        if self._verdict is not None or not waiting:
            return
        for member in gone:
            member.settled = True
        self._stop_for(failure)

    def _stop_for(self, failure: Failure) -> None:
        self._add_failure("", failure)
        self._stop_all()
        self._end_if_settled()

    def _absent(self) -> list[_Member]:
        return [member for member in self._state.members if member.writer is None]

    def _miss_late_ones(self) -> None:
        why = f"no word from its launcher within {self._start_timeout:g} seconds of the start"
        for member in [member for member in self._absent() if not member.settled]:
            self._lose(member, why)

    def _interrupt(self, signum: int) -> None:
        if self._state.stopping:
            # The user is asking again: to launchers, SIGINT behind another signal means at once.
            for member in self._state.members:
                self._tell_to_stop(member, signal.SIGINT)
            return
        self._state.interrupted_by = signum
        self._stop_all(signum)
        self._end_if_settled()

    def _stop_all(self, signum: int = signal.SIGTERM) -> None:
        if self._state.stopping:
            return
        self._state.stopping = True
        for member in self._state.members:
            if member.writer is not None:
                self._tell_to_stop(member, signum)
            else:
                # It has not come and is not waited for; if it does come, it is sent away.
                member.settled = True
        self._loop.call_later(STOP_PATIENCE_SECONDS, self._give_up)

    def _tell_to_stop(self, member: _Member, signum: int = signal.SIGTERM) -> None:
        if member.writer is not None and not member.settled:
            _send(member.writer, {"type": "stop", "signal": int(signum)})

    def _give_up(self) -> None:
        why = f"processes that did not stop within {STOP_PATIENCE_SECONDS:g} seconds"
        for member in self._state.members:
            if not member.settled:
                self._lose(member, why)

    def _end_if_settled(self) -> None:
        if self._verdict is not None or not all(member.settled for member in self._state.members):
            return
        ordered = sorted(self._state.failures, key=lambda entry: entry[0])
        if ordered:
            ends = [
                End(moment, moment + one.lasted, one.signal, one.is_of_lost_peer)
                for moment, _, one in ordered
            ]
            ordered.insert(0, ordered.pop(cause_of(ends)))
        failures = [(label, failure) for _, label, failure in ordered]
        code = failures[0][1].code if failures else 0
        if self._state.interrupted_by is not None:
            code = 128 + self._state.interrupted_by
        self._verdict = Verdict(code, failures)
        told = [(label, asdict(failure)) for label, failure in failures]
        self._broadcast({"type": "end", "code": code, "failures": told})
        self._finished.set()

    def _broadcast(self, message: dict[str, Any]) -> None:
        for member in self._state.members:
            if member.writer is not None:
                _send(member.writer, message)


def _send(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    # A connection that breaks is noticed by its reader. Messages are small: the buffer of a cut one
    # grows by beats only.
    if not writer.is_closing():
        writer.write(json.dumps(message).encode() + b"\n")


def _host(endpoint: tuple[Any, ...]) -> str:
    return str(endpoint[0]).removeprefix("::ffff:")

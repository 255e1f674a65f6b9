"""A launcher's side of the protocol that `coordinator` describes: when to go and when to stop."""

import contextlib
import ipaddress
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from deepspeed.launcher.constants import LOCAL_MASTER_ADDR, node_timeout, start_timeout
from deepspeed.launcher.failures import Failure
from deepspeed.launcher.job.coordinator import CoordinatorAddress, Verdict, beat_interval

CONNECT_SECONDS = 5.0
RETRY_SECONDS = 0.2
Heed = Callable[[int | None], None]


class CoordinatorClient:
    """One launcher's connection, served by a thread; a context manager.

    Call order: enter, `join()`, start the processes, then one of `report_end` and `wait()`.
    `on_stop` is called on the thread with a signal's number when the processes have to end, and
    again when at once; None is for a coordinator that is lost.

    Raises:
        ConnectionError: on entering: the coordinator cannot be reached.
    """

    def __init__(
        self, coordinator: CoordinatorAddress, member: int, port: int, on_stop: Heed
    ) -> None:
        self._coordinator, self._member, self._port = coordinator, member, port
        self._timeout, self._start_timeout = node_timeout(), start_timeout()
        self._on_stop = on_stop
        self._changed = threading.Condition()
        self._go: tuple[str, int] | None = None
        self._end: Verdict | None = None
        self._why_lost: str | None = None
        self.stopped_at: float | None = None
        self._sending = threading.Lock()
        name = "deepspeed-coordinator-client"
        self._thread = threading.Thread(target=self._pump, name=name, daemon=True)

    def __enter__(self) -> "CoordinatorClient":
        self._socket = self._connect()
        hello = {"token": self._coordinator.token, "member": self._member, "port": self._port}
        self._send({"type": "hello", **hello})
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        # A reader of another thread is woken by a shutdown, not by a close.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def join(self) -> tuple[str, int] | None:
        """Wait for all launchers; return where the ranks meet, None if the job ended before."""
        with self._changed:
            self._changed.wait_for(lambda: self._go is not None or self._over())
            return None if self._over() else self._go

    def report_end(self, failure: Failure | None) -> None:
        """Say that this launcher's processes have ended, with a failure or without."""
        kind = "failed" if failure else "done"
        if self.stopped_at is not None:
            kind = "stopped"
        self._send({"failure": asdict(failure) if failure else None, "type": kind})

    def wait(self) -> Verdict:
        """Wait for the end of the job; the loss of the coordinator is one too."""
        with self._changed:
            self._changed.wait_for(lambda: self._end is not None or self._why_lost is not None)
            if self._end is not None:
                return self._end
        return _own_verdict("the command that started the job", str(self._why_lost))

    @property
    def lost(self) -> bool:
        """Whether the coordinator was lost before it told the end of the job."""
        return self._end is None and self._why_lost is not None

    def interface_environment(self) -> dict[str, str]:
        """Return gloo's interface where gloo would take the loopback, which leads to no other node:
        it looks its own host's name up, and many systems map that to 127.0.1.1. The interface that
        leads to the coordinator is a better guess; a setting of the user stays.
        """
        address = self._socket.getsockname()[0].removeprefix("::ffff:")
        is_set = "GLOO_SOCKET_IFNAME" in os.environ
        if is_set or _is_loopback(address) or not _is_loopback(_own_name_address()):
            return {}
        import psutil  # startup: needed only in a job over several nodes

        for name, entries in psutil.net_if_addrs().items():
            if any(entry.address == address for entry in entries):
                return {"GLOO_SOCKET_IFNAME": name}
        return {}

    def _over(self) -> bool:
        return self._end is not None or self._why_lost is not None or self.stopped_at is not None

    def _connect(self) -> socket.socket:
        deadline, port = time.monotonic() + self._start_timeout, self._coordinator.port
        problems: dict[str, str] = {}
        while True:
            for address in self._coordinator.addresses:
                try:
                    made = socket.create_connection((address, port), timeout=CONNECT_SECONDS)
                except OSError as error:
                    problems[address] = str(error)
                else:
                    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    return made
            if time.monotonic() > deadline:
                tried = "; ".join(f"{address}: {problem}" for address, problem in problems.items())
                raise ConnectionError(
                    f"{socket.gethostname()} cannot reach the launching command at port {port} "
                    f"({tried}); let the nodes connect to it, or name its address in "
                    "DS_LAUNCH_ADDRESS"
                )
            time.sleep(RETRY_SECONDS)

    def _send(self, message: dict[str, Any]) -> None:
        # The reading thread notices a broken connection; a sender has nothing to add to it.
        with self._sending, contextlib.suppress(OSError):
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _pump(self) -> None:
        """Read what the coordinator says, and give signs of life, until one of both is over."""
        interval = beat_interval(self._timeout)
        self._socket.settimeout(interval)
        pending, heard = b"", time.monotonic()
        why = "a lost connection"
        while self._end is None:
            self._send({"type": "beat"})
            try:
                chunk = self._socket.recv(65536)
            except TimeoutError:
                if time.monotonic() - heard > self._timeout:
                    why = f"no sign of life for {self._timeout:g} seconds"
                    break
                continue
            except OSError:
                break
            if not chunk:
                break
            heard = time.monotonic()
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                self._take(json.loads(line))
        if self._end is None:
            self._lose(why)

    def _take(self, message: dict[str, Any]) -> None:
        kind = message["type"]
        with self._changed:
            if kind == "go":
                self._go = (message["master_addr"], int(message["master_port"]))
            elif kind == "end":
                told = [(label, Failure(**failure)) for label, failure in message["failures"]]
                self._end = Verdict(int(message["code"]), told)
            elif kind == "refused":
                self._end = _own_verdict("this launcher", f"a refusal: {message['why']}")
            elif kind == "stop":
                self.stopped_at = self.stopped_at or time.monotonic()
            self._changed.notify_all()
        if kind == "stop":
            self._on_stop(int(message["signal"]))

    def _lose(self, why: str) -> None:
        with self._changed:
            first = self.stopped_at is None
            self.stopped_at = self.stopped_at or time.monotonic()
            self._why_lost = why
            self._changed.notify_all()
        if first:
            self._on_stop(None)


def _own_verdict(subject: str, how: str) -> Verdict:
    return Verdict(1, [("", Failure(subject, how, 1))])


def _own_name_address() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        # A name that nobody knows is of no more use than one that leads nowhere.
        return LOCAL_MASTER_ADDR


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback

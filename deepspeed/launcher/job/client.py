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


class CoordinatorClient:
    """One launcher's connection, served by a thread; a context manager.

    Call order: enter, `join()`, start the processes, then one of `report_end` and `wait()`.
    `on_stop` is called on the thread with a signal's number when the processes have to end, and
    again when at once; None is for a coordinator that is lost.

    Raises:
        ConnectionError: on entering: the coordinator cannot be reached.
    """

    def __init__(
        self,
        coordinator: CoordinatorAddress,
        member: int,
        port: int,
        on_stop: Callable[[int | None], None],
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
        self._thread = threading.Thread(
            target=self._pump, name="deepspeed-coordinator-client", daemon=True
        )

    def __enter__(self) -> "CoordinatorClient":
        self._socket = self._connect()
        self._send(
            {
                "type": "hello",
                "token": self._coordinator.token,
                "member": self._member,
                "port": self._port,
            }
        )
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
        message: dict[str, Any] = {"failure": asdict(failure) if failure else None}
        if self.stopped_at is not None:
            message["type"] = "stopped"
        else:
            message["type"] = "failed" if failure else "done"
        self._send(message)

    def wait(self) -> Verdict:
        """Wait for the end of the job; the loss of the coordinator is one too."""
        with self._changed:
            self._changed.wait_for(lambda: self._end is not None or self._why_lost is not None)
            if self._end is not None:
                return self._end
            return Verdict(
                1, [("", Failure("the command that started the job", str(self._why_lost), 1))]
            )

    @property
    def lost(self) -> bool:
        """Whether the coordinator was lost before it told the end of the job."""
        return self._end is None and self._why_lost is not None

    def interface_environment(self) -> dict[str, str]:
        """Return gloo's interface where gloo would take the loopback, which leads to no other node.

        gloo looks its own host's name up, and many systems map that to 127.0.1.1. The interface
        that leads to the coordinator is a better guess; a setting of the user stays.
        """
        address = self._socket.getsockname()[0].removeprefix("::ffff:")
        if (
            "GLOO_SOCKET_IFNAME" in os.environ
            or _is_loopback(address)
            or not _is_loopback(_own_name_address())
        ):
            return {}
        import psutil  # startup: needed only in a job over several nodes

        names = [
            name
            for name, entries in psutil.net_if_addrs().items()
            if any(entry.address == address for entry in entries)
        ]
        return {"GLOO_SOCKET_IFNAME": names[0]} if names else {}

    def _over(self) -> bool:
        return self._end is not None or self._why_lost is not None or self.stopped_at is not None

    def _connect(self) -> socket.socket:
        deadline = time.monotonic() + self._start_timeout
        problems: dict[str, str] = {}
        while True:
            for address in self._coordinator.addresses:
                try:
                    connection = socket.create_connection(
                        (address, self._coordinator.port), timeout=CONNECT_SECONDS
                    )
                except OSError as error:
                    problems[address] = str(error)
                else:
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    return connection
            if time.monotonic() > deadline:
                tried = "; ".join(f"{address}: {problem}" for address, problem in problems.items())
                raise ConnectionError(
                    f"{socket.gethostname()} cannot reach the launching command at port "
                    f"{self._coordinator.port} ({tried}); let the nodes connect to it, or name its "
                    "address in DS_LAUNCH_ADDRESS"
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
                self._end = Verdict(
                    1, [("", Failure("this launcher", f"a refusal: {message['why']}", 1))]
                )
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


def _own_name_address() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        # A name that nobody knows is of no more use than one that leads nowhere.
        return LOCAL_MASTER_ADDR


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback

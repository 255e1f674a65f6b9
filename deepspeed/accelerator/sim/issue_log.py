"""What a program issues to the simulated device, in order: enough to run it again on a device of
other limits (`deepspeed.verify.budgets`).

An event at position p of a stream stands behind all its entries whose position is at most p.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from deepspeed.accelerator.call_stacks import capture, describe


class Kernel(NamedTuple):
    """Computation of one stream; several, if nothing else was issued between them."""

    stream: int
    position: int


class StreamWait(NamedTuple):
    """`stream` waits for the entries of `other` up to `until`."""

    stream: int
    position: int
    other: int
    until: int


class Communication(NamedTuple):
    """An operation in which other ranks take part; `own` and `others` are keys of the parts (kind
    and number), `is_message` one between two ranks.
    """

    stream: int
    position: int
    name: str
    own: tuple[str, int]
    others: tuple[tuple[int, tuple[str, int]], ...]
    is_message: bool
    place: str


class HostWait(NamedTuple):
    """The host waits for the entries of `stream` up to `until`."""

    stream: int
    until: int
    place: str


class HostMeeting(NamedTuple):
    """The host itself waits for other ranks' hosts."""

    name: str
    own: tuple[str, int]
    others: tuple[tuple[int, tuple[str, int]], ...]
    place: str


Entry = Kernel | StreamWait | Communication | HostWait | HostMeeting


_MAX_FRAMES = 5


def _here() -> str:
    return "\n".join(describe(capture(_MAX_FRAMES), "      "))


class IssueLog:
    """The entries of one rank, in order of issue, and the names of the streams by number."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.names: list[str] = []
        self._numbers: dict[Hashable, int] = {}

    def _number(self, stream: Hashable) -> int:
        if stream not in self._numbers:
            self._numbers[stream] = len(self.names)
            self.names.append(repr(stream))
        return self._numbers[stream]

    def kernel(self, stream: Hashable, position: int) -> None:
        entry = Kernel(self._number(stream), position)
        last = self.entries[-1] if self.entries else None
        if isinstance(last, Kernel) and last.stream == entry.stream:
            self.entries.pop()
        self.entries.append(entry)

    def stream_wait(self, stream: Hashable, position: int, other: Hashable, until: int) -> None:
        self.entries.append(StreamWait(self._number(stream), position, self._number(other), until))

    def communication(
        self,
        stream: Hashable,
        position: int,
        name: str,
        own: tuple[str, int],
        others: tuple[tuple[int, tuple[str, int]], ...],
        is_message: bool,
    ) -> None:
        number = self._number(stream)
        self.entries.append(Communication(number, position, name, own, others, is_message, _here()))

    def host_wait(self, stream: Hashable, until: int) -> None:
        if stream in self._numbers:
            self.entries.append(HostWait(self._numbers[stream], until, _here()))

    def host_meeting(
        self, name: str, own: tuple[str, int], others: tuple[tuple[int, tuple[str, int]], ...]
    ) -> None:
        self.entries.append(HostMeeting(name, own, others, _here()))

"""What happens on streams, told to a listener: the vocabulary of devices and the stream checker.
Nothing is reported, and nothing costs anything, while no tracer is set.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch


class Access(NamedTuple):
    """One byte range, `start` to `end` of a storage, that an operator reads or writes. `storage`
    numbers one life of a piece of memory, `address` names the memory in reports.
    """

    storage: int
    start: int
    end: int
    writes: bool
    address: int


class HostLane:
    """Stands for what goes on beside host and device where a stream is expected: no wait for the
    whole device is one for it.
    """


class StreamTracer(Protocol):
    """Listener, told in the order in which the host issues. Streams and events are any hashable
    objects whose `repr` a reader can tell apart.
    """

    def launched(self, operator: str, stream: Hashable, accesses: Sequence[Access]) -> None:
        """An operator (or collective) was issued on `stream`; it runs some time later."""

    def host_accessed(self, operator: str, accesses: Sequence[Access]) -> None:
        """The host itself read or wrote memory, now; what it waited for was reported before."""

    def event_recorded(self, event: Hashable, stream: Hashable) -> None:
        """`event` now stands for the work issued on `stream` so far, and nothing else."""

    def event_waited(self, event: Hashable, stream: Hashable) -> None:
        """Work issued on `stream` from now on runs after `event`, if that was ever recorded."""

    def event_synchronized(self, event: Hashable) -> None:
        """The host has waited for `event`."""

    def stream_synchronized(self, stream: Hashable) -> None:
        """The host has waited for all work of `stream`."""

    def device_synchronized(self) -> None:
        """The host has waited for all work of all streams."""

    def allocated(self, storage: int, nbytes: int, stream: Hashable) -> None:
        """Memory was handed out to `stream`: any memory that was freed for it before."""

    def freed(self, storage: int) -> None:
        """The last Python reference is gone: the memory may be handed out on its stream again."""

    def stream_recorded(self, storage: int, stream: Hashable) -> None:
        """`record_stream`: freed memory is not given out before `stream`'s work by then is done."""


class TracedCollective(Protocol):
    """A collective that was issued on a stream of its own."""

    def stream_waits(self) -> None:
        """The stream current now waits for it."""

    def host_waited(self) -> None:
        """The host knows that it is done."""


class CollectiveTracing(Protocol):
    """A trace that has to be told of collectives: their backend orders them past its sight."""

    def collective(
        self, name: str, group: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
    ) -> TracedCollective:
        """Called right before a collective of `group` is issued, with the tensors it touches."""

"""Collectives of a device whose streams torch's backend orders (NCCL), told to its trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from deepspeed import comm as dist
from deepspeed.accelerator.stream_trace import CollectiveTracing, TracedCollective
from deepspeed.comm.watch.observation import CollectiveCall, add_observer, remove_observer

_BY_THE_HOST = ("barrier", "monitored_barrier")
_PAIRWISE = ("send", "recv", "isend", "irecv")


@runtime_checkable
class Awaitable(Protocol):
    """An asynchronous operation's handle."""

    def wait(self, *args: object, **kwargs: object) -> object: ...

    def is_completed(self) -> bool: ...


class TracedWork:
    """An asynchronous operation's handle that also tells who waits for it."""

    def __init__(self, work: Awaitable, issued: TracedCollective) -> None:
        self._work = work
        self._issued = issued

    def wait(self, *args: object, **kwargs: object) -> object:
        """Wait as the wrapped handle does: the current stream waits, the host goes on."""
        result = self._work.wait(*args, **kwargs)
        self._issued.stream_waits()
        return result

    def is_completed(self) -> bool:
        """Tell whether the host knows it to be done."""
        is_done = bool(self._work.is_completed())
        if is_done:
            self._issued.host_waited()
        return is_done

    def __getattr__(self, name: str) -> object:
        return getattr(self._work, name)


class CollectiveTeller:
    """Observer next to the backend."""

    def __init__(self, tracing: CollectiveTracing) -> None:
        self._tracing = tracing

    def run(self, call: CollectiveCall, proceed: Callable[[], object]) -> object:
        """Tell of the operation, issue it, and tell who waits."""
        issued = self._tracing.collective(call.name, _communicator(call), call.reads, call.writes)
        result = proceed()
        if call.async_op and isinstance(result, Awaitable):
            return TracedWork(result, issued)
        issued.stream_waits()
        if call.name in _BY_THE_HOST:
            issued.host_waited()
        return result


def _communicator(call: CollectiveCall) -> str:
    """Name a stream each: every group has its own, and every pair that exchanges something."""
    ranks = dist.get_all_ranks_from_group(call.group)
    if call.name not in _PAIRWISE:
        return f"group {list(ranks)}"
    peer = call.argument("dst" if call.name in ("send", "isend") else "src")
    return f"group {list(ranks)}" + ("" if peer is None else f" with rank {peer}")


@contextmanager
def telling(tracing: CollectiveTracing | None) -> Iterator[None]:
    """Have `deepspeed.comm` tell `tracing` of its operations; None: the device does so itself."""
    if tracing is None:
        yield
        return
    teller = CollectiveTeller(tracing)
    add_observer(teller, innermost=True)
    try:
        yield
    finally:
        remove_observer(teller)

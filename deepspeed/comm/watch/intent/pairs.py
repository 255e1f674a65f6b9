"""Messages from one rank to another: what is sent must be what is expected, in the same order.

Both sides count the messages between them by direction, group and tag, and claim one note in the
store before they issue theirs; who comes second compares. So a mismatch is found before the second
issues anything, and no wrong bytes ever travel; the first learns of it when it waits for its
handle. It never waits for the other where the backend would not: see `_backend_waits`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.process_groups import get_backend_name
from deepspeed.comm.watch.intent.intent_store import IntentStore
from deepspeed.comm.watch.intent.rules import current_site, tensor_text
from deepspeed.comm.watch.observation import CollectiveCall

PAIR_OPERATIONS = ("send", "recv", "isend", "irecv")
_SENDS = ("send", "isend")


class CheckedWork:
    """The handle of a message that is compared when it is waited for."""

    def __init__(self, work: Any, settle: Callable[[], None]) -> None:
        self._work = work
        self._settle: Callable[[], None] | None = settle

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        if self._settle is not None:
            settle, self._settle = self._settle, None
            settle()
        return self._work.wait(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class PairCheck:
    """Compares both sides of messages. A receive from any source cannot be matched in advance: the
    group and tag on which a rank does that are not checked from then on.
    """

    def __init__(self, store: IntentStore, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._counts: defaultdict[str, int] = defaultdict(int)
        self._unordered: set[str] = set()

    def run(self, call: CollectiveCall, group: str, proceed: Callable[[], Any]) -> Any:
        """Compare as far as the other side has come, issue, and compare the rest when waiting."""
        sends = call.name in _SENDS
        peer = call.argument("dst" if sends else "src")
        tag = call.argument("tag")
        receiver = peer if sends else self._rank
        any_source = f"any/{group}/{receiver}/{tag}"
        if peer is None and any_source not in self._unordered:
            self._unordered.add(any_source)
            self._store.write({any_source: "1"})
        if any_source in self._unordered or peer == self._rank:
            return proceed()
        route = f"{self._rank} to {peer}" if sends else f"{peer} to {self._rank}"
        key = f"pair/{group}/{route}/{tag}/{self._number(group, route, tag)}"
        settle = self._meet(call, key, peer, any_source)
        if settle is None:
            return proceed()
        if call.name == "recv" or (call.name == "send" and _backend_waits(call)):
            settle()
            return proceed()
        work = proceed()
        return CheckedWork(work, settle) if call.async_op and work is not None else work

    def _number(self, group: str, route: str, tag: int) -> int:
        name = f"{group}/{route}/{tag}"
        self._counts[name] += 1
        return self._counts[name] - 1

    def _meet(
        self, call: CollectiveCall, key: str, peer: int, any_source: str
    ) -> Callable[[], None] | None:
        """Compare with the other side if it is there, else give what to call before waiting."""
        payload = tensor_text(call.argument("tensor"))
        what = (
            f"{call.name} of {payload} {'to' if call.name in _SENDS else 'from'} rank {peer} at "
            f"{current_site()[0]}"
        )
        mine = json.dumps({"rank": self._rank, "payload": payload, "what": what})
        theirs = json.loads(self._store.claim(key, mine))
        if theirs["rank"] != self._rank:
            if theirs["payload"] != payload:
                number = key.rpartition("/")[2]
                self._store.fail(
                    f"ranks {peer} and {self._rank} do not agree on message number {number} "
                    f"between them with tag {call.argument('tag')}.\n"
                    f"  rank {peer}: {theirs['what']}\n  rank {self._rank}: {what}"
                )
            self._store.erase(key)
            return None
        waits = call.name not in _SENDS or _backend_waits(call)
        return lambda: self._settle(key, peer, what, any_source, waits)

    def _settle(self, key: str, peer: int, what: str, any_source: str, waits: bool) -> None:
        """Wait until the other side has compared, or look whether it has."""
        store = self._store
        if not waits:
            store.raise_if_failed()
            return

        def met() -> bool:
            return not store.has(key) or store.has(any_source)

        store.wait(met, lambda: [] if met() else [peer], what)
        if store.has(any_source):
            self._unordered.add(any_source)
            store.erase(key)


def _backend_waits(call: CollectiveCall) -> bool:
    """Whether the backend's send is complete only when the receiver has come.

    gloo's is. Backends of devices only put it on a stream, and others may buffer: a program in
    which both sides send first and receive then works there, and must with the check.
    """
    tensor: torch.Tensor = call.argument("tensor")
    on_host = tensor.device.type == "cpu" and (
        get_accelerator().is_synchronized_device() or not get_accelerator().on_accelerator(tensor)
    )
    return on_host and get_backend_name(call.group) == "gloo"

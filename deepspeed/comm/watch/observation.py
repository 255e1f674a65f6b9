"""Observers around operations. While nobody watches, `chain` is None and operations call torch
directly; otherwise each becomes a `CollectiveCall` that passes through an `ObserverChain`, from the
outermost observer to the innermost, and at last torch.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as torch_dist

from deepspeed.comm.process_groups import Group
from deepspeed.comm.utils import message_bytes

Handle = Any  # torch's Work, or None when the operation is complete or this rank takes no part


class _Form(NamedTuple):
    """Names of an operation's arguments by position, and which of them hold the tensors that it
    reads, writes, and that are its message.
    """

    parameters: tuple[str, ...]
    reads: str = ""
    writes: str = ""
    message: str = ""


def _form(parameters: str, reads: str = "", writes: str = "", message: str = "") -> _Form:
    return _Form(tuple(parameters.split()), reads, writes, message or reads or writes)


_FORMS = {
    "all_reduce": _form("tensor op group async_op", "tensor", "tensor"),
    "reduce": _form("tensor dst op group async_op", "tensor", "tensor"),
    "reduce_scatter_tensor": _form("output tensor op group async_op", "tensor", "output"),
    "reduce_scatter": _form("output input_list op group async_op", "input_list", "output"),
    "all_reduce_coalesced": _form("tensors op group async_op", "tensors", "tensors"),
    "all_gather": _form("tensor_list tensor group async_op", "tensor", *["tensor_list"] * 2),
    "all_gather_into_tensor": _form("output tensor group async_op", "tensor", *["output"] * 2),
    "all_gather_coalesced": _form("outputs tensors group async_op", "tensors", *["outputs"] * 2),
    "all_gather_object": _form("object_list obj group"),
    "gather": _form("tensor gather_list dst group async_op", "tensor", "gather_list"),
    "broadcast": _form("tensor src group async_op", "tensor", "tensor"),
    "broadcast_object_list": _form("object_list src group device"),
    "scatter": _form("tensor scatter_list src group async_op", "scatter_list", "tensor", "tensor"),
    "all_to_all_single": _form(
        "output tensor output_split_sizes input_split_sizes group async_op", "tensor", "output"
    ),
    "all_to_all": _form("output_list tensor_list group async_op", "tensor_list", "output_list"),
    "send": _form("tensor dst group tag", reads="tensor"),
    "recv": _form("tensor src group tag", writes="tensor"),
    "isend": _form("tensor dst group tag", reads="tensor"),
    "irecv": _form("tensor src group tag", writes="tensor"),
    "barrier": _form("group async_op device_ids"),
    "monitored_barrier": _form("group timeout wait_all_ranks"),
}
# Their message is one such tensor for each rank.
_ONE_PER_RANK = ("gather", "scatter")
_ALWAYS_ASYNC = ("isend", "irecv")


def group_size(group: Group) -> int:
    """The number of ranks in a group (None: the world); 1 when there is no process group."""
    return torch_dist.get_world_size(group) if torch_dist.is_initialized() else 1


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CollectiveCall:
    """One operation of `deepspeed.comm` that is about to be issued.

    `num_bytes` is its message (see `calc_bw_log`); `group` None the world; `log_name` what it is
    listed under instead of `name`; `prof` times it even if it is not among those chosen; `debug` is
    the calling function.
    """

    name: str
    operation: Callable[..., Any]
    args: tuple[Any, ...]
    group: Group = None
    num_bytes: int = 0
    log_name: str | None = None
    prof: bool = False
    debug: str | None = None

    def issue(self) -> Any:
        """Issue it, past all observers; gives a handle if and only if it is still running."""
        return self.operation(*self.args)

    def argument(self, parameter: str, default: object = None) -> Any:
        """The argument called ``parameter`` (`op`, `src`, `tag`, ...), or ``default``."""
        parameters = self._form().parameters
        return self.args[parameters.index(parameter)] if parameter in parameters else default

    @property
    def reads(self) -> list[torch.Tensor]:
        """The tensors that this rank's part reads; pickled objects, the host's, are none."""
        if self.name == "broadcast" and not self._is_source():
            return []
        return _tensors(self.argument(self._form().reads))

    @property
    def writes(self) -> list[torch.Tensor]:
        """The tensors that this rank's part writes."""
        if self.name == "broadcast" and self._is_source():
            return []
        return _tensors(self.argument(self._form().writes))

    @property
    def async_op(self) -> bool:
        """Whether a handle is returned before the operation is complete."""
        return self.name in _ALWAYS_ASYNC or bool(self.argument("async_op", False))

    def with_async(self, async_op: bool) -> CollectiveCall:
        """The same operation, returning a handle (True) or when it is complete (False)."""
        if async_op == self.async_op:
            return self
        parameters = self._form().parameters
        if "async_op" not in parameters:
            raise ValueError(
                f"{self.name} has no async_op={async_op}: it is always "
                f"{'' if self.async_op else 'a'}synchronous"
            )
        position = parameters.index("async_op")
        args = (*self.args[:position], async_op, *self.args[position + 1 :])
        return dataclasses.replace(self, args=args)

    def _form(self) -> _Form:
        return _FORMS.get(self.name, _Form(()))

    def _is_source(self) -> bool:
        return self.argument("src") == torch_dist.get_rank()


def _tensors(argument: Any) -> list[torch.Tensor]:
    if isinstance(argument, torch.Tensor):
        return [argument]
    return list(argument or ())


class CollectiveObserver(Protocol):
    """Watches operations; it may delay, replace or refuse them."""

    def run(self, call: CollectiveCall, proceed: Callable[[], Any]) -> Any:
        """Called for every operation, instead of it; `proceed` issues it, at most once, through the
        observers further inside. Returns its result, or what can be waited for like it.
        """


class ObserverChain:
    """Observers, outermost first. Immutable, so that an operation under way keeps its own."""

    def __init__(self, observers: tuple[CollectiveObserver, ...]) -> None:
        self.observers = observers

    def with_observer(self, observer: CollectiveObserver, innermost: bool) -> ObserverChain:
        """The chain with one more observer at one of its ends, if it is not there already."""
        if observer in self.observers:
            return self
        return ObserverChain(
            (*self.observers, observer) if innermost else (observer, *self.observers)
        )

    def without_observer(self, observer: CollectiveObserver) -> ObserverChain | None:
        """The chain without an observer; None when nobody is left."""
        left = tuple(other for other in self.observers if other is not observer)
        return ObserverChain(left) if left else None

    def run(self, call: CollectiveCall) -> Any:
        proceed: Callable[[], Any] = call.issue
        for observer in reversed(self.observers):
            proceed = partial(observer.run, call, proceed)
        return proceed()


# Compares what operations are for; None while nobody does. See `announce`.
announcer: Callable[[str, Group], None] | None = None

# None while nobody watches: the operations test this one name and call torch.
chain: ObserverChain | None = None


def announce(what: str, group: Group) -> None:
    """Tell what the next operations are for, where shapes do not say it: all ranks of `group`
    announce the same, or whoever compares raises.
    """
    if announcer is not None:
        announcer(what, group)


def add_observer(observer: CollectiveObserver, innermost: bool = False) -> None:
    """Send every operation from now on through ``observer`` too, outside of those there are or next
    to torch; nothing happens if it is one already.
    """
    global chain
    chain = (chain or ObserverChain(())).with_observer(observer, innermost)


def remove_observer(observer: CollectiveObserver) -> None:
    """Stop sending operations through ``observer``; nothing happens if it is none."""
    global chain
    chain = chain and chain.without_observer(observer)


def is_observed_by(observer: CollectiveObserver) -> bool:
    """Whether operations go through ``observer``."""
    return chain is not None and observer in chain.observers


def issue(
    name: str,
    operation: Callable[..., Any],
    args: tuple[Any, ...],
    log_name: str | None = None,
    prof: bool = False,
    debug: str | None = None,
) -> Handle:
    """Call an operation, through the observers if there are any."""
    if chain is None:
        return operation(*args)
    form = _FORMS[name]
    group: Group = args[form.parameters.index("group")]
    num_bytes = message_bytes(args[form.parameters.index(form.message)]) if form.message else 0
    if name in _ONE_PER_RANK:
        num_bytes *= group_size(group)
    call = CollectiveCall(name, operation, args, group, num_bytes, log_name, prof, debug)
    return chain.run(call)


def call_site() -> FrameType | None:
    """Where the operation being observed was called, outside of communication and observers."""
    here = sys._getframe(1)
    frame: FrameType | None = here
    # Observers live anywhere; the operation's caller is beyond the chain that called them.
    while frame is not None and frame.f_code is not ObserverChain.run.__code__:
        frame = frame.f_back
    frame = frame or here
    while frame is not None and frame.f_globals.get("__name__", "").startswith("deepspeed.comm"):
        frame = frame.f_back
    return frame

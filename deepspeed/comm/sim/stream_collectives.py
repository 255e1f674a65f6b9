"""Collectives of a device whose work is deferred: NCCL's order on streams, carried out by a host
backend.

[Note: how a collective is ordered]
An operation goes to an internal stream of its group, which waits for the stream current at the
call. Waiting for its handle makes the stream current *then* wait; the host goes on. An operation
that isn't asynchronous is both at once. In the queue it is two entries: *start* copies the inputs
and hands them to the backend, *finish* waits for the backend and stores the outputs. Copies,
because the backend's threads must not see what the program does to the memory meanwhile: only the
order of the queues decides it.

[Note: no rank waits in vain]
Ranks run their queues at different moments. Whoever finishes an operation has started every
operation that was issued before its handle was waited for, in the order of issue: a device would
have carried them out meanwhile, and another rank may need one of them before it can do its part of
this one. None of them can need the result of this one, because nothing waited for it yet; so while
this one is being finished, others that have to be finished on the way start no more than it may.
Point-to-point operations that came later are started too as far as they can be. They start on a
stream of their own: behind the finish of the one before they could not, and that may need something
from here first. A host that is about to wait for other ranks by itself calls `start_issued` before.
"""

from __future__ import annotations

import atexit
import dataclasses
import sys
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as torch_dist
from torch.utils._python_dispatch import _disable_current_modes

from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.call_stacks import capture, describe
from deepspeed.accelerator.sim.issue_log import IssueLog
from deepspeed.accelerator.sim.queues import Event, Scheduler, Stream, Work
from deepspeed.accelerator.sim.simulator import Simulator
from deepspeed.comm import process_groups
from deepspeed.comm.collectives import WorkList
from deepspeed.comm.sim.nccl_limits import refusal
from deepspeed.comm.sim.stuck_ranks import HostWaitError, Operation, StuckRanks
from deepspeed.comm.watch.observation import CollectiveCall, add_observer

# The host itself takes part in these.
_BY_THE_HOST = ("all_gather_object", "broadcast_object_list", "barrier", "monitored_barrier")
_POINT_TO_POINT = ("send", "recv", "isend", "irecv")


class _Issued:
    """An operation in the queue of an internal stream.

    `call` is on the caller's tensors, until the handle is waited for or the operation is done;
    `memory` on aliases that keep no tensor of the caller alive; `copies` on private memory, while
    the backend has it. `number` and `waited` count the operations issued before it, and before its
    handle was first waited for.
    """

    def __init__(
        self, call: CollectiveCall, memory: CollectiveCall, stream: Stream, operation: Operation
    ) -> None:
        self.call: CollectiveCall | None = call
        self.memory = memory
        self.stream = stream
        self.operation = operation
        self.started = 0
        self.is_starting = False
        self.number = 0
        self.waited: int | None = None
        self.copies: CollectiveCall | None = None
        self.works: list[Any] = []

    @property
    def is_started(self) -> bool:
        return self.stream.done >= self.started

    def start(self) -> None:
        args = tuple(map(_copied, self.memory.args))
        self.copies = dataclasses.replace(self.memory, args=args)
        self.works = _carry_out(self.copies)

    def finish(self, stuck: StuckRanks) -> None:
        with stuck.waiting(self.operation):
            for work in self.works:
                work.wait()
        if self.copies is not None:
            for target, value in zip(self.memory.writes, self.copies.writes, strict=True):
                target.copy_(value)
        self.works, self.copies, self.call = [], None, None


class StreamWork:
    """Handle of an operation on an internal stream; keeps the caller's tensors until waited for."""

    def __init__(self, issued: _Issued, event: Event, waited: Callable[[_Issued], None]) -> None:
        self._event = event
        self._issued = issued
        self._waited = waited

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let the current stream wait; the host goes on."""
        self._waited(self._issued)
        self._event.wait()
        # From here on the order of the current stream protects the memory.
        self._issued.call = None
        return True

    def is_completed(self) -> bool:
        """Whether the operation has run. Runs nothing itself."""
        return self._event.query()


class StreamCollectives:
    """The observer next to the backend; lets all through while the accelerator doesn't defer."""

    def __init__(self) -> None:
        self._streams: dict[Any, Stream] = {}
        self._unstarted: deque[_Issued] = deque()
        self._num_issued = 0
        # How many operations the one that is being finished may start, the outermost of several.
        self._bound: int | None = None
        self._stuck = StuckRanks()
        # Receives whose handles nobody has waited for, with the events behind them.
        self._posted: dict[_Issued, Event] = {}

    def run(self, call: CollectiveCall, proceed: Callable[[], Any]) -> Any:
        simulator = _simulator()
        if simulator is None:
            return proceed()
        if call.name in _BY_THE_HOST:
            self._meet_first(simulator.scheduler, call)
            # As on a device: the host's part comes after everything that was issued.
            simulator.scheduler.synchronize(call.name)
            return self._by_the_host(call, proceed, simulator.scheduler.log)
        work = self._issue(simulator, call)
        if call.async_op:
            return work
        work.wait()
        return call.argument("src") if call.name == "recv" else None

    def _by_the_host(
        self, call: CollectiveCall, proceed: Callable[[], Any], log: IssueLog | None
    ) -> Any:
        operation = self._operation(call, "host")
        if log is not None:
            log.host_meeting(operation.name, *_keys(operation))
        self._stuck.begun(operation)
        with self._stuck.waiting(operation):
            return proceed()

    # Issuing

    def _operation(self, call: CollectiveCall, order: str = "") -> Operation:
        """The call as `StuckRanks` knows it; `order` tells apart what is ordered by itself."""
        group: Any = call.group or torch_dist.group.WORLD
        kind, own = f"{group.group_name} {order}", torch_dist.get_rank()
        peer = self._peer(call)
        if peer is None:
            ranks = process_groups.get_all_ranks_from_group(group)
            others = [(rank, kind) for rank in ranks if rank != own]
            return self._stuck.issued(f"{call.name} of ranks {ranks}", kind, others)
        sends = "send" in call.name
        way = f"{own}>{peer}" if sends else f"{peer}>{own}"
        sent, received = f"{kind} {way} sent", f"{kind} {way} received"
        if sends:
            return self._stuck.issued(f"{call.name} to rank {peer}", sent, [(peer, received)])
        return self._stuck.issued(f"{call.name} from rank {peer}", received, [(peer, sent)])

    def _stream(self, simulator: Simulator, call: CollectiveCall, starts: bool = False) -> Stream:
        group: Any = call.group or torch_dist.group.WORLD
        peer = self._peer(call)
        side = None if peer is None else "to" if "send" in call.name else "from"
        # By name: a group that is destroyed must not live on here.
        key = (simulator, group.group_name, side, peer, starts)
        if key not in self._streams:
            ranks = process_groups.get_all_ranks_from_group(group)
            name = f"nccl stream of group {ranks}"
            name += "" if side is None else f", {side} rank {peer}"
            name += ", start" if starts else ""
            self._streams[key] = simulator.scheduler.stream_class(name=name)
        return self._streams[key]

    def _issue(self, simulator: Simulator, call: CollectiveCall) -> StreamWork:
        refused = refusal(call, simulator.allocator.host.owns)
        if refused is not None:
            raise RuntimeError(f"{call.name}: {refused}")
        scheduler = simulator.scheduler
        self._meet_first(scheduler, call)
        with scheduler.unlogged() as log:
            work, issued, stream = self._queue(simulator, call)
        if log is not None:
            # On a device it is one kernel, where it is one start and one finish here.
            current, end = scheduler.current, stream.issued
            log.stream_wait(stream, end, current, current.issued)
            is_message = call.name in _POINT_TO_POINT
            operation = issued.operation
            log.communication(stream, end, operation.name, *_keys(operation), is_message)
        return work

    def _meet_first(self, scheduler: Scheduler, call: CollectiveCall) -> None:
        """Let the host wait for others' before the first operation of a communicator, which they
        make together: that of a group, or for messages of two ranks. A world that is bound to its
        devices has made them with the groups.
        """
        group: Any = call.group or torch_dist.group.WORLD
        own, peer = torch_dist.get_rank(), self._peer(call)
        pair = "" if peer is None else f" {min(own, peer)},{max(own, peer)}"
        kind = f"{group.group_name}{pair} communicator"
        is_bound = getattr(group, "bound_device_id", None) is not None
        if self._stuck.has_issued(kind) or is_bound:
            return
        ranks = process_groups.get_all_ranks_from_group(group) if peer is None else [own, peer]
        others = [(rank, kind) for rank in ranks if rank != own]
        meeting = self._stuck.issued(f"communicator of ranks {sorted(ranks)}", kind, others)
        self._stuck.begun(meeting)
        if others:
            scheduler.refuse_while_capturing(f"the first {call.name} of a communicator")
            scheduler.on_host_wait("first use of a communicator")
            if scheduler.log is not None:
                scheduler.log.host_meeting(meeting.name, *_keys(meeting))

    @staticmethod
    def _peer(call: CollectiveCall) -> int | None:
        """The other rank of a message."""
        if call.name not in _POINT_TO_POINT:
            return None
        peer: int | None = call.argument("dst" if "send" in call.name else "src")
        if peer is None:
            raise ValueError(
                f"{call.name}: src=None; a device has to know the sender before, so name its "
                "global rank"
            )
        return peer

    def _queue(
        self, simulator: Simulator, call: CollectiveCall
    ) -> tuple[StreamWork, _Issued, Stream]:
        stream = self._stream(simulator, call)
        starts = (
            self._stream(simulator, call, starts=True) if call.name in _POINT_TO_POINT else stream
        )
        starts.wait_stream(simulator.scheduler.current)
        with _disable_current_modes():
            memory = dataclasses.replace(call, args=tuple(simulator.operators.shadows(call.args)))
        issued = _Issued(call, memory, starts, self._operation(call))
        # Known before the queue has it: a schedule may run it at once.
        issued.started = starts.issued + 1
        issued.number = self._num_issued
        self._num_issued += 1
        self._unstarted.append(issued)
        simulator.scheduler.put(starts, Work(f"{call.name} (start)", lambda: self._start(issued)))
        if starts is not stream:
            stream.wait_stream(starts)
        finish, reads, writes = partial(self._finish, issued), call.reads, call.writes
        simulator.operators.launch(call.name, finish, reads, writes, stream, waits_for_ranks=True)
        done = stream.record_event()
        if call.name == "irecv":
            simulator.scheduler.on_device_wait = self.refuse_device_wait
            self._posted[issued] = done
        return StreamWork(issued, done, self._waited), issued, stream

    def _waited(self, issued: _Issued) -> None:
        if issued.waited is None:
            issued.waited = self._num_issued
            self._posted.pop(issued, None)

    def refuse_device_wait(self) -> None:
        """Refuse to let the host wait for the whole device while a receive is posted for which no
        stream waits yet.

        It is not complete before its sender has sent, who may wait for what this host has still to
        issue.
        """
        for issued, done in self._posted.items():
            if not done.query():
                here = "\n".join(describe(capture(), "  "))
                where = "\n".join(describe(issued.operation.place, "  "))
                raise HostWaitError(
                    f"the host waits for the whole device at\n{here}\nwhile "
                    f"{issued.operation.name} is posted, for which no stream waits yet, at\n{where}"
                    "\nOn a device that hangs if the sender waits for anything that this host has "
                    "not issued: wait for the stream or the event that is needed, or time by events"
                )

    # Running

    def _start(self, issued: _Issued) -> None:
        issued.is_starting = True
        self.start_issued(issued.number)
        issued.start()
        issued.is_starting = False
        self._stuck.begun(issued.operation)

    def _finish(self, issued: _Issued) -> None:
        outer = self._bound
        if outer is None or (issued.waited is not None and issued.waited < outer):
            self._bound = issued.waited
        try:
            self.start_issued(self._bound)
        finally:
            self._bound = outer
        for later in [one for one in self._unstarted if one.memory.name in _POINT_TO_POINT]:
            scheduler = later.stream.scheduler
            if scheduler.can_run(later.stream, later.started):
                scheduler.drain(later.stream, later.started)
        issued.finish(self._stuck)

    def num_issued(self) -> dict[str, int]:
        return self._stuck.num_issued()

    def start_issued(self, before: int | None = None) -> None:
        """Start every operation issued so far (the first `before`), in order."""
        for earlier in list(self._unstarted):
            if before is not None and earlier.number >= before:
                break
            if earlier.is_starting:
                # Called while it waits for those before it. Its finish, and with it whatever is
                # later on its stream, must not come before its start is done.
                break
            earlier.stream.scheduler.drain(earlier.stream, earlier.started)
        while self._unstarted and self._unstarted[0].is_started:
            self._unstarted.popleft()


def _keys(operation: Operation) -> tuple[Any, Any]:
    """The parts of an operation as a log of what was issued has them."""
    own, others = operation.own, operation.others
    return (own.kind, own.number), tuple((one.rank, (one.kind, one.number)) for one in others)


def num_issued() -> dict[str, int]:
    """How many operations of each kind this rank has issued in this world."""
    return _collectives.num_issued()


def _simulator() -> Simulator | None:
    accelerator: Any = get_accelerator()
    if not accelerator.defers_collectives or not accelerator.simulator.is_active:
        return None
    simulator: Simulator = accelerator.simulator
    return simulator


def _copied(argument: object) -> Any:
    if isinstance(argument, torch.Tensor):
        return argument.clone(memory_format=torch.contiguous_format)
    if isinstance(argument, (list, tuple)) and any(
        isinstance(item, torch.Tensor) for item in argument
    ):
        return [_copied(item) for item in argument]
    return argument


def _carry_out(call: CollectiveCall) -> list[Any]:
    if call.name in ("send", "isend"):
        return [torch_dist.isend(*call.args)]
    if call.name in ("recv", "irecv"):
        return [torch_dist.irecv(*call.args)]
    if call.name == "all_gather" and len({tensor.shape for tensor in call.writes}) > 1:
        return _uneven_all_gather(call)
    return [WorkList([call.with_async(True).issue()])]


def _uneven_all_gather(call: CollectiveCall) -> list[Any]:
    """NCCL gathers tensors of different sizes; gloo does not, so every rank broadcasts its own."""
    group = call.group or torch_dist.group.WORLD
    (own,) = call.reads
    call.writes[torch_dist.get_rank(group)].copy_(own)
    ranks = process_groups.get_all_ranks_from_group(group)
    return [
        torch_dist.broadcast(piece, src=rank, group=group, async_op=True)
        for rank, piece in zip(ranks, call.writes, strict=True)
        if piece.numel()
    ]


_collectives = StreamCollectives()


def install() -> None:
    """Take over the collectives of `deepspeed.comm` from now on."""
    add_observer(_collectives, innermost=True)
    _leave_in_order()


@cache
def _leave_in_order() -> None:
    atexit.register(_destroy_groups)


def _destroy_groups() -> None:
    """Run what is queued, and end the groups, before the interpreter ends."""
    # After an error other ranks may never come; see `Sim_Accelerator`.
    if hasattr(sys, "last_value"):
        return
    process_groups.destroy_process_group()


def start_issued() -> None:
    """Start every operation issued so far: this host will wait for other ranks by other means."""
    if _simulator() is not None:
        _collectives.start_issued()

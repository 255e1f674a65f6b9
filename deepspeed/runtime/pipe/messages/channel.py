"""`Channel`: one direction of messages between two pipeline ranks, first in first out.

[Note: what travels]
`send` and `recv`: a description and pieces. Static channels describe their first message only; both
ends remember it, so later messages are received ahead of need and cost no description. Dynamic
channels describe each, in a transfer of fixed size. `send_like` and `recv_like`: pieces only, since
the receiver knows what gradients look like.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

import torch

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.watch import lone_waits
from deepspeed.runtime.pipe.messages import wire
from deepspeed.runtime.pipe.messages.failure import FailureWatch, transferring

# Less than this is held until the end of the batch; more is worth a thread.
HELD_BYTES = 8 * 1024 * 1024
HELD_TRANSFERS = 256


class _Transfer(NamedTuple):
    work: Any
    memory: torch.Tensor


class PendingSends:
    """The transfers that one channel has begun: what they send is kept alive until it has left.

    On devices a handle tells whether it is complete. gloo's handles don't: only waiting for one
    tells, and waiting in `send` could close a circle of ranks that wait for each other. So when
    much is on its way over gloo, a thread waits in its place.

    Args:
        polls: Whether handles of this backend tell when they are complete.
        wait: Waits for a handle.

    Attributes:
        num_bytes: Memory held here for transfers that are not known to be complete, without what
            the thread waits for.
    """

    def __init__(self, polls: bool, wait: Callable[[Any], None]) -> None:
        self._polls = polls
        self._wait = wait
        self._begun: deque[_Transfer] = deque()
        self._waiter: _Waiter | None = None
        self.num_bytes = 0

    def add(self, work: object, memory: torch.Tensor) -> None:
        """Hold `memory` (bytes) until `work` is complete."""
        self._begun.append(_Transfer(work, memory))
        self.num_bytes += memory.numel()
        if self._polls:
            while self._begun and self._begun[0].work.is_completed():
                self._let_go()
        elif (
            self._waiter is not None
            or self.num_bytes > HELD_BYTES
            or len(self._begun) > HELD_TRANSFERS
        ):
            self._hand_over()

    def finish(self) -> None:
        """Return when all transfers are complete: on a device, when its stream waits for them."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter.finish()
        while self._begun:
            self._wait(self._begun[0].work)
            self._let_go()

    def _let_go(self) -> None:
        self.num_bytes -= self._begun.popleft().memory.numel()

    def _hand_over(self) -> None:
        if self._waiter is None:
            self._waiter = _Waiter()
        while self._begun:
            self._waiter.transfers.put(self._begun[0])
            self._let_go()


class _Waiter:
    """Waits for handles in the order of issue, in a thread, until `finish`."""

    def __init__(self) -> None:
        self.transfers: SimpleQueue[_Transfer | None] = SimpleQueue()
        self._error: Exception | None = None
        # A daemon: in a process that fails, it may wait for a rank that never comes.
        self._thread = threading.Thread(target=self._run, name="pipeline sends", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Return when all are complete; raise if one of them failed."""
        self.transfers.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        transfer = self.transfers.get()
        while transfer is not None:
            try:
                transfer.work.wait()
            except Exception as error:
                # Whatever ends the wait is for the caller of `finish`; the others are let go too.
                self._error = self._error or error
            # Not held while waiting for the next.
            transfer = None
            transfer = self.transfers.get()


# How many messages are received ahead of need: one arrives while the one before it is worked on.
AHEAD = 2
# The hardware queues that a device has if it is not told another number, and what tells it.
DEFAULT_QUEUES = 8
QUEUES_ENV = "CUDA_DEVICE_MAX_CONNECTIONS"


def messages_ahead() -> int:
    """Tell how many messages of a stream are received ahead: `AHEAD`, 1 with few hardware queues.

    The second receive stands in its queue until the first is over, and whatever stands behind it
    there cannot begin: stages in a ring would wait for each other (see `verify.check_budgets`).
    """
    given = os.environ.get(QUEUES_ENV, "")
    return 1 if given.isdecimal() and int(given) < DEFAULT_QUEUES else AHEAD


class Lane(Protocol):
    """Decides when receives are posted that share a communicator; see `posting`."""

    def post(self) -> None:
        """Post what may be posted."""

    def require(self, channel: Channel) -> None:
        """Have the next message of a channel posted, and all that come before it."""

    def received(self) -> None:
        """A posted message was taken."""


class PipelineShapeError(RuntimeError):
    """A message looks different from the first one of its channel, and the channel is static."""


def transfers_are_ordered(device: torch.device) -> bool:
    """Tell whether a group runs transfers of two ranks in order, whatever tags, and can poll."""
    return get_accelerator().defers_collectives or not _is_gloo(device)


def _is_gloo(device: torch.device) -> bool:
    return device.type == "cpu" or dist.get_backend_name() == "gloo"


class _Posted:
    """A message that is being received; without `spec` while only its description was asked for."""

    def __init__(self) -> None:
        self.spec: wire.MessageSpec | None = None
        self.arrival: wire.Arrival | None = None
        self.works: list[Any] = []
        self.header: torch.Tensor | None = None


class Channel:
    """One direction of messages between two ranks, first in first out; each end has its methods.

    Sent tensors must not be written in place afterwards: they leave later, without a copy. Received
    ones are the receiver's own. A channel is used with `send` and `recv`, or with `send_like` and
    `recv_like`, not both. A rank may send to itself.

    Args:
        src, dst: Global ranks.
        tag: Distinguishes channels that share a group.
        group: From `make_channel_groups`.
        device: Where received tensors live.
        dynamic: Messages may look different from each other.
        name: For errors.
        watch: Ends waits when another rank has failed.

    Attributes:
        lane: At the receiver, decides when a message is posted; None: `messages_ahead()`.
        messages: How many messages this end has sent and received.
        metadata_messages: How many of them had a description.
    """

    def __init__(
        self,
        src: int,
        dst: int,
        tag: int,
        *,
        group: dist.Group,
        device: torch.device,
        dynamic: bool,
        name: str,
        watch: FailureWatch | None = None,
    ) -> None:
        self.src, self.dst, self.name, self.dynamic = src, dst, name, dynamic
        self.lane: Lane | None = None
        self.messages = 0
        self.metadata_messages = 0
        self._tag, self._group, self._device, self._watch = tag, group, device, watch
        self._what = f"{name}, with rank {dst if src == dist.get_rank() else src}"
        is_gloo = not transfers_are_ordered(device)
        # gloo carries host memory only.
        self._wire_device = torch.device("cpu") if is_gloo else device
        # Sender
        self._sent_spec: wire.MessageSpec | None = None
        self._pending_sends = PendingSends(not is_gloo, self._wait)
        # Receiver
        self._spec: wire.MessageSpec | None = None  # of all messages, on a static channel
        self._ahead = messages_ahead()
        self._expected = 0  # messages announced by `expect` and not posted
        # Announced by `expect_like` and not posted.
        self._likes: deque[tuple[wire.TensorSpec, ...]] = deque()
        self._posted: deque[_Posted] = deque()
        self._local: deque[Any] = deque()  # of a rank that sends to itself

    # -- sending -----------------------------------------------------------------------------------

    def send(self, value: object) -> None:
        """Send a value; returns at once.

        Raises:
            TypeError: The value holds something that cannot be sent.
            PipelineShapeError: It looks different from the one before, on a static channel.
            PipelinePeerError: Another rank has failed.
        """
        self._check_alive()
        spec, tensors = wire.take_apart(value)
        is_first = self._remember(spec)
        self.messages += 1
        if self.src == self.dst:
            self._local.append(
                wire.put_together(
                    spec, [_own_copy(tensor, tensor.requires_grad) for tensor in tensors]
                )
            )
            return
        if is_first or self.dynamic:
            self._send_description(spec)
        self._send_tensors(spec.tensors, tensors)

    def send_like(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send tensors to a receiver that knows their forms; returns at once, raises as `send`."""
        self._check_alive()
        specs = wire.specs_of(tensors)
        self._remember(wire.MessageSpec("known", specs))
        self.messages += 1
        if self.src == self.dst:
            self._local.append(tuple(_own_copy(tensor, False) for tensor in tensors))
            return
        self._send_tensors(specs, tensors)

    def _remember(self, spec: wire.MessageSpec) -> bool:
        """Tell whether this is the first message; refuse one that a static channel cannot carry."""
        before, self._sent_spec = self._sent_spec, spec
        if self.dynamic or before is None or before == spec:
            return before is None
        self._sent_spec = before
        raise PipelineShapeError(
            f"{self.name}: message {self.messages} is {spec}, but the ones before were {before}, "
            "and the receiver waits for that. If shapes change from micro-batch to micro-batch, "
            "use PipelineModule(dynamic_shape=True); if they change between batches, call "
            "engine.reset_activation_shape() on all ranks before the batch"
        )

    def _send_description(self, spec: wire.MessageSpec) -> None:
        self.metadata_messages += 1
        text = wire.encode(spec)
        text += bytes(max(0, wire.HEADER_BYTES - len(text)))
        whole = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self._wire_device)
        for piece in (whole[: wire.HEADER_BYTES], whole[wire.HEADER_BYTES :]):
            if piece.numel():
                self._send_piece(piece)

    def _send_tensors(
        self, specs: tuple[wire.TensorSpec, ...], tensors: Sequence[torch.Tensor]
    ) -> None:
        plain = tuple(spec._replace(requires_grad=False) for spec in specs)
        for piece in wire.layout_of(plain).pieces(tensors, self._wire_device):
            self._send_piece(piece)

    def _send_piece(self, piece: torch.Tensor) -> None:
        with self._transferring():
            work = dist.isend(piece, self.dst, self._group, self._tag)
        self._pending_sends.add(work, piece)

    def finish(self) -> None:
        """Return when everything that was sent has left."""
        with self._transferring():
            self._pending_sends.finish()

    # -- receiving ---------------------------------------------------------------------------------

    def expect(self, count: int) -> None:
        """Receive `count` more messages, which will be sent, ahead of `recv`."""
        self._expected += count
        self._post_ahead()

    def expect_like(self, likes: Sequence[torch.Tensor]) -> None:
        """Receive one more message, which will be sent with `send_like`, ahead of `recv_like`."""
        self._likes.append(wire.specs_of(likes))
        self._post_ahead()

    def recv(self) -> Any:
        """Return the next value, when it is there: new tensors, on the channel's device, leaves."""
        self._check_alive()
        self.messages += 1
        if self.src == self.dst:
            self._expected = max(0, self._expected - 1)
            return self._recv_local()
        if self.lane is not None:
            self.lane.require(self)
        elif not self._posted:
            self._expected = max(1, self._expected)
            self._post_ahead()
        if self._posted[0].spec is None:
            self.read_description()
        posted = self._taken()
        tensors = self._complete(posted)
        spec = _known(posted)
        for tensor, described in zip(tensors, spec.tensors, strict=True):
            tensor.requires_grad_(described.requires_grad)
        return wire.put_together(spec, tensors)

    def recv_like(self, likes: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return the next tensors sent with `send_like`, like `likes` (maybe meta tensors).

        Raises:
            PipelineShapeError: `expect_like` was told something else.
        """
        self._check_alive()
        self.messages += 1
        specs = wire.specs_of(likes)
        if self.src == self.dst:
            if self._likes:
                self._likes.popleft()
            return tuple(self._recv_local())
        if self.lane is not None:
            self.lane.require(self)
        elif not self._posted:
            self._likes.append(specs)
            self._post_ahead()
        posted = self._taken()
        if posted.spec is None or posted.spec.tensors != specs:
            raise PipelineShapeError(
                f"{self.name}: {posted.spec} was announced, but "
                f"{wire.MessageSpec('known', specs)} is received"
            )
        return tuple(self._complete(posted))

    def _taken(self) -> _Posted:
        """The oldest message that is being received; its place is given to the next."""
        posted = self._posted.popleft()
        if self.lane is not None:
            self.lane.received()
        self._post_ahead()
        return posted

    def _recv_local(self) -> Any:
        if not self._local:
            raise RuntimeError(
                f"{self.name}: rank {self.src} receives from itself before it has sent, and would "
                "wait forever"
            )
        return self._local.popleft()

    def _post_ahead(self) -> None:
        """Receive what is announced, as far as it is known what to post."""
        if self.lane is not None:
            self.lane.post()
        elif self.src != self.dst:
            while (
                len(self._posted) < self._ahead and not self.awaits_description and self.post_one()
            ):
                pass

    @property
    def has_posted(self) -> bool:
        return bool(self._posted)

    @property
    def awaits_description(self) -> bool:
        """Whether a description is being received: its message must be posted next."""
        return bool(self._posted) and self._posted[-1].spec is None

    def post_one(self) -> bool:
        """Receive the next announced message, or its description; False if nothing is announced."""
        posted = _Posted()
        if self._likes:
            self._post_tensors(posted, wire.MessageSpec("known", self._likes.popleft()))
        elif self._expected:
            self._expected -= 1
            if self._spec is not None:
                self._post_tensors(posted, self._spec)
            else:
                posted.header = torch.empty(
                    wire.HEADER_BYTES, dtype=torch.uint8, device=self._wire_device
                )
                posted.works = [self._receive_piece(posted.header)]
        else:
            return False
        self._posted.append(posted)
        return True

    def read_description(self) -> None:
        """Wait for the description that is being received, and receive its message."""
        posted = self._posted[-1]
        spec = self._described(posted)
        self._post_tensors(posted, spec)

    def _post_tensors(self, posted: _Posted, spec: wire.MessageSpec) -> None:
        plain = tuple(tensor._replace(requires_grad=False) for tensor in spec.tensors)
        posted.spec = spec
        posted.arrival = wire.layout_of(plain).allocate(self._wire_device)
        posted.works = [self._receive_piece(piece) for piece in posted.arrival.pieces]

    def _receive_piece(self, piece: torch.Tensor) -> Any:
        with self._transferring():
            return dist.irecv(piece, self.src, self._group, self._tag)

    def _described(self, posted: _Posted) -> wire.MessageSpec:
        self.metadata_messages += 1
        for work in posted.works:
            self._wait(work)
        data = _host_bytes(posted.header)
        rest = wire.bytes_after_header(data)
        if rest:
            piece = torch.empty(rest, dtype=torch.uint8, device=self._wire_device)
            self._wait(self._receive_piece(piece))
            data += _host_bytes(piece)
        spec = wire.decode(data)
        if not self.dynamic:
            self._spec = spec
        return spec

    def _complete(self, posted: _Posted) -> list[torch.Tensor]:
        for work in posted.works:
            self._wait(work)
        tensors = [] if posted.arrival is None else posted.arrival.take()
        return [tensor.to(self._device) for tensor in tensors]

    # -- both --------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget what messages look like; both ends do, between batches."""
        if self._posted or self._local:
            raise RuntimeError(
                f"{self.name}: shapes cannot be reset while messages are on their way; do it "
                "between batches"
            )
        self._spec = self._sent_spec = None
        self._expected = 0
        self._likes.clear()

    def _check_alive(self) -> None:
        if self._watch is not None:
            self._watch.check()

    def _wait(self, work: Any) -> None:
        with lone_waits.watch.waiting(lambda: self._what), self._transferring():
            work.wait()

    def _transferring(self) -> AbstractContextManager[None]:
        return transferring(self._watch, self._what)


def _known(posted: _Posted) -> wire.MessageSpec:
    if posted.spec is None:
        raise AssertionError("a message is taken before its description was read")
    return posted.spec


def _own_copy(tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(requires_grad)


def _host_bytes(tensor: torch.Tensor | None) -> bytes:
    return b"" if tensor is None else bytes(tensor.cpu().numpy())

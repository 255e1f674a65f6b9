"""What pipeline stages exchange: channels' groups, upstream's functions for tensors and objects.

[Note: channels and communicators]
gloo matches transfers by tag, so channels share a group. NCCL runs all transfers of two ranks in a
group in one order: a receive that was posted ahead would hold up all later ones, and ranks could
wait for each other in a circle. There each channel has a group.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.comm import group_creation, group_store
from deepspeed.comm.process_groups import message_options
from deepspeed.runtime.pipe.messages.channel import transfers_are_ordered
from deepspeed.runtime.pipe.messages.failure import transferring


class _Transfer:
    """The handle of a transfer, which says with whom it was when its connection is lost."""

    def __init__(
        self, what: str, operation: Callable[..., Any], tensor: torch.Tensor, peer: int
    ) -> None:
        self._what = f"{what}, with rank {peer}"
        self._tensor = tensor  # memory that is read or written until the end
        with transferring(None, self._what):
            self._work = operation(tensor, peer)

    def wait(self, *timeout: object) -> Any:
        with transferring(None, self._what):
            return self._work.wait(*timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


# The grid of `init_process_groups`, and what `send` and `recv` began, for `wait`.
_grid: Any = None
_begun: list[_Transfer] = []


def make_channel_groups(
    pairs: Sequence[tuple[int, int]], device: torch.device | None = None
) -> list[Any]:
    """Make the group of each channel, (source, destination), alike on all ranks; collective over
    the world. See [Note: channels and communicators].

    Args:
        pairs: Global ranks; a pair that occurs twice is two channels.
        device: Where the channels' tensors live; None is the accelerator's device.

    Returns:
        One group per pair; None, on such backends, of a pair that this rank is not in.
    """
    device = device or torch.device(get_accelerator().current_device_name())
    key = ("pipeline channels", tuple(pairs), str(device))
    return list(group_store.made_once(key, lambda: _make_channel_groups(pairs, device)))


def _make_channel_groups(pairs: Sequence[tuple[int, int]], device: torch.device) -> list[Any]:
    if not transfers_are_ordered(device):
        return [dist.new_group(None)] * len(pairs) if pairs else []
    options = message_options()
    made: list[Any] = [None] * len(pairs)
    own = dist.get_rank()
    for turn in _turns(pairs):
        group = group_creation.make_own([sorted(set(pairs[at])) for at in turn], options)
        for at in turn:
            if own in pairs[at]:
                made[at] = group
    # A communicator is made at its first transfer, in which both ends wait for each other: now, in
    # an order that all ranks share, and not within a schedule, where one end may have to receive
    # something else first.
    for (src, dst), group in zip(pairs, made, strict=True):
        if src != dst and own in (src, dst):
            token = torch.zeros(1, dtype=torch.uint8, device=device)
            begin, peer = (dist.isend, dst) if own == src else (dist.irecv, src)
            what = "a channel's first transfer"
            _Transfer(what, partial(begin, group=group), token, peer).wait()
            # The host waits as well: what was posted for a later pair must not be on the device
            # while another rank is still at an earlier one.
            get_accelerator().current_stream().synchronize()
    return made


def _turns(pairs: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Say which pairs are made together: each rank is in one of them at most. Their number does not
    depend on how many pipelines there are.
    """
    turns: list[list[int]] = []
    taken: list[set[int]] = []
    for at, pair in enumerate(pairs):
        first = next((turn for turn, ranks in enumerate(taken) if ranks.isdisjoint(pair)), None)
        if first is None:
            first = len(turns)
            turns.append([])
            taken.append(set())
        turns[first].append(at)
        taken[first].update(pair)
    return turns


# -- upstream's functions --------------------------------------------------------------------------


def init_process_groups(grid: object) -> None:
    """Say, by a `PipelineParallelGrid`, which ranks the stages are, before the functions below."""
    global _grid
    _grid = grid
    _begun.clear()


def can_send_recv() -> bool:
    """Tell whether tensors go from rank to rank directly: always."""
    return True


def _rank_of(stage: int, verb: str) -> int:
    if _grid is None:
        raise RuntimeError("call deepspeed.runtime.pipe.p2p.init_process_groups(grid) first")
    own, last = _grid.get_stage_id(), _grid.pipe_parallel_size - 1
    # The first and the last stage exchange the gradients of tied weights.
    if abs(own - stage) != 1 and {own, stage} != {0, last}:
        raise ValueError(
            f"stage {own} cannot {verb} stage {stage}: only neighbours, and the first and the last "
            "stage, do"
        )
    return int(_grid.stage_to_global(stage_id=stage))


def send(tensor: torch.Tensor, dest_stage: int, async_op: bool = False) -> Any:
    """Send a contiguous tensor to a neighbouring stage; after `async_op` keep it until `wait`."""
    return _begin(_Transfer("send", dist.isend, tensor, _rank_of(dest_stage, "send to")), async_op)


def recv(tensor: torch.Tensor, src_stage: int, async_op: bool = False) -> Any:
    """Receive a tensor from a neighbouring stage; arguments as those of `send`."""
    rank = _rank_of(src_stage, "receive from")
    return _begin(_Transfer("recv", dist.irecv, tensor, rank), async_op)


def _begin(transfer: _Transfer, async_op: bool) -> Any:
    if async_op:
        _begun.append(transfer)
        return transfer
    transfer.wait()
    return None


def wait() -> None:
    """Return when everything that was begun with ``async_op=True`` is complete."""
    while _begun:
        _begun[0].wait()
        _begun.pop(0)
    # Upstream's callers read the tensors on the host next. The current stream waits for what was
    # begun; the device may have receives posted that are waited for later.
    get_accelerator().current_stream().synchronize()


def send_obj(msg: object, dest: int) -> None:
    """Send an object to a global rank: tensors, numbers, texts, None, and tuples, lists and dicts
    of these, since the receiver runs no code from a message.

    Raises:
        TypeError: The object holds something else.
    """
    stream = io.BytesIO()
    torch.save(msg, stream)
    try:
        torch.load(io.BytesIO(stream.getvalue()), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise TypeError(
            f"send_obj: {type(msg).__name__} holds more than plain data and tensors; send those "
            f"({error})"
        ) from error
    device = torch.device(get_accelerator().current_device_name())
    data = torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8).to(device)
    with transferring(None, f"send_obj, with rank {dest}"):
        dist.send(torch.tensor([data.numel()], device=device), dest)
        dist.send(data, dest)


def recv_obj(sender: int) -> Any:
    """Receive what global rank `sender` sent with `send_obj`, tensors on the accelerator."""
    device = torch.device(get_accelerator().current_device_name())
    size = torch.empty(1, dtype=torch.int64, device=device)
    with transferring(None, f"recv_obj, with rank {sender}"):
        dist.recv(size, sender)
        data = torch.empty(int(size.item()), dtype=torch.uint8, device=device)
        dist.recv(data, sender)
    return torch.load(
        io.BytesIO(data.cpu().numpy().tobytes()), map_location=device, weights_only=True
    )

"""Operations between two ranks, with upstream's names and argument order; see `collectives`."""

import torch
import torch.distributed as torch_dist

from deepspeed.comm.process_groups import Group
from deepspeed.comm.watch import observation
from deepspeed.comm.watch.observation import Handle, observed


def send(
    tensor: torch.Tensor,
    dst: int,
    group: Group = None,
    tag: int = 0,
    prof: bool = False,
    log_name: str = "send",
    debug: str | None = None,
) -> None:
    """Send ``tensor`` to global rank ``dst`` and wait until it may be changed."""
    if observation.chain is None:
        torch_dist.send(tensor, dst, group, tag)
        return
    args = (tensor, dst, group, tag)
    observed("send", torch_dist.send, args, group, tensor, log_name, prof, debug)


def recv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    prof: bool = False,
    log_name: str = "recv",
    debug: str | None = None,
) -> int:
    """Receive ``tensor`` from global rank ``src`` (None: any); returns the sender's global rank."""
    if observation.chain is None:
        return torch_dist.recv(tensor, src, group, tag)
    args = (tensor, src, group, tag)
    return int(observed("recv", torch_dist.recv, args, group, tensor, log_name, prof, debug))


def isend(
    tensor: torch.Tensor,
    dst: int,
    group: Group = None,
    tag: int = 0,
    prof: bool = False,
    log_name: str = "isend",
    debug: str | None = None,
) -> Handle:
    """`send` that returns a handle at once; ``tensor`` must not change before it was waited for."""
    if observation.chain is None:
        return torch_dist.isend(tensor, dst, group, tag)
    args = (tensor, dst, group, tag)
    return observed("isend", torch_dist.isend, args, group, tensor, log_name, prof, debug)


def irecv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    prof: bool = False,
    log_name: str = "irecv",
    debug: str | None = None,
) -> Handle:
    """`recv` that returns a handle at once; ``tensor`` is undefined before it was waited for."""
    if observation.chain is None:
        return torch_dist.irecv(tensor, src, group, tag)
    args = (tensor, src, group, tag)
    return observed("irecv", torch_dist.irecv, args, group, tensor, log_name, prof, debug)

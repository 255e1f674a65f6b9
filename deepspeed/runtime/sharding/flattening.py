"""How parameters move into one flat buffer, and masters are made of a part of it.

[Note: memory of construction]
While parameters are copied into a flat buffer, it and all that are not copied yet lie beside each
other, twice the weights at first. Where the device has no room for that, each parameter goes to the
host first, one after the other, and comes back when the buffer is there: two copies over the bus,
and the weights and the largest of them are the most that the device holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.ops.state_files import place_in_file

# Elements that are made masters at a time where model and masters lie on different devices: torch
# would convert them on the model's, which has no room for all.
CONVERTED_NUMEL = 1 << 24

Held = TypeVar("Held", bound=torch.Tensor)


@torch.no_grad()
def flatten(params: Sequence[nn.Parameter], offsets: Sequence[int], numel: int) -> torch.Tensor:
    """Make a buffer in which parameter `i` lies at `offsets[i]`, padding zero; parameters, all of
    one dtype and device, become views of it.
    """
    first = params[0]
    values: Sequence[torch.Tensor] = params
    if not _has_room(first, numel * first.element_size()):
        values = [_to_host(param) for param in params]
    flat = torch.zeros(numel, dtype=first.dtype, device=first.device)
    for param, value, start in zip(params, values, offsets, strict=False):
        view = flat[start : start + value.numel()].view(value.shape)
        view.copy_(value)
        param.data = view
    return flat


def lies_on_host(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in host memory of a machine with another device."""
    accelerator = get_accelerator()
    return not accelerator.is_synchronized_device() and not accelerator.on_accelerator(tensor)


def _has_room(param: torch.Tensor, nbytes: int) -> bool:
    accelerator = get_accelerator()
    # Host memory cannot be relieved by the host's.
    is_on_device = not accelerator.is_synchronized_device() and accelerator.on_accelerator(param)
    return not is_on_device or accelerator.available_memory(param.device.index) >= nbytes


def _to_host(param: nn.Parameter) -> torch.Tensor:
    value = get_accelerator().to_host(param.data)
    param.data = param.data.new_empty(0)
    return value


@torch.no_grad()
def joined(shards: Sequence[torch.Tensor], in_file: bool = True) -> torch.Tensor:
    """Put 1-D tensors behind one another in new memory of the kind that the first is in; that may
    be a file's.
    """
    accelerator, place = get_accelerator(), place_in_file(shards[0]) if in_file else None
    numel, dtype = sum(shard.numel() for shard in shards), shards[0].dtype
    if place is not None:
        return torch.cat(list(shards), out=place.files.zeros(numel, dtype, shares=True))
    if not accelerator.is_pinned(shards[0]):
        return torch.cat(list(shards))
    return torch.cat(list(shards), out=accelerator.host_empty(numel, dtype, pin=True))


def brought(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Bring a tensor to the model's `device`, from wherever it is."""
    if not lies_on_host(tensor):
        return tensor.to(device)
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device).copy_(tensor)


@torch.no_grad()
def write_master(master: torch.Tensor, shard: torch.Tensor) -> None:
    """Copy `shard` to `master`, both 1-D, whatever their dtypes and devices."""
    if master.device == shard.device:
        master.copy_(shard)
        return
    for start in range(0, shard.numel(), CONVERTED_NUMEL):
        piece = slice(start, start + CONVERTED_NUMEL)
        master[piece].copy_(shard[piece].to(master.device))


def in_pieces(tensors: Iterable[Held], numel: int) -> Iterator[list[Held]]:
    """Put neighbours together, so many elements at most, or one tensor that has more."""
    piece: list[Held] = []
    held = 0
    for tensor in tensors:
        if piece and held + tensor.numel() > numel:
            yield piece
            piece, held = [], 0
        piece.append(tensor)
        held += tensor.numel()
    if piece:
        yield piece

"""Memory of gathered parameters, used again and again instead of allocated anew.

A buffer goes back as soon as the last reader of its content has been issued, with an event of every
stream that read it; who takes it next lets its own stream wait for them. The host waits for
nothing, and the number of buffers is that of the units that are whole at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from deepspeed.accelerator import Stream, get_accelerator


class PoolBuffer:
    """A piece of the pool's memory.

    Attributes:
        tensor: 1-D.
        owner: Who has it now, for whoever finds a tensor in it.
        views: What owners made of it; making views takes longer than copying small parameters.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.owner: Any = None
        self.views: dict[Any, Any] = {}
        self._last_reads: list[Any] = []

    def read_on(self, streams: Iterable[Stream]) -> None:
        """Its content was read by what has been issued on `streams`."""
        for stream in streams:
            event = get_accelerator().Event()
            event.record(stream)
            self._last_reads.append(event)

    def wait_for_reads(self, stream: Stream) -> None:
        """Let `stream`, which is about to write, wait for all reads."""
        for event in self._last_reads:
            stream.wait_event(event)
        self._last_reads = []


@torch.no_grad()
def poison(tensor: torch.Tensor) -> None:
    """All elements become NaN, or the largest number of an integer dtype."""
    is_float = tensor.is_floating_point() or tensor.is_complex()
    # Under another version counter: who still has it is to see NaN and not an error of autograd.
    tensor.data.fill_(math.nan if is_float else _largest(tensor.dtype))


def _largest(dtype: torch.dtype) -> int:
    return 1 if dtype == torch.bool else torch.iinfo(dtype).max


class MemoryPool:
    """Buffers of one kind.

    Args:
        has_streams: Whether the device orders work by streams.

    Attributes:
        by_pointer: Every buffer, by the address of its storage.
        is_poisoned: What is given back is overwritten by NaN, so that whoever still reads it, or
            reads it before it is written anew, shows.
    """

    def __init__(self, has_streams: bool) -> None:
        self._has_streams = has_streams
        # What is free: of each dtype and device by size, the last that was given back at the end.
        self._free: dict[Any, dict[int, dict[PoolBuffer, None]]] = {}
        self._last_of: dict[Any, PoolBuffer] = {}  # who had which
        self.by_pointer: dict[int, PoolBuffer] = {}
        self.is_poisoned = False

    def take(self, numel: int, dtype: torch.dtype, device: torch.device, owner: Any) -> PoolBuffer:
        """A buffer of at least `numel` elements that what is issued now on the current stream may
        write to.
        """
        sizes = self._free.get((dtype, device), {})
        size = min((size for size, same in sizes.items() if same and size >= numel), default=None)
        if size is not None:
            # The smallest, of those the one that this owner had, which has its views, and then the
            # one just given back, which caches still have.
            buffer = self._last_of.get(owner)
            if buffer in sizes[size]:
                del sizes[size][buffer]
            else:
                buffer, _ = sizes[size].popitem()
            if self._has_streams:
                buffer.wait_for_reads(get_accelerator().current_stream())
        else:
            buffer = PoolBuffer(torch.empty(numel, dtype=dtype, device=device))
            self.by_pointer[buffer.tensor.untyped_storage().data_ptr()] = buffer
        self._last_of[owner] = buffer
        buffer.owner = owner
        return buffer

    def give_back(self, buffer: PoolBuffer, streams: Iterable[Stream] = ()) -> None:
        """Nothing reads `buffer` after what has been issued on `streams`."""
        if self.is_poisoned:
            current = get_accelerator().current_stream()
            for stream in streams:
                current.wait_stream(stream)
            poison(buffer.tensor)
            streams = (current,)
        if self._has_streams:
            buffer.read_on(streams)
        buffer.owner = None
        kind = (buffer.tensor.dtype, buffer.tensor.device)
        sizes = self._free.setdefault(kind, {})
        sizes.setdefault(buffer.tensor.numel(), {})[buffer] = None

    def drop(self, buffer: PoolBuffer) -> None:
        """Let go of a buffer that was taken: nobody gets it again."""
        self.by_pointer = {
            at: other for at, other in self.by_pointer.items() if other is not buffer
        }
        self._last_of = {who: other for who, other in self._last_of.items() if other is not buffer}

    @property
    def num_bytes(self) -> int:
        """Of all buffers."""
        return sum(buffer.tensor.untyped_storage().nbytes() for buffer in self.by_pointer.values())

    def drop_free(self) -> None:
        """Let go of the buffers that nobody has; the caller has waited for what reads them."""
        self._free = {}
        self.by_pointer = {at: one for at, one in self.by_pointer.items() if one.owner is not None}
        self._last_of = {who: one for who, one in self._last_of.items() if one.owner is not None}

    def clear(self) -> None:
        """Let go of all buffers."""
        self._free, self._last_of = {}, {}
        self.by_pointer = {}

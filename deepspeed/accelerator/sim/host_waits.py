"""Which moments of a simulated program would make the host wait on a device, and which copies would
go through pageable memory.

[Note: whose memory it would be]
All tensors here are host tensors. On a device these would be the host's: what `pin_memory` returns,
what `torch.tensor`, `as_tensor` and `from_numpy` make of numbers when they are told no device, and
what `Tensor.cpu` returns; ``to(device)`` copies them. Everything else counts as the device's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdKeyDictionary

from deepspeed.accelerator import operators
from deepspeed.accelerator.host_waits import HostWaits
from deepspeed.accelerator.sim.host_reads import Patches

if TYPE_CHECKING:
    from deepspeed.accelerator.sim.memory import Allocator
    from deepspeed.accelerator.sim.queues import Scheduler

# Operators for whose result, or its size, a device makes the host wait.
_WAITING = {
    "aten::_local_scalar_dense": "item",
    **{
        f"aten::{name}": name
        for name in (
            "allclose",
            "bincount",
            "equal",
            "masked_select",
            "nonzero",
            "repeat_interleave",
            "unique_consecutive",
            "unique_dim",
            "unique_dim_consecutive",
        )
    },
    "aten::_unique": "unique",
    "aten::_unique2": "unique",
}
# Methods by which the host looks at memory; the others of `host_reads` stay on a device.
_WAITING_METHODS = {"numpy", "tolist", "__repr__", "__reduce_ex__"}
_MASKED_WRITES = ("aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
COPIES = ("aten::copy_", "aten::_foreach_copy_")
BLOCKING_COPY = "blocking copy"


class Counting:
    """Whoever counts now, and what the host has made meanwhile."""

    def __init__(self, scheduler: Scheduler, allocator: Allocator) -> None:
        self._scheduler = scheduler
        self._allocator = allocator
        self.counters: list[HostWaits] = []
        self._host_made: dict[int, StorageWeakRef] = {}
        self._host_copies = WeakIdKeyDictionary()

    @contextmanager
    def count(self) -> Iterator[HostWaits]:
        waits, patches = HostWaits(), Patches()
        patches.replace(torch, "tensor", self._making)
        patches.replace(torch, "as_tensor", self._making)
        patches.replace(torch, "from_numpy", self._making)
        patches.replace(torch.Tensor, "cpu", self._copying)
        patches.replace(torch.Tensor, "to", self._moving)
        self.counters.append(waits)
        try:
            yield waits
        finally:
            self.counters.remove(waits)
            patches.undo()
            if not self.counters:
                self._host_made.clear()

    # Reported by the simulator

    def waited(self, kind: str) -> None:
        if self.counters and not self._scheduler.is_running:
            for waits in self.counters:
                waits.waited(kind)

    def looked(self, method: str, tensor: torch.Tensor) -> None:
        if self.counters and method in _WAITING_METHODS and not self._is_hosts(tensor):
            self.waited(method)

    def computed(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> None:
        if not self.counters:
            return
        name = func._schema.name
        if name in COPIES:
            self._copied(func, args, kwargs)
        elif name in _WAITING:
            if kwargs.get("output_size") is None and not all(map(self._is_hosts, tensors)):
                self.waited(_WAITING[name])

    def indexed(self, func: Any, args: Any) -> None:
        """Tell that a mask chooses elements: the host has to know how many, if not one."""
        name = func._schema.name
        if self.counters and not (name in _MASKED_WRITES and args[2].numel() == 1):
            self.waited("index by a mask")

    def blocked(self) -> None:
        if self.counters and not self._scheduler.is_running:
            self._tell_copied(waits=True)

    # What the host makes

    def _is_hosts(self, tensor: torch.Tensor) -> bool:
        if tensor.layout is not torch.strided:
            return False
        storage = tensor.untyped_storage()
        made = self._host_made.get(storage._cdata)
        return (
            (made is not None and not made.expired())
            or tensor in self._host_copies
            or self._allocator.host.owns(tensor)
        )

    def _copied(self, func: Any, args: Any, kwargs: Any) -> None:
        """Take note of a copy out of memory that the host made: it is pageable."""
        source = [args[1]] if isinstance(args[1], torch.Tensor) else list(args[1])
        target = [args[0]] if isinstance(args[0], torch.Tensor) else list(args[0])
        pairs = zip(target, source, strict=False)
        if not any(self._is_pageable(b) and not self._is_hosts(a) for a, b in pairs):
            return
        self._tell_copied(not operators.arguments(func, args, kwargs).get("non_blocking", False))

    def _tell_copied(self, waits: bool) -> None:
        for counter in self.counters:
            counter.copied()
        if waits:
            self.waited(BLOCKING_COPY)

    def _is_pageable(self, tensor: torch.Tensor) -> bool:
        return self._is_hosts(tensor) and not self._allocator.host.owns(tensor)

    def _making(self, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(original)
        def make(*args: object, **kwargs: object) -> torch.Tensor:
            made = original(*args, **kwargs)
            if args and isinstance(args[0], torch.Tensor):
                return made  # no number came from the host
            if kwargs.get("device") is not None:
                self.blocked()
            else:
                storage = made.untyped_storage()
                self._host_made[storage._cdata] = StorageWeakRef(storage)
            return made

        return make

    def _moving(self, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(original)
        def to(tensor: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
            moved, given = original(tensor, *args, **kwargs), (*args, *kwargs.values())
            names_device = any(isinstance(one, (str, torch.device)) for one in given)
            if not names_device or not self._is_pageable(tensor):
                return moved
            self._tell_copied(waits=not kwargs.get("non_blocking", False))
            return moved.clone() if moved is tensor else moved

        return to

    def _copying(self, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(original)
        def cpu(tensor: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
            if self._is_hosts(tensor):
                return original(tensor, *args, **kwargs)
            self.blocked()
            copy = original(tensor, *args, **kwargs).view(tensor.shape)
            self._host_copies[copy] = True
            return copy

        return cpu

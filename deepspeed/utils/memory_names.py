"""Names of memory for reports: which buffer, and which parameter in it, lies at an address.

Owners of buffers register themselves, weakly; they are asked only when a report is written. Nothing
is kept up to date meanwhile.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes


class MemoryOwner(Protocol):
    """Whoever can name its buffers."""

    def named_memory(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Names and the tensors that they stand for; of several at an address, the first counts."""


_owners: weakref.WeakSet[MemoryOwner] = weakref.WeakSet()


def register(owner: MemoryOwner) -> None:
    """Ask `owner` too from now on, for as long as it lives."""
    _owners.add(owner)


def describe(address: int) -> str | None:
    """The name of what lies at `address`; None if nobody knows."""
    # Asked from the midst of an operator: making views must neither be traced nor deferred.
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        for owner in list(_owners):
            for name, tensor in owner.named_memory():
                # Not Tensor.data_ptr(), which is the host's look at memory and synchronizes on a
                # simulated device.
                width = tensor.element_size()
                start = tensor.untyped_storage().data_ptr() + tensor.storage_offset() * width
                if start <= address < start + tensor.numel() * width:
                    return name
    return None

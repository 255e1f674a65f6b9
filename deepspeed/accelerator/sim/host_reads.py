"""What makes the host look at a tensor without an operator that says so: `numpy()`, printing,
pickling. On a device these wait for the current stream; here they are wrapped while one is
simulated.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

_READERS: tuple[tuple[type, str], ...] = (
    (torch.Tensor, "numpy"),
    (torch.Tensor, "tolist"),
    (torch.Tensor, "__repr__"),
    (torch.Tensor, "__deepcopy__"),
    (torch.Tensor, "__reduce_ex__"),
    (torch.nn.Parameter, "__repr__"),
    (torch.nn.Parameter, "__reduce_ex__"),
    (torch.Tensor, "__dlpack__"),
    (torch.Tensor, "share_memory_"),
)


class Patches:
    """Attributes replaced for a while, and put back in the reverse order."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def replace(self, owner: object, name: str, make: Callable[[Any], Any]) -> None:
        had = name in vars(owner)
        before = getattr(owner, name)
        setattr(owner, name, make(before))
        self._undo.append(lambda: setattr(owner, name, before) if had else delattr(owner, name))

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()


def _reading(
    name: str, read: Callable[[str, torch.Tensor], None], threads: set[int], original: Any
) -> Any:
    @functools.wraps(original)
    def reader(self: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() not in threads or type(self) not in (
            torch.Tensor,
            torch.nn.Parameter,
        ):
            return original(self, *args, **kwargs)
        read(name, self)
        # What it calls works on memory that is complete now, and its result is the host's.
        with _disable_current_modes():
            return original(self, *args, **kwargs)

    return reader


def patch_host_reads(
    patches: Patches,
    read: Callable[[str, torch.Tensor], None],
    record_stream: Callable[[torch.Tensor, Any], None],
    threads: set[int],
) -> None:
    """Wrap every method that looks at memory: `read` is called before the host looks, with the
    method's name, in those `threads`; `record_stream` is what `Tensor.record_stream` does.
    """
    for owner, name in _READERS:
        patches.replace(owner, name, functools.partial(_reading, name, read, threads))
    patches.replace(
        torch.Tensor,
        "record_stream",
        lambda original: lambda self, stream: record_stream(self, stream),
    )

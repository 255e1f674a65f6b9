"""Host memory for transfers: aligned for O_DIRECT, and page-locked where a device copies it."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.utils.exceptions import MisuseError


def new_cpu_locked_tensor(num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
    """Return uninitialized host memory `[num_elem]` of the other tensor's dtype that files are read
    into without a copy. It goes when nobody has it any more, or by `free_cpu_locked_tensor`.
    """
    dtype = example_tensor.dtype
    if get_accelerator().is_synchronized_device():
        # Nothing but the kernel reads it, which locks what is on its way itself.
        size, flags = num_elem * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = mmap.mmap(-1, max(1, size), flags=flags)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # A request of a few large pages is handed to the disk as one, at up to twice the speed.
            with suppress(OSError):  # a kernel without them
                memory.madvise(mmap.MADV_HUGEPAGE)
        tensor = torch.frombuffer(memory, dtype=torch.uint8)[:size].view(dtype)
    else:
        tensor = get_accelerator().host_empty(num_elem, dtype, pin=True)
    tensor.ds_is_locked = True  # type: ignore[attr-defined]  # ours
    return tensor


def is_locked(tensor: torch.Tensor) -> bool:
    """Say whether it is such memory, or page-locked by torch."""
    return getattr(tensor, "ds_is_locked", False) or tensor.is_pinned()


def free_cpu_locked_tensor(tensor: torch.Tensor) -> bool:
    """Let the memory go at once, unless there are views of it. False: it is none of those.

    Raises:
        MisuseError: it is no tensor.
    """
    if not isinstance(tensor, torch.Tensor):
        raise MisuseError(f"free_cpu_locked_tensor: {type(tensor).__name__} is no tensor")
    if not getattr(tensor, "ds_is_locked", False):
        return False
    del tensor.ds_is_locked  # type: ignore[attr-defined]
    tensor.set_()  # type: ignore[call-overload]  # without arguments: no memory
    return True

"""A copy of nested values in host memory that is used again for the next copy.

Fresh memory costs more than the copy itself (the system zeroes every page; pinning locks it), and
what is saved has the same size each time.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.utils import is_plain, map_tensors, on_storage

_ALIGNMENT = 64
_MIN_BLOCK_BYTES = 1 << 20


class HostCopy:
    """Copies tensors, each with storage of its own, into memory that `reset` frees for the next.
    Pinned where there is a device.
    """

    def __init__(self) -> None:
        self._blocks: list[torch.UntypedStorage] = []
        self._used = 0  # bytes of the last block

    def reset(self) -> None:
        """Forget all copies; their memory is used again."""
        total = sum(block.nbytes() for block in self._blocks)
        if len(self._blocks) > 1:
            self._blocks = []
            self._blocks = [_allocate(total)]
        self._used = 0

    def __call__(self, content: Any) -> Any:
        """A copy of nested dicts, lists and tuples that no change of the original reaches."""
        copied = map_tensors(content, self._copy, copy.deepcopy)
        # Copies from a device run beside the host, on the current stream.
        get_accelerator().current_stream().synchronize()
        return copied

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        if not is_plain(tensor) or tensor.numel() == 0:
            return tensor.clone().cpu()
        return on_storage(self._take(tensor.numel() * tensor.element_size()), tensor).copy_(
            tensor, non_blocking=True
        )

    def _take(self, count: int) -> torch.UntypedStorage:
        aligned = -(-count // _ALIGNMENT) * _ALIGNMENT
        if not self._blocks or self._used + aligned > self._blocks[-1].nbytes():
            self._blocks.append(_allocate(max(aligned, _MIN_BLOCK_BYTES)))
            self._used = 0
        start = self._used
        self._used += aligned
        return self._blocks[-1][start : start + count]


def _allocate(count: int) -> torch.UntypedStorage:
    block = torch.empty(count, dtype=torch.uint8)
    accelerator = get_accelerator()
    return (
        block if accelerator.device_name() == "cpu" else accelerator.pin_memory(block)
    ).untyped_storage()

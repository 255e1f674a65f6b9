"""Where shards of parameters live between uses: on the device, or in host memory
(`offload_param`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from deepspeed.accelerator import get_accelerator


class ShardMemory(NamedTuple):
    """A kind of memory.

    Attributes:
        on_host: Host memory; on a device that is the host, no other than the device's.
        pinned: Page-locked, so that copies go on beside everything else.
    """

    on_host: bool = False
    pinned: bool = False

    @torch.no_grad()
    def place(self, shard: torch.Tensor, device: torch.device) -> torch.Tensor:
        """`shard`, 1-D, in this memory: itself if it lies there.

        Args:
            shard: On any device.
            device: Where whole parameters are, and shards that are not offloaded.
        """
        accelerator = get_accelerator()
        if accelerator.is_synchronized_device():
            return shard.to(device)
        if not self.on_host:
            if accelerator.on_accelerator(shard):
                return shard.to(device)
            moved = torch.empty(shard.shape, dtype=shard.dtype, device=device)
            return moved.copy_(shard)
        host = accelerator.to_host(shard) if accelerator.on_accelerator(shard) else shard
        needs_lock = self.pinned and not accelerator.is_pinned(host)
        return accelerator.pin_memory(host) if needs_lock else host


ON_DEVICE = ShardMemory()

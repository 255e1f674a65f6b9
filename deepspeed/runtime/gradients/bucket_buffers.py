"""Memory that the gradients of a bucket are copied together in: `BucketBuffers`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from deepspeed.accelerator import get_accelerator


class Payload(Protocol):
    """The part of a bucket's plan that is asked here: its elements, and their dtype."""

    @property
    def numel(self) -> int: ...
    @property
    def kind(self) -> Any: ...


class BucketBuffer:
    """Payload memory of a bucket, with cached views per plan (making 800 views costs more than
    copying 800 small gradients).
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.tensor = torch.empty(numel, dtype=dtype, device=device)
        # Event after which it may be filled again, if that is not in stream order anyway.
        self.last_read: Any = None
        self._views: dict[int, list[torch.Tensor]] = {}

    def views(
        self, index: int, params: Sequence[nn.Parameter], starts: Sequence[int]
    ) -> list[torch.Tensor]:
        if index not in self._views:
            self._views[index] = [
                self.tensor[start : start + param.numel()].view(param.shape)
                for param, start in zip(params, starts, strict=True)
            ]
        return self._views[index]


class BucketBuffers:
    """Buffers of all buckets; with `reuses` they are kept, large enough for any of a dtype."""

    def __init__(self, device: torch.device, reuses: bool) -> None:
        self._device = device
        self._reuses = reuses
        self.free: list[BucketBuffer] = []
        self._largest: dict[Any, int] = {}

    def plan(self, plans: Sequence[Payload]) -> None:
        self.free = []
        self._largest = {}
        for plan in plans:
            self._largest[plan.kind] = max(plan.numel, self._largest.get(plan.kind, 0))

    def take(self, plan: Payload) -> BucketBuffer:
        for position, buffer in enumerate(self.free):
            if buffer.tensor.dtype == plan.kind and buffer.tensor.numel() >= plan.numel:
                if buffer.last_read is not None:
                    # Its owned part may still be on its way to the host, on another stream.
                    get_accelerator().current_stream().wait_event(buffer.last_read)
                return self.free.pop(position)
        numel = self._largest[plan.kind] if self._reuses else plan.numel
        return BucketBuffer(numel, plan.kind, self._device)

    def give_back(self, buffer: BucketBuffer, read: object) -> None:
        if self._reuses:
            buffer.last_read = read
            self.free.append(buffer)

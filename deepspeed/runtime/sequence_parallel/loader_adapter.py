"""Batches of whole sequences, cut for the ranks that share them. Every rank's loader has batches of
its own; the ranks of a group train on the first one's next batch together, then on the second's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from deepspeed import comm as dist
from deepspeed.sequence.cross_entropy import IGNORE_INDEX

Batch = dict[str, Any]


class UlyssesSPDataLoaderAdapter:
    """A loader around `dl`, of whole sequences, whose batches are piece `sp_rank` of
    `sp_world_size`.

    Batches are dicts with `position_ids` [b, s]. Every tensor [b, s, ...] is cut along dimension 1
    and goes to `device`, anything else is passed on whole. `labels` are shifted before they are
    cut, because a piece's last label is the next piece's first token, and become `shift_labels`.
    """

    def __init__(
        self,
        dl: Any,
        sp_rank: int,
        sp_group: dist.Group,
        sp_world_size: int,
        device: torch.device | str,
    ) -> None:
        self.dl = dl
        self.sp_rank, self.sp_group, self.sp_world_size = sp_rank, sp_group, sp_world_size
        self.device = device
        self._running: Iterator[Batch] | None = None

    def __len__(self) -> int:
        """Count the batches of all ranks of the group, which have equally many."""
        return len(self.dl) * self.sp_world_size

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.dl, "set_epoch"):
            self.dl.set_epoch(epoch)

    def __iter__(self) -> UlyssesSPDataLoaderAdapter:
        self._running = self._pieces()
        return self

    def __next__(self) -> Batch:
        """Return the next piece. Collective; batches that cannot be cut are a ValueError on all."""
        if self._running is None:
            self._running = self._pieces()
        return next(self._running)

    def _pieces(self) -> Iterator[Batch]:
        source = iter(self.dl)
        while True:
            batches = self._of_all(next(source, None))
            if all(batch is None for batch in batches):
                return
            faults = [self._fault(batch) for batch in batches]
            for rank, fault in enumerate(faults):
                if fault is not None:
                    raise ValueError(f"the batch of rank {rank} of those that share it {fault}")
            # accelerate's loader says so with its last batch, and accumulation ends there.
            ended = getattr(self.dl, "end_of_dataloader", False)
            for left, batch in enumerate(batches, start=1 - len(batches)):
                if ended:
                    self.dl.end_of_dataloader = left == 0
                yield self._cut(batch)

    def _of_all(self, own: Any) -> list[Any]:
        batches: list[Any] = [None] * self.sp_world_size
        if isinstance(own, Mapping):
            own = {
                key: value.cpu() if isinstance(value, torch.Tensor) else value
                for key, value in own.items()
            }
        dist.all_gather_object(batches, own, group=self.sp_group)
        return batches

    def _fault(self, batch: Any) -> str | None:
        """Tell what is wrong with a batch; every rank looks at all of them, so that all raise."""
        if batch is None:
            return "is missing: its loader ended before the others; make them equally long"
        if not isinstance(batch, Mapping):
            return f"is a {type(batch).__name__}: give a dict of tensors, or wrap the model"
        positions = batch.get("position_ids")
        if not isinstance(positions, torch.Tensor) or positions.dim() != 2:
            return (
                "has no position_ids [b, s], without which a piece doesn't know where it belongs: "
                "add torch.arange(s) per row, from 0 again for each packed document"
            )
        length = positions.shape[1]
        if length % self.sp_world_size:
            return (
                f"has {length} positions, which {self.sp_world_size} ranks do not divide: pad to a "
                f"multiple of {self.sp_world_size} (pad_to_multiple_of of the collator)"
            )
        mask = batch.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.shape != positions.shape:
            return (
                f"has an attention_mask of shape {tuple(mask.shape)}, which cannot be cut: give "
                "[b, s], where 0 is padding, or none"
            )
        return None

    def _cut(self, batch: Mapping[str, Any]) -> Batch:
        whole = dict(batch)
        labels = whole.pop("labels", None)
        if labels is not None and whole.get("shift_labels") is None:
            whole["shift_labels"] = F.pad(labels, (0, 1), value=IGNORE_INDEX)[:, 1:]
        length = whole["position_ids"].shape[1]
        piece = length // self.sp_world_size
        for key, value in whole.items():
            if isinstance(value, torch.Tensor):
                if value.dim() > 1 and value.shape[1] == length:
                    value = value.narrow(1, self.sp_rank * piece, piece).contiguous()
                whole[key] = value.to(self.device)
        return whole

"""What the end of a pipeline yields over a batch, and how all stages learn it."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed import comm as dist
from deepspeed.comm.parallel_map import ParallelMap
from deepspeed.runtime.pipe.module import PipelineError


class BatchOutputs:
    """Losses and outputs of one batch; empty but on the last stage.

    Attributes:
        results: Of each micro-batch of an evaluation, its loss, or its output where no loss is
            computed.
        logits: Of each micro-batch of an evaluation, the last layer's output.
    """

    def __init__(self, parallel_map: ParallelMap, device: torch.device) -> None:
        self._pipe, self._data = parallel_map.pipe, parallel_map.data
        self._is_last_stage = self._pipe.rank == self._pipe.size - 1
        self._device = device
        self._total: torch.Tensor | None = None
        self._additional: dict[str, torch.Tensor] = {}
        self.results: list[Any] = []
        self.logits: list[Any] = []

    def add_loss(self, loss: torch.Tensor, additional: dict[str, torch.Tensor] | None) -> None:
        """Add the loss of a micro-batch, and those that the module reports beside it."""
        value = loss.detach().float().reshape(())
        self._total = value if self._total is None else self._total + value
        for name, tensor in (additional or {}).items():
            self._additional[name] = (
                self._additional.get(name, torch.zeros_like(value)) + tensor.detach().float()
            )

    def mean_loss(self, micro_batches: int) -> torch.Tensor:
        """Mean of the losses over micro-batches and data-parallel ranks, fp32, 0-dim, on all ranks.

        One reduction over all ranks, to which only the last stage adds, instead of one over its
        ranks and a broadcast.
        """
        share = torch.zeros((), dtype=torch.float32, device=self._device)
        if self._total is not None:
            share += self._total / (micro_batches * (dist.get_world_size() // self._pipe.size))
        dist.all_reduce(share)
        return share

    def mean_additional_losses(self, micro_batches: int) -> dict[str, torch.Tensor] | None:
        return {name: value / micro_batches for name, value in self._additional.items()} or None

    def mean_result(self) -> torch.Tensor | None:
        """Mean of the results over micro-batches and data-parallel ranks, fp32; last stage only."""
        if not self._is_last_stage:
            return None
        mean: torch.Tensor = torch.stack([result.detach().float() for result in self.results]).mean(
            0
        )
        dist.all_reduce(mean, group=self._data.group)
        return mean / self._data.size

    def broadcast_scalar(self, data: torch.Tensor | None) -> torch.Tensor:
        """Give the last stage's scalar to all stages, fp32, 0-dim."""
        result = torch.zeros((), dtype=torch.float32, device=self._device)
        if self._is_last_stage:
            if data is None or data.numel() != 1:
                raise PipelineError(
                    "eval_batch: only a scalar is given to all stages, the loss is "
                    f"{described(data)}; give bcast_loss=False"
                )
            result.copy_(data.reshape(()))
        dist.broadcast(result, src=self._pipe.ranks[-1], group=self._pipe.group)
        return result


def described(value: Any) -> str:
    """Say what a value is, for errors."""
    return (
        f"a tensor of shape {tuple(value.shape)}"
        if isinstance(value, torch.Tensor)
        else type(value).__name__
    )

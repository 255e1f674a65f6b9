"""Micro-batches of a stage: where it reads them, what it keeps of one until its backward is over,
and what they yield at the end of the pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

from deepspeed import comm as dist
from deepspeed.comm.parallel_map import ParallelMap
from deepspeed.runtime.engine_parts.losses import mean_of_all
from deepspeed.runtime.pipe.layer_spec import PipelineError
from deepspeed.runtime.pipe.split_backward import SplitBackward
from deepspeed.runtime.utils import tensors_in


class PipeBufferError(RuntimeError):
    """A schedule uses a buffer in an order that would lose a micro-batch."""


class MicroBatches:
    """Where the first and the last stage read micro-batches; each passes through `prepare`."""

    def __init__(self) -> None:
        self.iterator: Iterator[Any] | None = None
        self.prepare: Callable[[Any], Any] | None = None

    def next(self) -> tuple[Any, Any]:
        """Read the next micro-batch, `(inputs, labels)`."""
        if self.iterator is None:
            raise PipelineError(
                "no data: give train_batch(data_iter=...) or set_dataloader(...) on the ranks of "
                "the first and the last stage"
            )
        batch = next(self.iterator)
        if self.prepare is not None:
            batch = self.prepare(batch)
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise PipelineError(
                f"a micro-batch must be (inputs, labels), got {type(batch).__name__}; see "
                "set_batch_fn()"
            )
        return batch[0], batch[1]


def _root(tensor: torch.Tensor) -> GradientEdge:
    """Tell where backward starts from `tensor`; it keeps the graph alive, and not the tensor."""
    edge = get_gradient_edge(tensor)
    if isinstance(edge.node, BackwardCFunction) and "ownership_token" not in edge._fields:
        # A node written in Python does not keep the graph, and the edges of torch 2.6 hold nothing
        # else. That of a view does; a view's gradient is passed on as it is.
        with torch.enable_grad():
            edge = get_gradient_edge(tensor.view_as(tensor))
    return edge


class PipeBuffer:
    """One micro-batch in one model chunk.

    Outputs are kept only until they are sent; what backward needs is where it starts in the graph
    and what gradients will come. The activations' memory is then not held a third time.

    Attributes:
        inputs: What the chunk computes from.
        outputs: What the chunk computed, until it is sent.
        labels, loss: Of this micro-batch, on the last part of the pipeline only.
        roots: Where backward starts.
        likes: Meta tensors of the gradients that will arrive, one per root.
        grads: The gradients that arrived, one per root.
        split: The backward, if it is run in two parts.
    """

    def __init__(self) -> None:
        self.release()

    def release(self) -> None:
        self.inputs: Any = None
        self.labels: Any = None
        self.outputs: Any = None
        self.loss: Any = None
        self.roots: list[GradientEdge] = []
        self.likes: list[torch.Tensor] = []
        self.grads: tuple[torch.Tensor | None, ...] = ()
        self.split: SplitBackward | None = None
        self._is_filled = False

    def fill(self, inputs: object) -> None:
        """Take a micro-batch that arrives; refuse it if the one before is still in use."""
        if self._is_filled:
            raise PipeBufferError(
                "a micro-batch arrives in a pipeline buffer whose last one is not done: the "
                "schedule reuses it early"
            )
        self.inputs = inputs
        self._is_filled = True

    def take_inputs(self) -> Any:
        if not self._is_filled:
            raise PipeBufferError(
                "forward from an empty pipeline buffer: the schedule has no load or receive before "
                "it"
            )
        return self.inputs

    def keep_roots(self, outputs: object) -> None:
        """Remember where backward will start from `outputs`."""
        required = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
        self.roots = [_root(tensor) for tensor in required]
        self.likes = [
            torch.empty_like(tensor, device="meta", requires_grad=False) for tensor in required
        ]

    @property
    def leaves(self) -> list[torch.Tensor]:
        """The received tensors whose gradients the stage before waits for, in message order."""
        return [tensor for tensor in tensors_in(self.inputs) if tensor.requires_grad]

    def input_grads(self) -> tuple[torch.Tensor, ...]:
        """Gradient of each leaf, zeros if it has none: the stage before expects one message."""
        return tuple(
            leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in self.leaves
        )


class BatchOutputs:
    """Losses and outputs of one batch; empty but on the last stage.

    Attributes:
        results: Of each micro-batch of an evaluation, its loss, or else its output.
        logits: Of each micro-batch of an evaluation, the last layer's output.
    """

    def __init__(self, parallel_map: ParallelMap, device: torch.device) -> None:
        self._pipe, self._data = parallel_map.pipe, parallel_map.data
        self._is_last_stage = self._pipe.rank == self._pipe.size - 1
        self._device = device
        self._losses: list[torch.Tensor] = []
        self._additional: dict[str, torch.Tensor] = {}
        self.results: list[Any] = []
        self.logits: list[Any] = []

    def add_loss(self, loss: torch.Tensor, additional: dict[str, torch.Tensor] | None) -> None:
        """Add the loss of a micro-batch, and those that the module reports beside it."""
        value = loss.detach().float().reshape(())
        self._losses.append(value)
        for name, tensor in (additional or {}).items():
            self._additional[name] = (
                self._additional.get(name, torch.zeros_like(value)) + tensor.detach().float()
            )

    def mean_loss(self, micro_batches: int) -> torch.Tensor:
        """Mean of the losses over micro-batches and data-parallel ranks, fp32, 0-dim, on all ranks.

        Only the last stage adds; no broadcast.
        """
        shape = (micro_batches, self._data.size)
        copies = dist.get_world_size() // (self._pipe.size * self._data.size)
        return mean_of_all(self._losses, shape, self._data.rank, self._device) / copies

    def mean_additional_losses(self, micro_batches: int) -> dict[str, torch.Tensor] | None:
        return {name: value / micro_batches for name, value in self._additional.items()} or None

    def mean_result(self) -> torch.Tensor | None:
        """Mean of the results over micro-batches and data-parallel ranks, fp32; last stage only."""
        if not self._is_last_stage:
            return None
        mean: torch.Tensor = torch.stack([each.detach().float() for each in self.results]).mean(0)
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


def described(value: object) -> str:
    """Say what a value is, for errors."""
    return (
        f"a tensor of shape {tuple(value.shape)}"
        if isinstance(value, torch.Tensor)
        else type(value).__name__
    )

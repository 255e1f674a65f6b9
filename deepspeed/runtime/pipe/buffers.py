"""Micro-batches of a stage: where it reads them, and what it keeps of one from its arrival until
its backward is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

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
    and what gradients will come. The activations' memory is then the graph's and the channel's, not
    held a third time.

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

    def fill(self, inputs: Any) -> None:
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

    def keep_roots(self, outputs: Any) -> None:
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
        """Gradient of each leaf, zeros where the outputs do not depend on it: the stage before
        expects one message in any case.
        """
        return tuple(
            leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in self.leaves
        )

"""How an optimizer whose update of an element depends on the rest of its parameter works on shards.
What is elementwise it does on the flat shard; for the rest it asks `WholeParameters`: a function of
whole parameters, which the rank that a parameter is dealt to computes (Muon's matrices), or a sum
over all parts of each (Lamb's norms). So state stays cut. Where a tensor is a whole parameter the
answers are trivial.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import EllipsisType
from typing import Any, NamedTuple

import torch

from deepspeed.ops.parameter_runs import Runs
from deepspeed.ops.squares import IN_ORDER, Squares


class Part(NamedTuple):
    """What this rank has of a parameter: `tensor[at]` of a tensor like its shard."""

    param: int
    at: slice | EllipsisType


Argument = Callable[[slice | EllipsisType], torch.Tensor]
Function = Callable[[torch.Tensor], torch.Tensor]
Use = Callable[[Part, torch.Tensor], None]


class WholeParameters(ABC):
    """Parameters of which this rank has parts in one tensor that an optimizer updates: their whole
    shapes, and the parts, at most one of each.
    """

    shapes: Sequence[torch.Size]
    parts: Sequence[Part]

    @abstractmethod
    def through_owners(self, argument: Argument, function: Function, use: Use) -> None:
        """Compute `function` of each whole parameter once, on the rank it is dealt to; collective.
        `argument` says what of its argument lies where a part does, once for each part and a slice
        of nothing; `use` gets each part of the results, in any order and before all arguments are
        asked for.
        """

    @abstractmethod
    def sum_parts(self, values: torch.Tensor) -> torch.Tensor:
        """Sum `values`, which may be overwritten, over ranks; collective."""

    def squares(self, tensors: Sequence[torch.Tensor], by: Squares) -> torch.Tensor:
        """Sum the squares of whole parameters in tensors like the shard; collective.

        Returns:
            fp32, shape `[len(tensors), len(shapes)]`.
        """
        count = len(self.shapes)
        sums = by.zeros(len(tensors) * count, tensors[0].device)
        for number, tensor in enumerate(tensors):
            for param, at in self.parts:
                sums[number * count + param] = by.of([tensor[at].reshape(-1)])
        return by.totals(self.sum_parts(sums)).view(len(tensors), count)


class OneParameter(WholeParameters):
    """A tensor that is a whole parameter."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shapes = [tensor.shape]
        self.parts = [Part(0, ...)]

    def through_owners(self, argument: Argument, function: Function, use: Use) -> None:
        for part in self.parts:
            use(part, function(argument(part.at)))

    def sum_parts(self, values: torch.Tensor) -> torch.Tensor:
        return values


class WholeParameterOptimizer(torch.optim.Optimizer):
    """See module; arguments as `torch.optim.Optimizer`."""

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._shards: dict[torch.Tensor, WholeParameters] = {}
        self.squares: Squares = IN_ORDER  # how norms are summed
        self.runs: Runs = {}  # the elements that a step is about, of tensors where not all are
        super().__init__(params, defaults)

    def use_shards(
        self, shards: Mapping[torch.Tensor, WholeParameters], squares: Squares = IN_ORDER
    ) -> None:
        """Take these tensors for shards from now on, the others for whole parameters."""
        self._shards, self.squares = dict(shards), squares

    def parameters_in(self, tensor: torch.Tensor) -> WholeParameters:
        found = self._shards.get(tensor)
        return OneParameter(tensor) if found is None else found

    @contextmanager
    def stepping(self, runs: Runs) -> Iterator[None]:
        """Let `step` update only these elements of tensors in `runs`. All ranks take part in it as
        in any other step, whatever is left out.
        """
        self.runs = runs
        try:
            yield
        finally:
            self.runs = {}

    def is_stepped(self, tensor: torch.Tensor, part: Part) -> bool:
        """Return whether a part of a parameter is updated in this step, which goes by runs."""
        runs = self.runs.get(tensor)
        if runs is None or isinstance(part.at, EllipsisType):
            return True
        return any(run.start <= part.at.start and part.at.stop <= run.end for run in runs)

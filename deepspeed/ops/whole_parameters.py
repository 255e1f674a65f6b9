"""How an optimizer whose update of an element depends on the rest of its parameter works on shards.

ZeRO hands an optimizer one flat shard per parameter group, in which parts of several parameters
lie. What is elementwise (moments, weight decay) it does on the shard as it is. For the rest it asks
`WholeParameters`: a function of whole parameters, which the rank that a parameter is dealt to
computes (Muon's matrices), or a sum over all parts of each parameter (Lamb's norms). So all state
stays cut as any other optimizer's: as large on every rank, and saved and resharded alike.

Where a tensor is a whole parameter (one process, ZeRO off), the answers are trivial, and the
optimizer is the same code.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import EllipsisType
from typing import Any, NamedTuple

import torch


class Part(NamedTuple):
    """What this rank has of a parameter: `tensor[at]` of a tensor like its shard."""

    param: int
    at: slice | EllipsisType


class WholeParameters(ABC):
    """Parameters of which this rank has parts in one tensor that an optimizer updates: their whole
    shapes, and the parts, at most one of each.
    """

    shapes: Sequence[torch.Size]
    parts: Sequence[Part]

    @abstractmethod
    def through_owners(
        self,
        argument: Callable[[slice | EllipsisType], torch.Tensor],
        function: Callable[[torch.Tensor], torch.Tensor],
        use: Callable[[Part, torch.Tensor], None],
    ) -> None:
        """Compute `function` of each whole parameter once, on the rank it is dealt to. Collective.

        Args:
            argument: What of the functions' arguments lies where a part does, in the shape of the
                tensor's part; of any dtype, on the tensor's device. Called once for each part, and
                for a slice of nothing.
            function: From a tensor of a parameter's shape to one of the same shape and dtype.
            use: Called once with each part and what of the results lies there, in any order and
                before all arguments are asked for.
        """

    @abstractmethod
    def sum_parts(self, values: torch.Tensor) -> torch.Tensor:
        """Sum `values` `[..., len(shapes)]`, which may be overwritten, over all ranks that share
        the parameters. Collective.
        """


class OneParameter(WholeParameters):
    """A tensor that is a whole parameter."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shapes = [tensor.shape]
        self.parts = [Part(0, ...)]

    def through_owners(
        self,
        argument: Callable[[slice | EllipsisType], torch.Tensor],
        function: Callable[[torch.Tensor], torch.Tensor],
        use: Callable[[Part, torch.Tensor], None],
    ) -> None:
        for part in self.parts:
            use(part, function(argument(part.at)))

    def sum_parts(self, values: torch.Tensor) -> torch.Tensor:
        return values


class WholeParameterOptimizer(torch.optim.Optimizer):
    """See module; arguments as `torch.optim.Optimizer`."""

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._shards: dict[torch.Tensor, WholeParameters] = {}
        super().__init__(params, defaults)

    def use_shards(self, shards: Mapping[torch.Tensor, WholeParameters]) -> None:
        """From now on these tensors are shards; the others are whole parameters."""
        self._shards = dict(shards)

    def parameters_in(self, tensor: torch.Tensor) -> WholeParameters:
        """The parameters of a tensor that is updated."""
        found = self._shards.get(tensor)
        return OneParameter(tensor) if found is None else found

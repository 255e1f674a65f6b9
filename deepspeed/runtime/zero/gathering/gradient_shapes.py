"""Shapes of sharded parameters while their gradients come."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from deepspeed.runtime.zero.gathering.gather_unit import GatherUnit
from deepspeed.runtime.zero.parameters.zero_parameter import (
    ShardedParameter,
    placeholder,
    record_of,
)


class GradientShapes:
    """Autograd asks a parameter for its shape when it hands it its gradient; its unit may be gone
    by then (an embedding reads nothing in backward).
    """

    def __init__(self) -> None:
        self._shaped: list[nn.Parameter] = []

    def handles(self, units: Iterable[GatherUnit]) -> list[Any]:
        """Hooks that give the trained parameters of units a shape when their gradients come."""

        def shape_of(param: nn.Parameter) -> Any:
            def on_gradient(grad: torch.Tensor) -> None:
                self.give(param)

            return on_gradient

        return [
            param.register_hook(shape_of(param))
            for unit in units
            for param in unit.params
            if param.requires_grad
        ]

    def give(self, param: nn.Parameter) -> None:
        """Let a parameter have its logical shape until backward ends, so that it can have a
        gradient; its values are zeros without memory.
        """
        if type(param) is ShardedParameter:
            self._shaped.append(param)
            record = record_of(param)
            zero = torch.zeros((), dtype=record.shard.dtype, device=record.device)
            with torch._C.DisableTorchFunctionSubclass():
                param.data = zero.expand(record.shape)

    def drop(self) -> None:
        """Backward is over."""
        for param in self._shaped:
            if type(param) is ShardedParameter:
                with torch._C.DisableTorchFunctionSubclass():
                    param.data = placeholder(param.dtype, record_of(param).device)
        self._shaped = []

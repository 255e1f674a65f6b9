"""`ordinary_copies`: what `nn.Parameter(parameter)` makes of a parameter of stage 3."""

from __future__ import annotations

from typing import Any

from torch import nn

from deepspeed.runtime.zero.parameters.zero_parameter import (
    ShardedParameter,
    ZeroParameter,
    refusal,
)


class _OrdinaryCopies:
    """Lets `nn.Parameter(parameter)` make an ordinary parameter of one of stage 3 that is whole;
    torch itself refuses subclasses (`weight_norm` and others make such copies). May be nested.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._original: Any = None

    def begin(self) -> None:
        if self._depth == 0:
            self._original = nn.Parameter.__dict__["__new__"]
            nn.Parameter.__new__ = staticmethod(self._new)  # type: ignore[method-assign]  # until `end`
        self._depth += 1

    def end(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            nn.Parameter.__new__ = self._original  # type: ignore[method-assign]  # what it was

    def _new(self, cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        if type(data) is ShardedParameter:
            raise RuntimeError(refusal(data._zero3, "nn.Parameter"))
        plain = data.data if type(data) is ZeroParameter else data
        return self._original.__func__(cls, plain, requires_grad)


ordinary_copies = _OrdinaryCopies()

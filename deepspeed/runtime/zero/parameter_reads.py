"""Modules whose parameters are made whole by being read.

`module.weight` looks into `module._parameters`; with a `ParameterDict` there, whoever runs modules
hears of it when what is read is sharded (`on_read` of the parameter's record), and can gather it.
Iterating over parameters reads nothing, but where a constructor is running: see `init_context`.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from deepspeed.runtime.zero.zero_parameter import ShardedParameter


class ParameterDict(dict[str, Any]):
    """`_parameters` of a module."""

    def __getitem__(self, name: str) -> Any:
        """The parameter, whole if somebody is there who gathers it."""
        param = super().__getitem__(name)
        if type(param) is ShardedParameter:
            _read(param)
        return param

    def items(self) -> Any:
        """As dict's; a constructor that goes over its parameters reads them."""
        self._read_all()
        return super().items()

    def values(self) -> Any:
        """As dict's; a constructor that goes over its parameters reads them."""
        self._read_all()
        return super().values()

    def _read_all(self) -> None:
        for param in super().values():
            if type(param) is ShardedParameter and param._zero3.is_read_by_iteration:
                _read(param)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copied and pickled as the plain dictionary that it stands for."""
        return dict, (dict(super().items()),)


def _read(param: ShardedParameter) -> None:
    on_read = param._zero3.on_read
    if on_read is not None:
        on_read(param)


def watch_reads(module: nn.Module) -> None:
    """Let reads of this module's own parameters be heard."""
    if type(module._parameters) is not ParameterDict:
        module.__dict__["_parameters"] = ParameterDict(module._parameters)


def unwatch_reads(module: nn.Module) -> None:
    """The end of `watch_reads`."""
    if type(module._parameters) is ParameterDict:
        module.__dict__["_parameters"] = dict(module._parameters.items())

"""Modules whose parameters hear of being read, and hooks on modules.

`module.weight` looks into `module._parameters`; a `ParameterDict` there tells parameters of a class
that has `ds_was_read`, or `ds_was_listed` when all are gone over, before they are handed out.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, ItemsView, Iterable, Iterator, ValuesView
from typing import Any, SupportsIndex

import torch
from torch import nn


def _nothing(*args: object) -> None:
    """Do nothing, as a copied or pickled module has it in place of a hook."""


def _no_hook() -> Callable[..., None]:
    return _nothing


def _compiler_disabled(hook: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return `hook` such that nothing of it is traced; None while nobody compiles."""
    if "torch._dynamo" not in sys.modules:
        return None
    from torch._dynamo.decorators import skip  # startup: takes long, and who compiles has it anyway

    skip(ModuleHook.__call__)
    return torch.compiler.disable(hook)


class ModuleHook:
    """A hook that copies of its module do not have, because they are not the engine's. Graphs break
    at it, and nothing that it calls is traced.
    """

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook
        self._untraced = _compiler_disabled(hook)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        if self._untraced is None:
            self._untraced = _compiler_disabled(self._hook)
        hook = self._untraced or self._hook
        return hook(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _no_hook, ()


class ParameterDict(dict[str, nn.Parameter | None]):
    """The `_parameters` of a module, which tell parameters that they are read or listed."""

    def __getitem__(self, name: str) -> nn.Parameter | None:
        param = super().__getitem__(name)
        heard = getattr(type(param), "ds_was_read", None)
        if heard is not None:
            heard(param)
        return param

    def items(self) -> ItemsView[str, nn.Parameter | None]:  # type: ignore[override]  # dict's own view
        self._list_all()
        return super().items()

    def values(self) -> ValuesView[nn.Parameter | None]:  # type: ignore[override]  # dict's own view
        self._list_all()
        return super().values()

    def _list_all(self) -> None:
        for param in super().values():
            heard = getattr(type(param), "ds_was_listed", None)
            if heard is not None:
                heard(param)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, nn.Parameter | None]:
        """Copy as a plain dictionary, unless a copy of a parameter is told things too."""
        copied = {name: copy.deepcopy(param, memo) for name, param in super().items()}
        told = any(hasattr(type(param), "ds_was_read") for param in copied.values())
        return ParameterDict(copied) if told else copied

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        """Pickle as the plain dictionary that it stands for."""
        return dict, (dict(super().items()),)


def hears_reads(module: nn.Module) -> bool:
    """Whether reads of this module's own parameters are heard."""
    return type(module._parameters) is ParameterDict


def watch_reads(module: nn.Module) -> None:
    """Let reads of this module's own parameters be heard."""
    if not hears_reads(module):
        module.__dict__["_parameters"] = ParameterDict(module._parameters)


def unwatch_reads(module: nn.Module) -> None:
    """End `watch_reads`."""
    if hears_reads(module):
        module.__dict__["_parameters"] = dict(dict.items(module._parameters))


def flat_values(values: Iterable[Any]) -> Iterator[Any]:
    """Yield what `values`, and lists and tuples among them, hold."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from flat_values(value)
        else:
            yield value


def plain_copy(param: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
    """Make a deep copy, an ordinary one, of a whole parameter of a class of ours."""
    if id(param) not in memo:
        memo[id(param)] = nn.Parameter(param.data.clone(), param.requires_grad)
    copied: nn.Parameter = memo[id(param)]
    return copied

"""An attribute that reads the configuration tree, for upstream's second names of its parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeVar

if TYPE_CHECKING:
    from deepspeed.runtime.config_models.training import TrainingConfig

Value = TypeVar("Value", covariant=True)


class _HasTree(Protocol):
    tree: TrainingConfig


class Reading(Generic[Value]):
    """A read-only attribute of an object with a ``tree``.

    Args:
        read: what it returns of the tree.
    """

    def __init__(self, read: Callable[[TrainingConfig], Value]) -> None:
        self._read = read

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, config: _HasTree, owner: type) -> Value:
        return self._read(config.tree)

    def __set__(self, config: _HasTree, value: Any) -> NoReturn:
        # Set beside the tree, it would reach nobody.
        raise AttributeError(f"{self._name}: it is read from the tree of the configuration")

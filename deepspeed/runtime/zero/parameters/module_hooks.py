"""Hooks of an engine on the modules of a model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any


def _nothing(*args: Any) -> None:
    """What a copied or pickled module has in place of a hook."""


def _no_hook() -> Callable[..., None]:
    return _nothing


class ModuleHook(partial[Any]):
    """A hook that copies of its module do not have, because they are not the engine's."""

    def __reduce__(self) -> tuple[Any, ...]:
        """See class."""
        return _no_hook, ()

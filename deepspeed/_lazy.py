"""Submodules and names of a package that load on first use (`import deepspeed` stays short)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from deepspeed._absent import reason
from deepspeed._modules import is_made


def lazy_attributes(
    package: str,
    names: Mapping[str, str] | None = None,
    submodules: tuple[str, ...] = (),
    tables: tuple[str, ...] = (),
) -> Callable[[str], Any]:
    """Make a module `__getattr__` for `package`. `from package import *` brings `names` and those
    of `tables` too, unless there are submodules: a whole package would load.
    """
    names = names or {}

    def __getattr__(name: str) -> Any:
        if name in names:
            return getattr(importlib.import_module(names[name]), name)
        if name in submodules or is_made(f"{package}.{name}"):
            return importlib.import_module(f"{package}.{name}")
        if name == "__all__" and not submodules:
            own = (own for own in vars(sys.modules[package]) if not own.startswith("_"))
            return [*own, *names, *(derived for table in tables for derived in _loaded(table))]
        # Python asks modules for names of its own, which must not load anything.
        for table in () if name.startswith("_") else tables:
            if name in _loaded(table):
                return _loaded(table)[name]
        raise AttributeError(
            reason(package, name) or f"module {package!r} has no attribute {name!r}"
        )

    return __getattr__


def _loaded(table: str) -> Mapping[str, Any]:
    module, _, attribute = table.partition(":")
    loaded: Mapping[str, Any] = getattr(importlib.import_module(module), attribute)
    return loaded

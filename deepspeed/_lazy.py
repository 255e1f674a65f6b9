"""Submodules and names of a package that load on first use (startup: `import deepspeed` stays
within a quarter of a second).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from deepspeed._absent import reason


def lazy_attributes(
    package: str, names: Mapping[str, str], submodules: tuple[str, ...] = ()
) -> Callable[[str], Any]:
    """A module `__getattr__` for `package`.

    Args:
        package: `__name__` of the package.
        names: Attribute -> module that defines it.
        submodules: Submodules reachable as attributes without importing them first, as users of
            upstream do.
    """

    def __getattr__(name: str) -> Any:
        if name in names:
            return getattr(importlib.import_module(names[name]), name)
        if name in submodules:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(
            reason(package, name) or f"module {package!r} has no attribute {name!r}"
        )

    return __getattr__

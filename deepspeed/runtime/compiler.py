"""Whether, and how, models may be compiled by torch. Does not compile anything: ``engine.compile``
does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., object])


def is_compile_supported() -> bool:
    """Return whether torch can compile."""
    return hasattr(torch, "compiler") and hasattr(torch.nn.Module, "compile")


def disable(func: Function) -> Function:
    """Return ``func`` such that compiled code calls it as it is."""
    if not is_compile_supported():
        return func
    torch_disable: Callable[[Function], Function] = torch.compiler.disable
    return torch_disable(func)


def is_compiling() -> bool:
    """Return whether the calling code is being traced by the compiler."""
    return is_compile_supported() and torch.compiler.is_compiling()

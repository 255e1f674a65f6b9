"""Whether, and how, models may be compiled by torch, and which parts of them. Does not compile
anything: ``engine.compile`` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from deepspeed.runtime.zero.units import is_called, repeated_types

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


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks that a model is built of: the outermost modules of which a list or a sequence has
    several of one type, and which consist of modules themselves.

    Compiled one by one they give their gradients one by one: the backward of one compiled graph
    gives all of its gradients at its end.
    """
    blocks: list[nn.Module] = []
    repeated = repeated_types(model, _has_forward_and_children)
    for child in model.children():
        if type(child) in repeated:
            blocks.append(child)
        else:
            blocks.extend(blocks_of(child))
    return blocks


def _has_forward_and_children(module: nn.Module) -> bool:
    return is_called(module) and next(module.children(), None) is not None

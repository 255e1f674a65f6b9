"""Whether, and how, models may be compiled by torch, and which parts of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import nn

from deepspeed.runtime.zero.gathering.units import is_called, repeated_types

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


def traces_subclasses() -> bool:
    """Whether torch traces what reads parameters of a subclass, such as stage 3's."""
    from torch._dynamo import config  # startup: takes long, and who compiles has it anyway

    return hasattr(config, "nontraceable_tensor_subclasses")


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """List the blocks that a model is built of: the outermost modules of which a list or a sequence
    has several of one type, and which consist of modules themselves.

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


def parts_between_hooks(
    roots: Iterable[nn.Module], has_hooks: Callable[[nn.Module], bool]
) -> list[nn.Module]:
    """List the outermost modules at or below `roots` whose forward runs no module with hooks, so
    that hooks stay outside of graphs. Those that consist of modules themselves, if there are any:
    there is little to gain in others.
    """
    found: dict[nn.Module, None] = {}
    waiting = list(roots)
    while waiting:
        module = waiting.pop(0)
        below = (other for other in module.modules() if other is not module)
        if is_called(module) and not any(has_hooks(other) for other in below):
            found[module] = None
        else:
            waiting.extend(module.children())
    return [part for part in found if next(part.children(), None) is not None] or list(found)


class CompiledForward:
    """A module's `forward`, compiled by itself: hooks of the module run around it, not in its
    graph. Copied and pickled as the forward that it was.
    """

    def __init__(self, module: nn.Module, **how: Any) -> None:
        self._module = module
        self._of_instance = vars(module).get("forward")
        self._own = module.forward
        self._compiled = torch.compile(self._own, **how)
        module.forward = self

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return self._compiled(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self._own,)

    def remove(self) -> None:
        """Give the module its own forward back."""
        del self._module.forward
        if self._of_instance is not None:
            self._module.forward = self._of_instance


def _same(value: object) -> Any:
    return value


def compile_in_place(
    model: nn.Module, by_block: bool, has_hooks: Callable[[nn.Module], bool] | None, **how: object
) -> list[CompiledForward]:
    """Compile `model`; with `by_block` each of its blocks, if it has any, and nothing around them.
    Modules that `has_hooks` names stay outside of graphs.

    Returns:
        The forwards that were put in place; empty where modules compile themselves.
    """
    roots = (blocks_of(model) if by_block else []) or [model]
    if has_hooks is not None:
        return [CompiledForward(part, **how) for part in parts_between_hooks(roots, has_hooks)]
    for module in roots:
        module.compile(**how)
    return []

"""Marks modules that ZeRO stage 3 gathers as one, with everything below them.

Where ranks may run different children of a module (experts), or a module reads its children's
parameters itself, the module is to be marked, before `deepspeed.initialize`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from deepspeed._lazy import lazy_attributes

# Upstream's further names here say what to use instead.
__getattr__ = lazy_attributes(__name__)

_MARK = "_z3_leaf"


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether a module is marked."""
    return bool(getattr(model, _MARK, False))


def z3_leaf_parameter(model: nn.Parameter) -> bool:
    """Whether a parameter is gathered with a marked module."""
    return bool(getattr(model, "ds_z3_leaf_module", None))


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark one module, or take the mark away."""
    setattr(model, _MARK, flag)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """All marked modules in `model`, itself included."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def _listed(given: Any) -> list[Any]:
    """One class or name by itself is one: a string is a sequence too, of letters."""
    return [given] if isinstance(given, (str, type)) else list(given)


def _is_of(module: nn.Module, cls: type | str) -> bool:
    if isinstance(cls, str):
        own = type(module)
        return cls in (own.__name__, f"{own.__module__}.{own.__qualname__}")
    return isinstance(module, cls)


def _mark(
    model: nn.Module, chosen: Callable[[str, nn.Module], bool], flag: bool, missing: str | None
) -> list[nn.Module]:
    found = [module for name, module in model.named_modules() if chosen(name, module)]
    if not found and missing is not None:
        raise ValueError(f"no module of {type(model).__name__} {missing}")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark all modules of these classes (or class names).

    Returns:
        The modules.

    Raises:
        ValueError: If there is none and `raise_if_not_found`.
    """
    return _mark_classes(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Take the mark away from all modules of these classes; see `set_z3_leaf_modules`."""
    return _mark_classes(model, leaf_module_classes, False, raise_if_not_found)


def _mark_classes(
    model: nn.Module, classes: Sequence[type | str], flag: bool, raise_if_not_found: bool
) -> list[nn.Module]:
    classes = _listed(classes)
    missing = f"is of {classes}" if raise_if_not_found else None
    return _mark(model, lambda _, one: any(_is_of(one, cls) for cls in classes), flag, missing)


def set_z3_leaf_modules_by_name(
    model: nn.Module,
    module_names: Sequence[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules of these names.

    Returns:
        The modules, and the names of which there is none.

    Raises:
        ValueError: If none is found and `raise_if_not_found`.
    """
    missing = "is named" if raise_if_not_found else None
    return _mark_named(model, _listed(module_names), str.__eq__, flag, missing)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module,
    module_name_suffixes: Sequence[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules whose names end in one of these; see `set_z3_leaf_modules_by_name`."""
    missing = "has a name that ends in" if raise_if_not_found else None
    return _mark_named(model, _listed(module_name_suffixes), str.endswith, flag, missing)


def _mark_named(
    model: nn.Module,
    wanted: list[str],
    fits: Callable[[str, str], bool],
    flag: bool,
    missing: str | None,
) -> tuple[list[nn.Module], list[str]]:
    told = missing and f"{missing} {wanted}"
    found = _mark(model, lambda name, _: any(fits(name, one) for one in wanted), flag, told)
    known = [name for name, _ in model.named_modules()]
    return found, [one for one in wanted if not any(fits(name, one) for name in known)]

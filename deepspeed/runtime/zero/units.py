"""Which parameters are gathered together: a model's units, found by its structure.

Pure: looks at modules, changes and communicates nothing. A unit's module is the one whose forward
needs it:

1. a repeated child of a `Sequential` or a list (a transformer's block), with all that is below it,
   a module that was marked as a leaf (`deepspeed.utils.z3_leaf_module`), or one that runs experts,
   of which ranks may choose different ones;
2. outside of those, each module that has parameters of its own (an embedding, a head);
3. parameters of modules that are never called (a `ParameterList`): with the nearest module above
   that is.

A parameter that several modules have belongs to the unit of the first; the others use that one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import nn

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(eq=False)
class UnitPlan:
    """One unit.

    Attributes:
        name: Of its module.
        module: Whose forward needs it.
        params: What that forward uses.
        own: Those that belong to the unit.
    """

    name: str
    module: nn.Module
    params: list[nn.Parameter] = field(default_factory=list)
    own: list[nn.Parameter] = field(default_factory=list)


def is_called(module: nn.Module) -> bool:
    """Whether a module has a forward."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def plan_units(model: nn.Module, is_leaf: Callable[[nn.Module], bool]) -> list[UnitPlan]:
    """The units of a model, in the order in which modules are registered. The first is that of the
    model itself, which may use nothing.

    Args:
        model: The whole model.
        is_leaf: Whether a module is one unit with all that is below it.
    """

    def is_one(module: nn.Module) -> bool:
        return is_leaf(module) or runs_experts(module)

    plans = [UnitPlan("", model)]
    _visit(model, "", plans[0], is_one(model), is_one, plans, set())
    owned: set[nn.Parameter] = set()
    for plan in plans:
        plan.params = list(dict.fromkeys(plan.params))
        plan.own = [param for param in plan.params if param not in owned]
        owned.update(plan.own)
    return plans


def _visit(
    module: nn.Module,
    name: str,
    above: UnitPlan,
    is_unit: bool,
    is_leaf: Callable[[nn.Module], bool],
    plans: list[UnitPlan],
    seen: set[nn.Module],
) -> None:
    if module in seen:
        return
    seen.add(module)
    plan = above
    if is_called(module) and module is not above.module:
        plan = UnitPlan(name, module)
        if is_unit or _has_own(module):
            plans.append(plan)
        else:
            plan = above
    if is_unit and is_called(module):
        plan.params.extend(module.parameters())
        seen.update(module.modules())
        return
    plan.params.extend(param for param in _own(module) if param is not None)
    repeated = repeated_types(module, _has_any)
    for child_name, child in module._modules.items():
        if child is not None:
            full = f"{name}.{child_name}" if name else child_name
            inherits = is_unit and not is_called(module)
            unit = inherits or is_leaf(child) or type(child) in repeated
            _visit(child, full, plan, unit, is_leaf, plans, seen)


def _own(module: nn.Module) -> Iterable[nn.Parameter | None]:
    return dict.values(module._parameters)  # iterating must read nothing; see `parameter_reads`


def _has_own(module: nn.Module) -> bool:
    return any(param is not None for param in _own(module))


def _has_any(module: nn.Module) -> bool:
    return any(_has_own(below) for below in module.modules())


def repeated_types(
    container: nn.Module, counts: Callable[[nn.Module], bool]
) -> set[type[nn.Module]]:
    """Types of which a list, a dict or a sequence has several children that count."""
    if not isinstance(container, _CONTAINERS):
        return set()
    found = Counter(type(child) for child in container.children() if counts(child))
    return {kind for kind, count in found.items() if count > 1}


def runs_experts(module: nn.Module) -> bool:
    """Whether a module's forward runs children that it chooses by the data: it has a list or a dict
    of equal modules by the name of `experts`, or is one, of a class that is called so.
    """
    if is_called(module) and type(module).__name__.endswith("Experts"):
        return bool(repeated_types(module, _has_any))
    experts = module._modules.get("experts")
    return (
        experts is not None and not is_called(experts) and bool(repeated_types(experts, _has_any))
    )


def choose_persistent(
    params: Sequence[nn.Parameter],
    numel_of: Callable[[nn.Parameter], int],
    param_threshold: int,
    model_threshold: int,
) -> set[nn.Parameter]:
    """Parameters that stay whole between steps: those of at most `param_threshold` elements, until
    they are `model_threshold` elements together.
    """
    chosen: set[nn.Parameter] = set()
    total = 0
    for param in params:
        numel = numel_of(param)
        if numel == 0 or (numel <= param_threshold and total + numel <= model_threshold):
            chosen.add(param)
            total += numel
    return chosen

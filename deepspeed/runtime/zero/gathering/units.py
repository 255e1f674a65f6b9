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

[Note: small units]
A collective costs the same however little it moves, so neighbours that are small are one unit
(`fuse`). Which module comes after which is not known here: a unit of several modules is gathered
when the first of them runs, in whatever order, and goes when a module of another unit does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import nn

from deepspeed import comm as dist
from deepspeed.runtime.zero.gathering.shard_files import ReadSettings


@dataclass(frozen=True)
class GatherSettings:
    """The keys of stage 3 that say what is whole when; in elements.

    Attributes:
        param_persistence: Parameters up to this size stay whole between steps,
        model_persistence: until they are so many together.
        prefetch: What begins within so many is gathered ahead.
        max_live: Whole at a time, but for what is in use.
        max_reuse: Kept whole if used again within this distance.
        by_broadcast: Gather by one broadcast per rank.
        overlap: Gather beside the model's work.
        loads: Shards are on the host (`offload_param`).
        reads: How they come there, if they lie in files.
        fusion: Small units are gathered together up to so many.
        secondary_group: Ranks that keep copies of gathered shards among them (hpZ); None: nobody.
    """

    param_persistence: int = 100_000
    model_persistence: int = 1 << 62
    prefetch: int = 50_000_000
    max_live: int = 1_000_000_000
    max_reuse: int = 1_000_000_000
    by_broadcast: bool = False
    overlap: bool = True
    loads: bool = False
    reads: ReadSettings | None = None
    fusion: int = 800_000
    secondary_group: dist.Group = None

    def beside(self, unit: int) -> int:
        """How many elements are whole or on their way beside what is in use, at most, if the
        largest unit has `unit`: the last one that is gathered ahead only has to begin in time.
        """
        prefetched = self.prefetch and self.prefetch + unit
        return min(prefetched + self.max_reuse, self.max_live)


_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(eq=False)
class UnitPlan:
    """The module whose forward needs `params`, and those that belong to the unit (`own`).

    `is_beside_small`: see `parameter_offload`, [Note: frozen modules].
    """

    name: str
    module: nn.Module
    params: list[nn.Parameter] = field(default_factory=list)
    own: list[nn.Parameter] = field(default_factory=list)
    is_beside_small: bool = False


def is_called(module: nn.Module) -> bool:
    """Whether a module has a forward."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def plan_units(model: nn.Module, is_leaf: Callable[[nn.Module], bool]) -> list[UnitPlan]:
    """Find the units of a model, in the order in which modules are registered. The first is that of
    the model itself, which may use nothing. `is_leaf`: a module is one unit with all below it.
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
    """Find the types of which a list, a dict or a sequence has several children that count."""
    if not isinstance(container, _CONTAINERS):
        return set()
    found = Counter(type(child) for child in container.children() if counts(child))
    return {kind for kind, count in found.items() if count > 1}


def runs_experts(module: nn.Module) -> bool:
    """Whether a module's forward chooses children by the data: it has a list or a dict of equal
    modules called `experts`, or is one, of a class that is called so.
    """
    if is_called(module) and type(module).__name__.endswith("Experts"):
        return bool(repeated_types(module, _has_any))
    experts = module._modules.get("experts")
    return (
        experts is not None and not is_called(experts) and bool(repeated_types(experts, _has_any))
    )


def fuse(
    plans: Sequence[UnitPlan], numel_of: Callable[[UnitPlan], int], limit: int
) -> list[list[UnitPlan]]:
    """Say which plans are gathered together, in their order: neighbours of up to an eighth of
    `limit` elements each, until they are `limit` (0: none). A plan goes together with others only
    if all that is below its module does, which would otherwise keep them whole while it runs.
    """
    fused: list[list[UnitPlan]] = []
    room = 0
    index = 0
    while index < len(plans):
        end = index + 1
        while end < len(plans) and is_below(plans[end].name, plans[index].name):
            end += 1
        together = [plan for plan in plans[index:end] if numel_of(plan)]
        numel = sum(map(numel_of, together))
        if numel * 8 > limit:
            end = index + 1
            together, room = together[: bool(numel_of(plans[index]))], 0
            fused += [together] if together else []
        elif 0 < numel <= room:
            fused[-1] += together
            room -= numel
        elif together:
            fused.append(together)
            room = limit - numel
        index = end
    return fused


def is_below(name: str, above: str) -> bool:
    """Whether the module of a name is one inside of that of another, or the other is the model."""
    return not above or name.startswith(f"{above}.")


def fine_grained(
    model: nn.Module, numel_of: Callable[[nn.Parameter], int], threshold: int
) -> list[nn.Module]:
    """Find what `stage3_module_granularity_threshold` makes one unit each: the topmost modules with
    a forward that have at most `threshold` elements per module, themselves and those below.
    """
    found: list[nn.Module] = []
    waiting = [model]
    while waiting:
        module = waiting.pop()
        below = list(module.modules())
        params = {param for each in below for param in _own(each) if param is not None}
        numel = sum(map(numel_of, params))
        if is_called(module) and 0 < numel <= threshold * len(below):
            found.append(module)
        elif numel:
            waiting += module.children()
    return found


def choose_persistent(
    params: Sequence[nn.Parameter],
    numel_of: Callable[[nn.Parameter], int],
    param_threshold: int,
    model_threshold: int,
) -> set[nn.Parameter]:
    """Choose what stays whole between steps: parameters of at most `param_threshold` elements,
    until they are `model_threshold` together.
    """
    chosen: set[nn.Parameter] = set()
    total = 0
    for param in params:
        numel = numel_of(param)
        if numel == 0 or (numel <= param_threshold and total + numel <= model_threshold):
            chosen.add(param)
            total += numel
    return chosen

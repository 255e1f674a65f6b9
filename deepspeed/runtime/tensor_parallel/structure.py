"""Which layers of a model are column- and which are row-parallel: found, not changed. A scope is a
module with layers in it, an attention or an MLP: column-parallel layers read what all ranks have,
row-parallel ones give it again; between them is what the ranks divide.

[Note: nothing unexplained] Every parameter of a block that has a scope is known to be one of: of a
layer that is cut; a vector as wide as the block's input outside of attention, so that it acts on
what all ranks have; a vector as wide as a head in attention, which acts on this rank's heads, so
that its gradient is the sum over ranks of what each has. Everything else is refused by name: it
might act on what is cut, and train on a part of its gradient. Where the model itself says how it is
cut, only what is inside of a scope is asked about.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from deepspeed.runtime.config_utils import DeepSpeedConfigError
from deepspeed.runtime.tensor_parallel.families import (
    FAMILIES,
    PLAIN,
    CannotCut,
    Family,
    counts_of,
    head_size,
)
from deepspeed.runtime.tensor_parallel.layers import is_matrix, num_inputs, num_outputs
from deepspeed.runtime.tensor_parallel.partition_config import ModelPlan, PartitionConfig, plan_in
from deepspeed.utils.tensor_fragment import logical_shape

OF_HEADS = frozenset(("q_proj", "k_proj", "v_proj", "q", "k", "v"))
FUSED_HEADS = frozenset(("query_key_value", "qkv_proj", "c_attn"))
COLUMNS = OF_HEADS | {
    "gate_proj",
    "up_proj",
    "fc1",
    "fc_in",
    "c_fc",
    "wi",
    "wi_0",
    "wi_1",
    "dense_h_to_4h",
}
FUSED = FUSED_HEADS | {"gate_up_proj"}
ROWS = frozenset(
    ("o_proj", "out_proj", "dense", "o", "down_proj", "fc2", "fc_out", "c_proj", "wo")
    + ("dense_4h_to_h",)
)
_SPEC = 'say how by "tensor_parallel": {"partition_config": {"layer_specs": [...]}}'


@dataclass(frozen=True)
class LayerCut:
    """One layer that is to be cut: `sizes` of what lies behind one another in the dimension that is
    cut, each by itself, into `pieces`, such as heads, of which the first ranks have one more;
    `is_alone`: what it reads and gives is whole, see `layers`.
    """

    name: str
    module: nn.Module
    is_row: bool
    sizes: tuple[int, ...]
    pieces: int
    is_alone: bool = False

    @staticmethod
    def of_units(
        name: str, module: nn.Module, is_row: bool, sizes: tuple[int, ...], unit: int
    ) -> LayerCut:
        fits = unit > 0 and all(size % unit == 0 for size in sizes)
        pieces = math.gcd(*(size // unit for size in sizes)) if fits else 1
        return LayerCut(name, module, is_row, sizes, pieces)


@dataclass
class Plan:
    """What is to be done to a model to cut it over `size` ranks: embeddings whose columns are
    heads; `scopes` with layers that do not stand alone, the `pieces` that each divides, those that
    are `attentions` by their layers' names; `partial`, replicated parameters on what is cut.
    """

    size: int
    layers: list[LayerCut] = field(default_factory=list)
    embeddings: dict[str, nn.Embedding] = field(default_factory=dict)
    scopes: dict[str, nn.Module] = field(default_factory=dict)
    pieces: dict[str, int] = field(default_factory=dict)
    attentions: dict[str, nn.Module] = field(default_factory=dict)
    partial: list[str] = field(default_factory=list)
    family: Family = PLAIN


def plan_of(
    model: nn.Module, size: int, preset: str | None, partition: PartitionConfig | ModelPlan | None
) -> Plan:
    """Plan how a model is cut over `size` ranks: as a family whose name is `preset`, or the model's
    `config.model_type`; `partition` speaks before names do, and without it a model of no known
    family for itself. DeepSpeedConfigError names all that cannot be cut, or is not known.
    """
    problems: list[str] = []
    family = _family_name(model, preset)
    plan = Plan(size, family=FAMILIES.get(family, PLAIN))
    if partition is None and family not in FAMILIES:
        partition = plan_in(model)
    for name, scope in model.named_modules():
        _plan_scope(plan, name, scope, partition, problems)
    _leave_whole(plan, model)
    if not plan.layers and not problems:
        problems.append(f"no layer that could be cut was found in {type(model).__name__}; {_SPEC}")
    _explain(plan, model, partition, problems)
    if problems:
        more = f"\nand {len(problems) - 10} more" if len(problems) > 10 else ""
        raise DeepSpeedConfigError(
            f"tensor_parallel.autotp_size: {size} cannot be applied:\n"
            + "\n".join(problems[:10])
            + more
        )
    return plan


def _family_name(model: nn.Module, preset: str | None) -> str:
    if preset is not None and preset not in FAMILIES:
        raise DeepSpeedConfigError(
            f"tensor_parallel.preset_model: {preset!r} is not supported; use one of "
            f"{', '.join(sorted(FAMILIES))}, or leave it out and say what to cut by "
            "tensor_parallel.partition_config"
        )
    return preset or str(getattr(getattr(model, "config", None), "model_type", None))


def _leave_whole(plan: Plan, model: nn.Module) -> None:
    """Leave whole what stands alone and others read too (tied embeddings), or is too small."""
    owners = Counter(id(param) for one in model.modules() for param in dict.values(one._parameters))
    plan.layers = [
        cut
        for cut in plan.layers
        if not cut.is_alone or (owners[id(cut.module.weight)] == 1 and cut.pieces >= plan.size)
    ]


def _plan_scope(
    plan: Plan,
    name: str,
    scope: nn.Module,
    partition: PartitionConfig | ModelPlan | None,
    problems: list[str],
) -> None:
    layers = {child: layer for child, layer in scope.named_children() if is_matrix(layer)}
    known = len(problems)
    chosen = _by_specs(name, scope, layers, partition, problems)
    uses_names = partition is None or partition.use_default_specs
    named = layers.keys() - chosen.keys() if uses_names else set()
    attention = bool(layers.keys() & (OF_HEADS | FUSED_HEADS))
    feeds = bool(named & (COLUMNS | FUSED)) or any(
        cut is not None and not cut.is_row for cut in chosen.values()
    )
    by_name: dict[str, LayerCut] = {}
    for child in (child for child in layers if child in named and feeds):
        full = _joined(name, child)
        try:
            cut = _by_name(plan.family, full, child, scope, layers[child])
        except CannotCut as error:
            problems.append(f"{full} {error}")
        else:
            if cut is not None:
                by_name[child] = cut
    _check_widths(by_name, problems)
    chosen |= by_name
    cuts = [cut for child in layers if (cut := chosen.get(child)) is not None]
    plan.layers += (cut for cut in cuts if cut.is_alone)
    divided = [cut for cut in cuts if not cut.is_alone]
    if not divided:
        return
    pieces = plan.pieces[name] = _pieces_of_all(plan, scope, divided, problems)
    plan.layers += (replace(cut, pieces=pieces) for cut in divided)
    plan.scopes[name] = scope
    for kind, is_row in (("column", False), ("row", True)):
        if len(problems) == known and all(cut.is_row is not is_row for cut in divided):
            there = ", ".join(cut.name for cut in divided)
            problems.append(
                f"{name or type(scope).__name__} has no {kind}-parallel layer beside {there}, so "
                f"that what ranks divide would never come together; {_SPEC}"
            )
    if attention:
        plan.attentions[name] = scope
        try:
            plan.family.check(scope)
        except CannotCut as error:
            problems.append(f"{name} {error}")
        for child in plan.family.embeddings:
            embedding = getattr(scope, child, None)
            if isinstance(embedding, nn.Embedding):
                plan.embeddings[_joined(name, child)] = embedding


def _pieces_of_all(
    plan: Plan, scope: nn.Module, cuts: Sequence[LayerCut], problems: list[str]
) -> int:
    """Count the pieces that the layers of a scope are dealt out in together: what a rank has of one
    has to fit what it has of the others, queries to their keys, say.
    """
    fewest = min(cuts, key=lambda cut: cut.pieces)
    pieces = math.gcd(*(cut.pieces for cut in cuts))
    if pieces % plan.size:  # numbers of heads are to be dealt out too
        pieces = math.gcd(pieces, *counts_of(scope).values())
    if pieces < plan.size:
        unit = fewest.sizes[0] // pieces
        of = f" of {unit} elements (heads, say)" if unit > 1 else ""
        problems.append(
            f"{fewest.name} has {pieces} parts{of}, too few for {plan.size} ranks; use an "
            f"autotp_size of at most {pieces}"
        )
    return pieces


def _check_widths(by_name: Mapping[str, LayerCut], problems: list[str]) -> None:
    """Refuse several layers in one by a name that does not say so: ranks would pair the outputs of
    one with those of another. What a layer gives is what the row-parallel one takes, or keys and
    values of fewer heads.
    """
    inputs = {num_inputs(cut.module) for cut in by_name.values() if cut.is_row}
    for child, cut in by_name.items():
        width = num_outputs(cut.module)
        is_pair = child in ("k_proj", "v_proj", "k", "v")
        if cut.is_row or child in FUSED or inputs <= {width}:
            continue
        if not (is_pair and len(inputs) == 1 and min(inputs) % width == 0):
            problems.append(
                f"{cut.name} has {width} outputs, and the row-parallel layer beside it "
                f"{', '.join(map(str, sorted(inputs)))} inputs, so it is several layers in one; "
                f"{_SPEC}, with its shape"
            )


def _by_specs(
    name: str,
    scope: nn.Module,
    layers: Mapping[str, nn.Module],
    partition: PartitionConfig | ModelPlan | None,
    problems: list[str],
) -> dict[str, Any]:
    chosen: dict[str, Any] = {}
    for child, layer in layers.items() if partition is not None else ():
        full = _joined(name, child)
        spec = partition.spec_of(f"{full}.weight") if partition is not None else None
        if spec is None:
            continue
        chosen[child] = None
        if spec.is_skip or spec.is_partial:
            continue
        length = num_inputs(layer) if spec.is_row else num_outputs(layer)
        try:
            sizes = spec.sizes(layer, length) or (length,)
        except CannotCut as error:
            problems.append(f"{full} {error}")
            continue
        width = head_size(scope)
        unit = width if width and all(part % width == 0 for part in sizes) else 1
        cut = LayerCut.of_units(full, layer, spec.is_row, sizes, 1 if spec.is_alone else unit)
        chosen[child] = replace(cut, is_alone=spec.is_alone)
    return chosen


def _by_name(
    family: Family, full: str, child: str, scope: nn.Module, layer: nn.Module
) -> LayerCut | None:
    """Read a layer's own name; None: it says nothing, see [Note: nothing unexplained]."""
    if child in FUSED:
        if child not in family.fused:
            raise CannotCut(
                f"is several layers in one, in an order that is not known for this model; {_SPEC}, "
                "with its shape, or give a preset_model"
            )
        layout = family.fused[child](scope, layer)
        _check_heads(scope, layout.unit, "outputs", num_outputs(layer))
        sizes = layout.sizes or (num_outputs(layer),)
        return LayerCut.of_units(full, layer, False, sizes, layout.unit)
    if child not in COLUMNS | ROWS:
        return None
    is_row = child in ROWS
    length, unit = num_inputs(layer) if is_row else num_outputs(layer), 1
    if any(other in OF_HEADS | FUSED_HEADS for other, _ in scope.named_children()):
        unit = head_size(scope)
        _check_heads(scope, unit, "inputs" if is_row else "outputs", length)
    return LayerCut.of_units(full, layer, is_row, (length,), unit)


def _check_heads(scope: nn.Module, unit: int, of: str, length: int) -> None:
    if not unit or length % unit:
        raise CannotCut(
            f"has {length} {of}, and {type(scope).__name__} does not say by head_dim, or by "
            f"num_heads, how many heads these are; {_SPEC}"
        )


def _explain(
    plan: Plan, model: nn.Module, partition: PartitionConfig | ModelPlan | None, problems: list[str]
) -> None:
    """See [Note: nothing unexplained]."""
    known = {id(param) for cut in plan.layers for param in cut.module.parameters(recurse=False)}
    known |= {id(module.weight) for module in plan.embeddings.values()}
    widths = {
        num_outputs(cut.module) if cut.is_row else num_inputs(cut.module) for cut in plan.layers
    }
    attentions = {name: head_size(scope) for name, scope in plan.scopes.items() if head_size(scope)}
    for block_name, block in _blocks(model, plan.scopes):
        for own_name, param in block.named_parameters():
            name = _joined(block_name, own_name)
            spec = partition.spec_of(name) if partition is not None else None
            if id(param) in known or (spec is not None and spec.is_skip):
                continue
            is_inside = any(name.startswith(f"{scope}.") for scope in plan.scopes)
            if isinstance(partition, ModelPlan) and not is_inside:
                continue  # such a plan names all that the layers of a scope divide
            shape = logical_shape(param)
            within = [width for scope, width in attentions.items() if name.startswith(f"{scope}.")]
            is_of_head = within and len(shape) == 1 and shape.numel() == within[-1]
            if is_of_head or (is_inside and spec is not None and spec.is_partial):
                plan.partial.append(name)
            elif within or len(shape) != 1 or shape.numel() not in widths:
                problems.append(
                    f"{name} of shape {tuple(shape)} is in a block whose layers are cut, and "
                    "it is not known whether it is to be cut too. If all ranks can have it whole, "
                    'say so by a spec of "partition_type": "skip" in '
                    "tensor_parallel.partition_config.layer_specs"
                )


def _blocks(model: nn.Module, scopes: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield outermost elements of lists and sequences that have a scope, and scopes in none."""
    found: dict[str, nn.Module] = {}
    modules = dict(model.named_modules())
    for scope in scopes:
        parts = scope.split(".") if scope else []
        outermost = scope
        for end in range(len(parts)):
            if isinstance(modules[".".join(parts[:end])], (nn.ModuleList, nn.Sequential)):
                outermost = ".".join(parts[: end + 1])
                break
        found[outermost] = modules[outermost]
    yield from found.items()


def _joined(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child

"""Which layers are cut and how, as the configuration says it, or a model itself.

The configuration's `tensor_parallel.partition_config`:

    {"use_default_specs": false,
     "layer_specs": [{"patterns": [".*\\.o_proj\\.weight$"], "partition_type": "row"},
                     {"patterns": [".*\\.qkv\\.weight$"], "partition_type": "column",
                      "shape": [[64, 32, 32], -1], "partition_dim": 0}]}

A pattern is a regular expression that matches from the beginning of a parameter's name; the first
spec with one that does counts.

A model's is transformers' `tp_plan`, in `config.base_model_tp_plan` and in `_tp_plan` of the model
and the models inside it; names are below the module that has the plan, a star is a number.

    {"layers.*.self_attn.q_proj": "colwise", "layers.*.self_attn.o_proj": "rowwise",
     "layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
     "lm_head": "colwise_gather_output"}
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import nn

from deepspeed.runtime.config_utils import DeepSpeedConfigError
from deepspeed.runtime.tensor_parallel.families import CannotCut
from deepspeed.runtime.tensor_parallel.layers import is_matrix, is_transposed
from deepspeed.utils.logging import warn_once

_PATH = "tensor_parallel.partition_config"
_KEYS = ("use_default_specs", "layer_specs")
_SPEC_KEYS = ("patterns", "partition_type", "shape", "partition_dim", "model_types")
_TYPES = ("column", "row", "skip")


@dataclass(frozen=True)
class LayerSpec:
    """One entry of `layer_specs`. `partition_type` is "column", "row" or "skip": the parameter is
    not cut; of a model's own plan also "partial": it is not, and acts on what is. `shape` says how
    many layers of equal size lie behind one another in the dimension that is cut, or their sizes;
    `is_alone`: what the layer reads and gives is whole, see `layers`.
    """

    patterns: tuple[re.Pattern[str], ...]
    partition_type: str
    shape: tuple[Any, ...] | None = None
    partition_dim: int | None = None
    is_alone: bool = False

    @property
    def is_row(self) -> bool:
        return self.partition_type == "row"

    @property
    def is_skip(self) -> bool:
        return self.partition_type == "skip"

    @property
    def is_partial(self) -> bool:
        return self.partition_type == "partial"

    def sizes(self, layer: nn.Module, length: int) -> tuple[int, ...]:
        """Return the sizes of what lies behind one another in `length` elements; empty: one."""
        dim = int(self.is_row is not is_transposed(layer))
        if self.partition_dim not in (None, dim):
            raise CannotCut(
                f"is {self.partition_type}-parallel when dimension {dim} of its weight is cut, but "
                f"{_PATH} says partition_dim: {self.partition_dim}; leave that out"
            )
        if self.shape is None:
            return ()
        declared = self.shape[dim] if len(self.shape) == 2 else None
        if isinstance(declared, int) and declared > 0 and length % declared == 0:
            return (length // declared,) * declared if declared > 1 else ()
        if isinstance(declared, (list, tuple)) and sum(declared) == length:
            return tuple(declared)
        raise CannotCut(
            f"has {length} elements in dimension {dim}, to which shape: {list(self.shape)} in "
            f"{_PATH} does not fit; give two entries, and there how many parts of equal size lie "
            "behind one another, or a list of their sizes"
        )


class PartitionConfig:
    """The block, read; `model_type` chooses specs that are for some models. With
    `use_default_specs` what no spec matches is found from names.
    """

    def __init__(self, block: Mapping[str, Any], model_type: str | None) -> None:
        _refuse_unknown(block, _KEYS, _PATH)
        self.use_default_specs = bool(block.get("use_default_specs", False))
        self._specs: list[LayerSpec] = []
        for index, entry in enumerate(block.get("layer_specs") or ()):
            path = f"{_PATH}.layer_specs[{index}]"
            spec = _read_spec(entry, path)
            if entry.get("model_types") is None or model_type in entry["model_types"]:
                self._specs.append(spec)

    def spec_of(self, name: str) -> LayerSpec | None:
        for spec in self._specs:
            if any(pattern.match(name) for pattern in spec.patterns):
                return spec
        return None


def _read_spec(entry: object, path: str) -> LayerSpec:
    if not isinstance(entry, Mapping):
        raise DeepSpeedConfigError(f"{path}: expected an object, got {entry!r}")
    _refuse_unknown(entry, _SPEC_KEYS, path)
    patterns, kind = entry.get("patterns"), str(entry.get("partition_type", "column")).lower()
    if not patterns or isinstance(patterns, str):
        raise DeepSpeedConfigError(
            f"{path}.patterns: expected a list of regular expressions, got {patterns!r}"
        )
    if kind not in _TYPES:
        raise DeepSpeedConfigError(
            f"{path}.partition_type: {kind!r} is none of {', '.join(map(repr, _TYPES))}"
        )
    try:
        compiled = tuple(re.compile(pattern) for pattern in patterns)
    except re.error as error:
        raise DeepSpeedConfigError(f"{path}.patterns: {patterns!r}: {error}") from error
    shape = entry.get("shape")
    return LayerSpec(
        compiled, kind, None if shape is None else tuple(shape), entry.get("partition_dim")
    )


def _refuse_unknown(block: Mapping[str, Any], known: tuple[str, ...], path: str) -> None:
    unknown = sorted(block.keys() - set(known))
    if unknown:
        raise DeepSpeedConfigError(
            f"{path}.{unknown[0]}: {block[unknown[0]]!r} is not a known key; known are "
            f"{', '.join(known)}"
        )


_WHOLE = LayerSpec((), "skip")
_STYLES = MappingProxyType(
    {
        "colwise": LayerSpec((), "column"),
        "rowwise": LayerSpec((), "row"),
        "packed_colwise": LayerSpec((), "column", (2, -1)),
        "colwise_rep": LayerSpec((), "column", is_alone=True),
        "colwise_gather_output": LayerSpec((), "column", is_alone=True),
        "rowwise_rep": LayerSpec((), "row", is_alone=True),
        "rowwise_split_input": LayerSpec((), "row", is_alone=True),
        "replicated_with_grad_allreduce": LayerSpec((), "partial"),
        # Embeddings stay whole.
        "embedding_rowwise": _WHOLE,
        "embedding_colwise": _WHOLE,
        "replicate": _WHOLE,
    }
)


class ModelPlan:
    """A `PartitionConfig` read from a model's own plan, of generic names and styles."""

    use_default_specs = False

    def __init__(self, plan: Mapping[str, str]) -> None:
        self._plan = plan

    def spec_of(self, name: str) -> LayerSpec | None:
        style = _style_of(name, self._plan)
        return None if style is None else _STYLES[style]


def plan_in(model: nn.Module) -> ModelPlan | None:
    """Read the model's own plan; None if it has none for its layers, or an unknown style."""
    plan = _merged(model)
    styles = {name: _style_of(name, plan) for name, _ in model.named_parameters()}
    known = (None, *_STYLES)
    unknown = next(((name, style) for name, style in styles.items() if style not in known), None)
    if unknown is not None:
        warn_once(
            f"tensor_parallel: the model's tp_plan says {unknown[1]!r} of {unknown[0]}, which is "
            "not supported here; layers are found by their names"
        )
        return None
    has_layers = any(
        styles.get(f"{name}.weight") for name, module in model.named_modules() if is_matrix(module)
    )
    return ModelPlan(plan) if has_layers else None


def _merged(model: nn.Module) -> dict[str, str]:
    of_base = getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
    prefix = getattr(model, "base_model_prefix", "")
    prefix = f"{prefix}." if prefix and hasattr(model, prefix) else ""
    merged = {prefix + name: style for name, style in of_base.items()}
    for where, module in reversed(list(model.named_modules())):
        own = getattr(module, "_tp_plan", None)
        if isinstance(own, Mapping):
            prefix = f"{_generic(where)}." if where else ""
            merged |= {prefix + name: style for name, style in own.items()}
    return merged


def _style_of(name: str, plan: Mapping[str, str]) -> str | None:
    generic = _generic(name)
    return plan.get(generic) or plan.get(generic.rpartition(".")[0])


def _generic(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))

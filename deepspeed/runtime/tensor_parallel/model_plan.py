"""How a model says itself that its layers are cut: transformers' `tp_plan`, which is in
`config.base_model_tp_plan` and in `_tp_plan` of the model and the models inside it.

    {"layers.*.self_attn.q_proj": "colwise", "layers.*.self_attn.o_proj": "rowwise",
     "layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
     "lm_head": "colwise_gather_output"}

Names are of modules or parameters, below the module that has the plan; a star is a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torch import nn

from deepspeed.runtime.tensor_parallel.layers import is_matrix
from deepspeed.runtime.tensor_parallel.partition_config import LayerSpec
from deepspeed.utils.logging import warn_once

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

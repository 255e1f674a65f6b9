"""Layers that are built later, on the stage that owns them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from deepspeed.runtime.utils import partition_balanced, partition_uniform
from deepspeed.utils.logging import logger


class PipelineError(ValueError):
    """No pipeline can be made of these layers, stages and ranks; names the argument and remedy."""


class LayerSpec:
    """A layer by its class and arguments, so that a stage builds its own layers only."""

    def __init__(
        self, typename: type[nn.Module], *module_args: object, **module_kwargs: object
    ) -> None:
        if not (inspect.isclass(typename) and issubclass(typename, nn.Module)):
            raise PipelineError(
                f"LayerSpec(typename={typename!r}): give a class derived from torch.nn.Module"
            )
        self.typename = typename
        self.module_args = module_args
        self.module_kwargs = module_kwargs
        self.global_rank = -1  # upstream's attribute; a spec is the same on every rank

    def __repr__(self) -> str:
        arguments = [repr(value) for value in self.module_args]
        arguments += [f"{name}={value!r}" for name, value in self.module_kwargs.items()]
        return f"{self.typename.__name__}({', '.join(arguments)})"

    def build(self, log: bool = False) -> nn.Module:
        """Construct the layer; with `log`, say so."""
        if log:
            logger.info(f"building {self!r}")
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer that shares weights with all others of its key, on the same stage and on others.

    Args:
        key: Name of the shared module.
        typename: Its class; arguments of the first occurrence on a stage build it.
        forward_fn: Called as `forward_fn(module, inputs)`; None calls the module.
        tied_weight_attr: Attributes (dotted paths allowed) of the module that are one weight over
            all stages. Other parameters of the module belong to each stage alone.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: object,
        forward_fn: Callable[[Any, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: object,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key = key
        self.forward_fn = forward_fn
        self.tied_weight_attr = (
            [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)
        )


Layer = nn.Module | LayerSpec | Callable[..., Any]


def checked_layers(layers: Iterable[Layer]) -> list[Layer]:
    """List the layers; a `PipelineError` if there is none, or one is nothing that can be called."""
    specs = list(layers)
    if not specs:
        raise PipelineError("PipelineModule(layers=[]): give at least one layer")
    for index, layer in enumerate(specs):
        if inspect.isclass(layer):
            raise PipelineError(
                f"layers[{index}] is the class {layer.__name__}: give an instance, or a LayerSpec "
                "of it"
            )
        if not isinstance(layer, LayerSpec) and not callable(layer):
            raise PipelineError(
                f"layers[{index}] is {layer!r}: give a torch.nn.Module, a LayerSpec or a function"
            )
    return specs


def layer_name(layer: Layer) -> str:
    """Name the layer's class, or the function."""
    if isinstance(layer, LayerSpec):
        return layer.typename.__name__
    if isinstance(layer, nn.Module):
        return type(layer).__name__
    return getattr(layer, "__name__", type(layer).__name__)


def trainable_numel(layer: Layer) -> int:
    """Count the layer's trainable parameters; a spec is built for it, if possible on meta."""
    if isinstance(layer, LayerSpec):
        layer = _built_to_count(layer)
    if not isinstance(layer, nn.Module):
        return 0
    return sum(param.numel() for param in layer.parameters() if param.requires_grad)


def _built_to_count(spec: LayerSpec) -> nn.Module:
    # Counting must leave no trace in the random numbers that the weights are drawn from.
    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):
                return spec.build()
        except (NotImplementedError, RuntimeError, TypeError, ValueError):
            # The constructor reads values, which meta tensors do not have.
            return spec.build()


TYPE_PREFIX = "type:"


def partition_layers(
    layers: Sequence[Layer],
    num_parts: int,
    method: str | Sequence[int],
    count: Callable[[], Sequence[int]],
) -> list[int]:
    """Cut the layers into consecutive parts: part j is `layers[bounds[j]:bounds[j + 1]]`.

    Args:
        layers: All layers of the model.
        num_parts: How many parts.
        method: "uniform": equal numbers of layers; "parameters": equal numbers of trainable
            parameters; "type:REGEX": equal numbers of layers whose class name matches, case
            ignored; or the num_parts + 1 boundaries.
        count: Gives each layer's number of parameters.

    Raises:
        PipelineError: For another method, bounds or counts that do not fit, an unmatched REGEX.
    """
    if not isinstance(method, str):
        return _checked_bounds(list(method), len(layers), num_parts)
    name = method.lower()
    if name == "uniform":
        return partition_uniform(len(layers), num_parts)
    if name == "parameters":
        counts = count()
        if len(counts) != len(layers):
            raise PipelineError(
                f"_count_layer_params() gave {len(counts)} numbers for {len(layers)} layers: give "
                "one for each"
            )
        return partition_balanced(counts, num_parts)
    if name.startswith(TYPE_PREFIX):
        return partition_balanced(_matches(layers, method[len(TYPE_PREFIX) :]), num_parts)
    advice = (
        "measure the layers and give boundaries instead"
        if name == "profile"
        else "it is none of the methods"
    )
    raise PipelineError(
        f"partition_method={method!r} ({advice}): use 'parameters', 'uniform', 'type:REGEX' or a "
        "list of boundaries"
    )


def _matches(layers: Sequence[Layer], pattern: str) -> list[int]:
    names = [layer_name(layer) for layer in layers]
    weights = [int(re.search(pattern, name, re.IGNORECASE) is not None) for name in names]
    if not any(weights):
        raise PipelineError(
            f"partition_method='type:{pattern}': no layer matches; the classes are "
            f"{sorted(set(names))}"
        )
    return weights


def _checked_bounds(bounds: list[int], num_layers: int, num_parts: int) -> list[int]:
    fits = (
        len(bounds) == num_parts + 1
        and bounds[0] == 0
        and bounds[-1] == num_layers
        and bounds == sorted(bounds)
    )
    if not fits:
        raise PipelineError(
            f"partition_method={bounds}: {num_layers} layers in {num_parts} parts need "
            f"{num_parts + 1} boundaries that ascend from 0 to {num_layers}"
        )
    return bounds

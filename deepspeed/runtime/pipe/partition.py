"""Which layers go to which part of the pipeline."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from deepspeed.runtime.pipe.layer_spec import Layer, PipelineError, layer_name
from deepspeed.runtime.utils import partition_balanced, partition_uniform

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
        PipelineError: For another method, boundaries or counts that do not fit, or a REGEX that no
            layer matches.
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

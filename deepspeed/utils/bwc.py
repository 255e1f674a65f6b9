"""Questions to an external `mpu` whose method names changed over Megatron's versions.

An mpu ("model parallel unit") is any object or module with Megatron's getters. Each question tries
the newer name first.
"""

from collections.abc import Callable
from typing import Any

_TENSOR = ("tensor_model_parallel", "slice_parallel", "model_parallel")
_PIPELINE = ("pipeline_model_parallel", "pipe_parallel")


def _ask(mpu: object, axes: tuple[str, ...], what: str, default: object) -> Any:
    """The answer of the first getter ``get_<axis>_<what>`` that ``mpu`` has, or ``default``."""
    for axis in axes:
        getter = getattr(mpu, f"get_{axis}_{what}", None)
        if getter is not None:
            return getter()
    return default


def _number(axes: tuple[str, ...], what: str, default: int) -> Callable[..., int]:
    """A getter of one argument, the mpu; `default` without one, or where it knows no such axis."""
    return lambda mpu=None: int(_ask(mpu, axes, what, default))


def _group(axes: tuple[str, ...]) -> Callable[..., Any]:
    """The same for the group of an axis; None instead of a number."""
    return lambda mpu=None: _ask(mpu, axes, "group", None)


bwc_tensor_model_parallel_world_size = _number(_TENSOR, "world_size", 1)
bwc_tensor_model_parallel_rank = _number(_TENSOR, "rank", 0)
bwc_tensor_model_parallel_group = _group(_TENSOR)
bwc_pipeline_parallel_world_size = _number(_PIPELINE, "world_size", 1)
bwc_pipeline_parallel_rank = _number(_PIPELINE, "rank", 0)
bwc_pipeline_parallel_group = _group(_PIPELINE)

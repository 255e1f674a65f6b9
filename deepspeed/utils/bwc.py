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


def _asks(axes: tuple[str, ...], what: str, default: int | None) -> Callable[..., Any]:
    """A getter of one argument, the mpu; `default` without one, or where it knows no such axis."""
    return lambda mpu=None: _ask(mpu, axes, what, default)


bwc_tensor_model_parallel_world_size = _asks(_TENSOR, "world_size", 1)
bwc_tensor_model_parallel_rank = _asks(_TENSOR, "rank", 0)
bwc_tensor_model_parallel_group = _asks(_TENSOR, "group", None)
bwc_pipeline_parallel_world_size = _asks(_PIPELINE, "world_size", 1)
bwc_pipeline_parallel_rank = _asks(_PIPELINE, "rank", 0)
bwc_pipeline_parallel_group = _asks(_PIPELINE, "group", None)

"""Questions to an external `mpu` whose method names changed over Megatron's versions.

An mpu ("model parallel unit") is any object or module with Megatron's getters. Each question tries
the newer name first.
"""

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


def bwc_tensor_model_parallel_world_size(mpu: object = None) -> int:
    """The tensor-parallel size; 1 without an mpu or when it knows no model parallelism."""
    return int(_ask(mpu, _TENSOR, "world_size", 1))


def bwc_tensor_model_parallel_rank(mpu: object = None) -> int:
    """The tensor-parallel rank; 0 without an mpu or when it knows no model parallelism."""
    return int(_ask(mpu, _TENSOR, "rank", 0))


def bwc_tensor_model_parallel_group(mpu: object = None) -> Any:
    """The tensor-parallel group; None without an mpu or when it knows no model parallelism."""
    return _ask(mpu, _TENSOR, "group", None)


def bwc_pipeline_parallel_world_size(mpu: object = None) -> int:
    """The number of pipeline stages; 1 without an mpu or when it knows no pipeline."""
    return int(_ask(mpu, _PIPELINE, "world_size", 1))


def bwc_pipeline_parallel_rank(mpu: object = None) -> int:
    """The pipeline stage; 0 without an mpu or when it knows no pipeline."""
    return int(_ask(mpu, _PIPELINE, "rank", 0))


def bwc_pipeline_parallel_group(mpu: object = None) -> Any:
    """The pipeline group; None without an mpu or when it knows no pipeline."""
    return _ask(mpu, _PIPELINE, "group", None)

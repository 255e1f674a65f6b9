"""Questions to an external `mpu` whose method names changed over Megatron's versions.

An mpu ("model parallel unit") is any object or module with Megatron's getters. Each question tries
the newer name first.
"""

from typing import Any


def _ask(mpu: object, names: tuple[str, ...], default: object) -> Any:
    """The answer of the first getter that ``mpu`` has, or ``default``."""
    for name in names:
        getter = getattr(mpu, name, None)
        if getter is not None:
            return getter()
    return default


def bwc_tensor_model_parallel_world_size(mpu: object = None) -> int:
    """The tensor-parallel size; 1 without an mpu or when it knows no model parallelism."""
    names = (
        "get_tensor_model_parallel_world_size",
        "get_slice_parallel_world_size",
        "get_model_parallel_world_size",
    )
    return int(_ask(mpu, names, 1))


def bwc_tensor_model_parallel_rank(mpu: object = None) -> int:
    """The tensor-parallel rank; 0 without an mpu or when it knows no model parallelism."""
    names = ("get_tensor_model_parallel_rank", "get_slice_parallel_rank", "get_model_parallel_rank")
    return int(_ask(mpu, names, 0))


def bwc_tensor_model_parallel_group(mpu: object = None) -> Any:
    """The tensor-parallel group; None without an mpu or when it knows no model parallelism."""
    names = (
        "get_tensor_model_parallel_group",
        "get_slice_parallel_group",
        "get_model_parallel_group",
    )
    return _ask(mpu, names, None)


def bwc_pipeline_parallel_world_size(mpu: object = None) -> int:
    """The number of pipeline stages; 1 without an mpu or when it knows no pipeline."""
    names = ("get_pipeline_model_parallel_world_size", "get_pipe_parallel_world_size")
    return int(_ask(mpu, names, 1))


def bwc_pipeline_parallel_rank(mpu: object = None) -> int:
    """The pipeline stage; 0 without an mpu or when it knows no pipeline."""
    names = ("get_pipeline_model_parallel_rank", "get_pipe_parallel_rank")
    return int(_ask(mpu, names, 0))


def bwc_pipeline_parallel_group(mpu: object = None) -> Any:
    """The pipeline group; None without an mpu or when it knows no pipeline."""
    names = ("get_pipeline_model_parallel_group", "get_pipe_parallel_group")
    return _ask(mpu, names, None)

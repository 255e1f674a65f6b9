"""Named ranges in the device's profiler."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from deepspeed.accelerator import get_accelerator

P = ParamSpec("P")
R = TypeVar("R")

# Whether ranges are opened at all; a profiling run that finds them costly sets this to False.
enable_nvtx = True


def instrument_w_nvtx(func: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that its calls show as ranges with its qualified name."""
    name = func.__qualname__

    @functools.wraps(func)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        # A range is a side effect on which the compiler would break the graph.
        if not enable_nvtx or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        accelerator = get_accelerator()
        accelerator.range_push(name)
        try:
            return func(*args, **kwargs)
        finally:
            accelerator.range_pop()

    return wrapper

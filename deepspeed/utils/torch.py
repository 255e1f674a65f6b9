"""Which torch this is, and hooks that run when a gradient is there; under upstream's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from packaging import version


def required_torch_version(
    min_version: float | str | None = None, max_version: float | str | None = None
) -> bool:
    """Whether torch is at least `min_version` and at most `max_version`, major and minor compared.

    Raises:
        ValueError: If neither is given.
    """
    if min_version is None and max_version is None:
        raise ValueError("required_torch_version: give min_version, max_version, or both")
    here = version.parse(torch.__version__).release[:2]
    least = version.parse(str(min_version)).release[:2] if min_version is not None else here
    most = version.parse(str(max_version)).release[:2] if max_version is not None else here
    return least <= here <= most


def register_grad_hook(param: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Any:
    """Have `hook(param)` called whenever `param.grad` was added to; returns the handle."""
    return param.register_post_accumulate_grad_hook(hook)


def jit_script_compat(fn: Callable[..., Any]) -> Any:
    """`fn` compiled by torch.compile; upstream's successor of torch.jit.script."""
    return torch.compile(fn)


def is_functorch_transforming() -> bool:
    """Whether a transform of torch.func is running."""
    return bool(torch._C._functorch.peek_interpreter_stack() is not None)

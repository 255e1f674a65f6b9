"""Upstream's path of small questions about ZeRO, and of its exception."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deepspeed._lazy import lazy_attributes
from deepspeed.runtime.config_utils import DeepSpeedConfigError
from deepspeed.runtime.zero.parameters.zero_parameter import (
    is_zero_param as is_zero_param,  # upstream's path
)

# The list is the factory's, which stands above.
__getattr__ = lazy_attributes(
    __name__, {"is_zero_supported_optimizer": "deepspeed.runtime.optimizer_factory"}
)


class ZeRORuntimeException(DeepSpeedConfigError):
    """A client's optimizer beside `offload_optimizer` that is not for the host. Scripts written for
    upstream catch it by this name; all else is a plain `DeepSpeedConfigError`.
    """


def is_builtin_type(obj: object) -> bool:
    """Whether the class of `obj` is Python's own."""
    return type(obj).__module__ == "builtins"


def isinstance_namedtuple(obj: object) -> bool:
    """Whether `obj` is a named tuple."""
    return isinstance(obj, tuple) and hasattr(obj, "_asdict") and hasattr(obj, "_fields")


def apply_to_tensors_only(
    function: Callable[[torch.Tensor], Any],
    value: object,
    warning_msg_fn: Callable[[Any], str] | None = None,
) -> Any:
    """Return `value` with `function` applied to every tensor in nested tuples, lists and dicts,
    which are made anew, of the same types. ValueError for `warning_msg_fn`, which is not supported.
    """
    if warning_msg_fn is not None:
        raise ValueError("apply_to_tensors_only(warning_msg_fn=...): leave it out")
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (tuple, list)):
        changed = [apply_to_tensors_only(function, item) for item in value]
        return type(value)(*changed) if isinstance_namedtuple(value) else type(value)(changed)
    if isinstance(value, dict):
        return {key: apply_to_tensors_only(function, item) for key, item in value.items()}
    return value

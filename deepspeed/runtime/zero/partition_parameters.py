"""Upstream's path of `zero.Init`, `GatheredParameters` and what a parameter of stage 3 is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import nn

from deepspeed._lazy import lazy_attributes
from deepspeed.runtime.zero.gathering.gathered_parameters import GatheredParameters

# Upstream's path of these names; its further ones say what to use instead.
_INIT = ("Init", "restore_init_context", "shutdown_init_context")
_PARAMETERS = ("ZeroParamStatus", "ZeroParamType", "is_zero_param")
__getattr__ = lazy_attributes(
    __name__,
    {
        "get_accelerator": "deepspeed.accelerator",
        **dict.fromkeys(_INIT, "deepspeed.runtime.zero.init_context"),
        **dict.fromkeys(_PARAMETERS, "deepspeed.runtime.zero.parameters.zero_parameter"),
    },
)

# A client compares functions with it, and exchanges the wrapper below for its own. Nothing here
# changes how tensors are made, so neither is ever called.
_orig_torch_arange = torch.arange


class DeepSpeedTensorOverride(Enum):
    """What upstream changes of tensors that are made inside `Init`."""

    dtype = 1
    device = 2


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., torch.Tensor],
    target_fp_dtype: torch.dtype,
    target_device: torch.device | None = None,
) -> Callable[..., torch.Tensor]:
    """Return `fn`: parameters are rounded and moved when they are cut, tensors not at all."""
    return fn


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """Have an engine's model with all its parameters whole, for generating. All ranks enter and
    leave together; nothing of it may be changed inside.
    """
    module = getattr(model, "module", model)
    with GatheredParameters(list(module.parameters())):
        yield module


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Say that a module's forward uses another module's parameter: it is gathered with the module
    from the next forward on. Without it, reading the parameter as an attribute there gathers it
    too.

    Raises:
        RuntimeError: If it is not a module or not a parameter.
    """
    if not isinstance(module, nn.Module) or not isinstance(parameter, nn.Parameter):
        raise RuntimeError(
            f"register_external_parameter({type(module).__name__}, {type(parameter).__name__}): "
            "expected a module and a parameter"
        )
    external: dict[int, nn.Parameter] = module.__dict__.setdefault("_external_params", {})
    external[id(parameter)] = parameter


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """End `register_external_parameter`; RuntimeError if it was not registered."""
    external: dict[int, Any] = module.__dict__.get("_external_params", {})
    if external.pop(id(parameter), None) is None:
        raise RuntimeError("unregister_external_parameter: the parameter is not registered")

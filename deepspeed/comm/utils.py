"""What a launcher told this process, and the sizes and callers of messages."""

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

__all__ = [
    "get_caller_func",
    "get_debug_log_name",
    "get_default_args",
    "get_local_rank_from_launcher",
    "get_msg_size_from_args",
    "get_tensor_kwarg",
    "get_tensor_position",
    "get_world_rank_from_launcher",
    "get_world_size_from_launcher",
    "message_bytes",
]

# Where launchers leave the numbers, most specific first: torch's and ours, Open MPI, MPICH and
# Intel MPI, Slurm.
RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
LOCAL_RANK_VARIABLES = (
    "LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "SLURM_LOCALID",
)
WORLD_SIZE_VARIABLES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")

# The parameters that hold an operation's payload, by the names the operations of `deepspeed.comm`
# use.
_PAYLOAD_NAMES = (
    "tensor",
    "tensors",
    "input_list",
    "input_tensors",
    "input_tensor_list",
    "output_tensor",
)


def _first_set(names: Sequence[str], default: int) -> int:
    for name in names:
        text = os.environ.get(name)
        if text:
            try:
                return int(text)
            except ValueError as error:
                raise ValueError(
                    f"environment variable {name}={text!r} is not an integer; correct it"
                ) from error
    return default


def get_local_rank_from_launcher() -> int:
    """This process's ordinal on its machine as the launcher set it; 0 without a launcher."""
    return _first_set(LOCAL_RANK_VARIABLES, 0)


def get_world_rank_from_launcher() -> int:
    """This process's global rank as the launcher set it; 0 without a launcher."""
    return _first_set(RANK_VARIABLES, 0)


def get_world_size_from_launcher() -> int:
    """The number of processes as the launcher set it; 1 without a launcher."""
    return _first_set(WORLD_SIZE_VARIABLES, 1)


def message_bytes(payload: object) -> int:
    """Bytes in a tensor, or in all tensors of a sequence; 0 for anything else."""
    if isinstance(payload, torch.Tensor):
        return payload.numel() * payload.element_size()
    if isinstance(payload, (list, tuple)):
        return sum(message_bytes(item) for item in payload)
    return 0


def get_caller_func(frame: int = 3) -> str:
    """The name of the function ``frame`` levels up the stack."""
    return sys._getframe(frame).f_code.co_name


def get_default_args(func: Callable[..., Any]) -> dict[str, Any]:
    """The defaults of a function's parameters, by name."""
    parameters = inspect.signature(func).parameters.values()
    return {one.name: one.default for one in parameters if one.default is not one.empty}


def get_tensor_position(func: Callable[..., Any]) -> int:
    """The position of the parameter that holds the payload of ``func``; -1 when it has none."""
    names = list(inspect.signature(func).parameters)
    return next((names.index(name) for name in _PAYLOAD_NAMES if name in names), -1)


def get_tensor_kwarg(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> Any:
    """The payload of a call to ``func`` among its keyword arguments and defaults, or None."""
    arguments = {**get_default_args(func), **kwargs}
    return next((arguments[name] for name in _PAYLOAD_NAMES if name in arguments), None)


def get_msg_size_from_args(func: Callable[..., Any], *args: object, **kwargs: object) -> int:
    """Bytes in the payload of the call ``func(*args, **kwargs)``; 0 for barriers."""
    position = get_tensor_position(func)
    if position < 0:
        return 0
    payload = args[position] if position < len(args) else get_tensor_kwarg(func, kwargs)
    return message_bytes(payload)


def get_debug_log_name(func_args: Mapping[str, Any], debug: str) -> str:
    """The name under which the comms logger records a call in debug mode: operation and caller."""
    return f"{func_args['log_name']} | [Caller Func: {debug}]"

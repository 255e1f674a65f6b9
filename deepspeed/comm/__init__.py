"""Collectives and process groups over torch.distributed; the only package that imports it.

`from deepspeed import comm as dist` has everything of `comm`, which users know by that name too.

    collectives, host_collectives, point_to_point  operations under upstream's names
    coalesced, shard_ops                           several at once; on buffers of which every
                                                   rank owns a part
    reduce_op, constants                           operators and names
    initialization, discovery                      the default process group, and how a process
                                                   learns its rank
    process_groups, group_creation, group_store    asking for groups, making them, keeping them
    rank_lists, parallel_map                       which ranks share what
    watch                                          what sees operations and waits
    sim                                            collectives of the simulated device

`config`, `utils`, `torch` and `ccl` have upstream's names for what is asked of them.
"""

from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.comm import comm as _comm
from deepspeed.comm.ccl import CCLBackend
from deepspeed.comm.comm import *  # noqa: F403
from deepspeed.comm.comm import __all__ as _operations
from deepspeed.comm.constants import *  # noqa: F403
from deepspeed.comm.torch import TorchBackend
from deepspeed.comm.utils import (
    get_caller_func,
    get_debug_log_name,
    get_default_args,
    get_local_rank_from_launcher,
    get_msg_size_from_args,
    get_tensor_kwarg,
    get_tensor_position,
    get_world_rank_from_launcher,
    get_world_size_from_launcher,
)
from deepspeed.comm.watch.operation_log import CommsLogger

__all__ = [
    *_operations,
    "CCLBackend",
    "CommsLogger",
    "TorchBackend",
    "get_accelerator",
    "get_caller_func",
    "get_debug_log_name",
    "get_default_args",
    "get_local_rank_from_launcher",
    "get_msg_size_from_args",
    "get_tensor_kwarg",
    "get_tensor_position",
    "get_world_rank_from_launcher",
    "get_world_size_from_launcher",
]


def __getattr__(name: str) -> Any:
    if name == "cdb":
        return _comm.cdb
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Collectives and process groups over torch.distributed; the only package that imports it.

`from deepspeed import comm as dist` has everything of `comm`, which users know by that name too.

    collectives, shard_ops                         operations under upstream's names, and those on
                                                   buffers of which every rank owns a part
    reduce_op, constants                           operators and names
    initialization, discovery                      the default process group, and how a process
                                                   learns its rank
    process_groups, group_creation, group_store    asking for groups, making them, keeping them
    rank_lists, parallel_map                       which ranks share what
    watch                                          what sees operations and waits
    failures                                       what fails on one rank raises on all
    sim                                            collectives of the simulated device

`config`, `utils`, `torch` and `ccl` have upstream's names for what is asked of them.
"""

from deepspeed.accelerator import get_accelerator
from deepspeed.comm import collectives, discovery, initialization, process_groups, utils
from deepspeed.comm import comm as _comm
from deepspeed.comm.ccl import CCLBackend
from deepspeed.comm.comm import *  # noqa: F403
from deepspeed.comm.constants import *  # noqa: F403
from deepspeed.comm.torch import TorchBackend
from deepspeed.comm.utils import *  # noqa: F403
from deepspeed.comm.watch import logging_control
from deepspeed.comm.watch.operation_log import CommsLogger

__all__ = [
    *collectives.__all__,
    *discovery.__all__,
    *initialization.__all__,
    *logging_control.__all__,
    *process_groups.__all__,
    *utils.__all__,
    "CCLBackend",
    "CommsLogger",
    "ProcessGroup",  # noqa: F405
    "ReduceOp",  # noqa: F405
    "TorchBackend",
    "Work",  # noqa: F405
    "default_pg_timeout",  # noqa: F405
    "get_accelerator",
    "initialize_mesh_device",  # noqa: F405
]


def __getattr__(name: str) -> object:
    if name == "cdb":
        return _comm.cdb
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

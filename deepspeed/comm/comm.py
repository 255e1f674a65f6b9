"""The module under which users know the communication layer; it defines nothing of its own."""

from torch.distributed import ProcessGroup as ProcessGroup
from torch.distributed import ReduceOp as ReduceOp
from torch.distributed import Work as Work

from deepspeed.comm import initialization
from deepspeed.comm.collectives import *  # noqa: F403
from deepspeed.comm.constants import default_pg_timeout as default_pg_timeout
from deepspeed.comm.discovery import *  # noqa: F403
from deepspeed.comm.group_creation import initialize_mesh_device as initialize_mesh_device
from deepspeed.comm.initialization import *  # noqa: F403
from deepspeed.comm.process_groups import *  # noqa: F403
from deepspeed.comm.watch.logging_control import *  # noqa: F403


def __getattr__(name: str) -> object:
    # `cdb` is rebound when a process group is made, so it is looked up each time.
    if name == "cdb":
        return initialization.cdb
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

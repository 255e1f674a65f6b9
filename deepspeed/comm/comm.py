"""The module under which users know the communication layer; it defines nothing of its own.

Operations: `collectives`, `coalesced`, `point_to_point`, `host_collectives`. Process groups:
`process_groups`. The first group: `initialization`, `discovery`. The comms logger:
`logging_control`.
"""

from typing import Any

from torch.distributed import ProcessGroup, ReduceOp, Work

from deepspeed.comm import initialization
from deepspeed.comm.coalesced import WorkList, all_gather_coalesced, all_reduce_coalesced
from deepspeed.comm.collectives import (
    all_gather,
    all_gather_into_tensor,
    all_reduce,
    all_to_all,
    all_to_all_single,
    allgather_fn,
    broadcast,
    gather,
    inference_all_reduce,
    reduce,
    reduce_scatter,
    reduce_scatter_fn,
    reduce_scatter_tensor,
    scatter,
)
from deepspeed.comm.constants import default_pg_timeout
from deepspeed.comm.discovery import (
    in_aml,
    in_aws_sm,
    in_dlts,
    mpi_discovery,
    patch_aml_env_for_torch_nccl_backend,
    patch_aws_sm_env_for_torch_nccl_backend,
)
from deepspeed.comm.group_creation import initialize_mesh_device
from deepspeed.comm.host_collectives import (
    all_gather_object,
    barrier,
    broadcast_object_list,
    monitored_barrier,
)
from deepspeed.comm.initialization import init_deepspeed_backend, init_distributed, set_backend
from deepspeed.comm.point_to_point import irecv, isend, recv, send
from deepspeed.comm.process_groups import (
    Group,
    abort_groups,
    destroy_process_group,
    enable_symm_mem_for_group,
    get_all_ranks_from_group,
    get_backend_name,
    get_global_rank,
    get_local_rank,
    get_rank,
    get_store,
    get_world_group,
    get_world_size,
    has_all_gather_into_tensor,
    has_all_reduce_coalesced,
    has_coalescing_manager,
    has_reduce_scatter_tensor,
    is_available,
    is_connection_error,
    is_initialized,
    new_group,
)
from deepspeed.comm.watch.logging_control import (
    comms_logger,
    configure,
    get_comm_operation_count,
    get_logged_comm_ops,
    has_comm_data,
    log_summary,
    reset_log,
    timed_op,
)

__all__ = [
    "Group",
    "ProcessGroup",
    "ReduceOp",
    "Work",
    "WorkList",
    "abort_groups",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "allgather_fn",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "comms_logger",
    "configure",
    "default_pg_timeout",
    "destroy_process_group",
    "enable_symm_mem_for_group",
    "gather",
    "get_all_ranks_from_group",
    "get_backend_name",
    "get_comm_operation_count",
    "get_global_rank",
    "get_local_rank",
    "get_logged_comm_ops",
    "get_rank",
    "get_store",
    "get_world_group",
    "get_world_size",
    "has_all_gather_into_tensor",
    "has_all_reduce_coalesced",
    "has_coalescing_manager",
    "has_comm_data",
    "has_reduce_scatter_tensor",
    "in_aml",
    "in_aws_sm",
    "in_dlts",
    "inference_all_reduce",
    "init_deepspeed_backend",
    "init_distributed",
    "initialize_mesh_device",
    "irecv",
    "is_available",
    "is_initialized",
    "is_connection_error",
    "isend",
    "log_summary",
    "monitored_barrier",
    "mpi_discovery",
    "new_group",
    "patch_aml_env_for_torch_nccl_backend",
    "patch_aws_sm_env_for_torch_nccl_backend",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_fn",
    "reduce_scatter_tensor",
    "reset_log",
    "scatter",
    "send",
    "set_backend",
    "timed_op",
]


def __getattr__(name: str) -> Any:
    # `cdb` is rebound when a process group is made, so it is looked up each time.
    if name == "cdb":
        return initialization.cdb
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

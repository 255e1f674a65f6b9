"""torch.distributed behind the class that upstream's users know; its operations are torch's own,
and `deepspeed.comm.comm` calls those directly.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as torch_dist

from deepspeed.comm import group_creation, process_groups
from deepspeed.comm.watch.backend_threads import yielding_threads

# torch renames the flat-tensor variants and deprecates the old names; both take the same positional
# arguments.
all_gather_flat: Any = (
    getattr(torch_dist, "all_gather_single", None) or torch_dist.all_gather_into_tensor
)
reduce_scatter_flat: Any = (
    getattr(torch_dist, "reduce_scatter_single", None) or torch_dist.reduce_scatter_tensor
)


class TorchBackend:
    """The default process group of torch.distributed, made if there is none yet.

    Args:
        backend: torch's name of the backend, e.g. ``gloo``.
        timeout: how long a collective may take.
        init_method: torch's rendezvous URL; None means env://.
        rank, world_size: -1 means: from the environment.
        name: how the object calls itself.
        store: a key-value store to meet in instead of a URL.
    """

    def __init__(
        self,
        backend: str,
        timeout: timedelta,
        init_method: str | None,
        rank: int = -1,
        world_size: int = -1,
        name: str = "torch",
        store: object = None,
    ) -> None:
        self.name = name
        self.world_size = world_size
        self.rank_number = rank
        if not torch_dist.is_initialized():
            arguments: dict[str, Any] = (
                {"store": store} if store is not None else {"init_method": init_method}
            )
            with yielding_threads(backend):
                torch_dist.init_process_group(
                    backend, timeout=timeout, rank=rank, world_size=world_size, **arguments
                )
        self.single_gpu_mode = torch_dist.get_world_size() == 1

    # staticmethod: torch's functions must not receive this object as their first argument.
    all_reduce = staticmethod(torch_dist.all_reduce)
    broadcast = staticmethod(torch_dist.broadcast)
    reduce = staticmethod(torch_dist.reduce)
    all_gather = staticmethod(torch_dist.all_gather)
    all_gather_into_tensor = staticmethod(all_gather_flat)
    all_gather_base = staticmethod(all_gather_flat)
    all_gather_object = staticmethod(torch_dist.all_gather_object)
    reduce_scatter = staticmethod(torch_dist.reduce_scatter)
    reduce_scatter_tensor = staticmethod(reduce_scatter_flat)
    all_to_all = staticmethod(torch_dist.all_to_all)
    all_to_all_single = staticmethod(torch_dist.all_to_all_single)
    gather = staticmethod(torch_dist.gather)
    scatter = staticmethod(torch_dist.scatter)
    send = staticmethod(torch_dist.send)
    recv = staticmethod(torch_dist.recv)
    isend = staticmethod(torch_dist.isend)
    irecv = staticmethod(torch_dist.irecv)
    barrier = staticmethod(torch_dist.barrier)
    monitored_barrier = staticmethod(torch_dist.monitored_barrier)
    broadcast_object_list = staticmethod(torch_dist.broadcast_object_list)
    inference_all_reduce = staticmethod(torch_dist.all_reduce)
    get_rank = staticmethod(torch_dist.get_rank)
    get_world_size = staticmethod(torch_dist.get_world_size)
    get_backend = staticmethod(torch_dist.get_backend)
    get_global_rank = staticmethod(torch_dist.get_global_rank)
    is_initialized = staticmethod(torch_dist.is_initialized)
    destroy_process_group = staticmethod(torch_dist.destroy_process_group)
    new_group = staticmethod(torch_dist.new_group)

    def get_world_group(self) -> Any:
        return torch_dist.group.WORLD

    def has_all_gather_into_tensor(self) -> bool:
        return True

    def has_reduce_scatter_tensor(self) -> bool:
        return True

    def get_all_gather_function(self) -> Any:
        return all_gather_flat

    def get_reduce_scatter_function(self) -> Any:
        return reduce_scatter_flat

    def init_device_mesh(self, mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> Any:
        """A torch DeviceMesh over the accelerator; see `deepspeed.comm.initialize_mesh_device`."""
        return group_creation.initialize_mesh_device(mesh_shape, mesh_dim_names)

    def enable_symm_mem_for_group(self, group_name: str) -> None:
        """Allow symmetric memory in a group; see torch.distributed._symmetric_memory."""
        process_groups.enable_symm_mem_for_group(group_name)

"""Questions to and changes of process groups, which torch owns. The default timeout is remembered
here because torch gives groups made later its own instead of that of the first.
"""

import importlib
import uuid
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_dist
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as _c10d

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.constants import default_pg_timeout
from deepspeed.comm.utils import get_local_rank_from_launcher
from deepspeed.comm.watch.backend_threads import wait_until_at_rest, yielding_threads
from deepspeed.comm.watch.lookout import stop_all

__all__ = [
    "abort_groups",
    "destroy_process_group",
    "enable_symm_mem_for_group",
    "get_all_ranks_from_group",
    "get_backend_name",
    "get_global_rank",
    "get_local_rank",
    "get_rank",
    "get_store",
    "get_world_group",
    "get_world_size",
    "has_all_gather_into_tensor",
    "has_all_reduce_coalesced",
    "has_coalescing_manager",
    "has_reduce_scatter_tensor",
    "is_available",
    "is_connection_error",
    "is_initialized",
    "new_group",
    "Group",
]

Group = ProcessGroup | None  # None is the world where nothing else is said

_group_timeout: timedelta = default_pg_timeout

# Blocks of threads, each of which occupies one processor, of a communicator that carries messages:
# enough for tens of GB/s.
MESSAGE_CTAS = 4

# No message has this tag; see `abort_groups`.
_ABORT_TAG = 2**31 - 1
# What gloo's errors say when the other end is gone or nothing comes; it raises plain RuntimeErrors.
_CONNECTION_ERRORS = (
    "gloo",
    "pair closure",
    "Connection closed",
    "Connection reset",
    "Operation timed out",
)


def set_group_timeout(timeout: timedelta) -> None:
    """Set the timeout of groups made from now on."""
    global _group_timeout
    _group_timeout = timeout


def is_available() -> bool:
    """Whether this torch was built with torch.distributed."""
    return torch_dist.is_available()


def is_initialized() -> bool:
    """Whether there is a default process group."""
    return torch_dist.is_initialized()


def _require_initialized() -> None:
    if not torch_dist.is_initialized():
        raise RuntimeError(
            "there is no process group yet: call deepspeed.init_distributed() or "
            "deepspeed.initialize() first"
        )


def get_rank(group: Group = None) -> int:
    """This process's rank in ``group`` (default: the world); -1 when it is not in the group.

    Raises:
        RuntimeError: there is no process group.
    """
    _require_initialized()
    return torch_dist.get_rank(group)


def get_world_size(group: Group = None) -> int:
    """The number of ranks in ``group`` (default: the world); -1 when this process is not in it.

    Raises:
        RuntimeError: there is no process group.
    """
    _require_initialized()
    return torch_dist.get_world_size(group)


def get_world_group() -> ProcessGroup:
    """The group of all ranks.

    Raises:
        RuntimeError: there is no process group.
    """
    _require_initialized()
    return torch_dist.group.WORLD  # type: ignore[return-value]  # a property of a metaclass, opaque to mypy


def get_global_rank(group: Group = None, group_rank: int = 0) -> int:
    """The global rank of a rank of ``group`` (default: the world)."""
    return group_rank if group is None else torch_dist.get_global_rank(group, group_rank)


def get_store() -> Any:
    """The key-value store in which the ranks of the world met.

    Raises:
        RuntimeError: there is no process group.
    """
    _require_initialized()
    return _c10d._get_default_store()


def own_connection(store: object) -> Any:
    """Open a connection of its own to ``store`` for a thread: one that waits in the store keeps the
    other users of its connection waiting. All ranks of the world call it.
    """
    return store.clone() if hasattr(store, "clone") else _connected_again(store)


def _connected_again(store: Any) -> Any:
    """`own_connection` for torch 2.6, whose stores cannot be cloned.

    The server below the store's prefixes can be connected to again. Which prefixes these are cannot
    be read, so the ranks agree on another one: what the first of them wrote under the old ones.
    """
    server = store
    while isinstance(server, torch_dist.PrefixStore):
        server = server.underlying_store
    if not isinstance(server, torch_dist.TCPStore):
        return store  # a file or this process's memory: there is no connection to wait for
    prefix = store.compare_set("deepspeed/own_connection", "", uuid.uuid4().hex).decode()
    again = torch_dist.TCPStore(server.host, server.port, wait_for_workers=False)
    return torch_dist.PrefixStore(prefix, again)


def get_all_ranks_from_group(group: Group = None) -> list[int]:
    """The global ranks in ``group`` (default: the world), in group order."""
    # torch 2.6 does not take None for the world here, unlike everywhere else.
    return torch_dist.get_process_group_ranks(get_world_group() if group is None else group)


def get_local_rank() -> int:
    """This process's ordinal on its machine, from the launcher."""
    return get_local_rank_from_launcher()


def get_backend_name(group: Group = None) -> str:
    """torch's name of the backend of ``group`` (default: the world), e.g. ``gloo``."""
    _require_initialized()
    return str(torch_dist.get_backend(group))


def new_group(
    ranks: Sequence[int] | None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    by_members: bool = False,
    options: Any = None,
) -> ProcessGroup:
    """Make a group of these global ranks (None: all). Collective over the world, in the same order
    on all ranks, or with `by_members` called by its members alone (see `group_creation`).

    Args:
        ranks: global ranks; the world's order is kept.
        timeout, backend: None means the world's.
        options: torch's options of the backend.
    """
    _require_initialized()
    with yielding_threads(backend or get_backend_name()):
        return torch_dist.new_group(
            None if ranks is None else list(ranks),
            timeout=timeout or _group_timeout,
            backend=backend,
            use_local_synchronization=by_members,
            **({} if options is None else {"pg_options": options}),
        )


def message_options() -> Any:
    """Options for groups that carry messages beside the computation, where there is a choice.

    NCCL occupies processors of the device from when a receive is posted until its sender has sent:
    few, so that what the sender may wait for finds room. Streams of high priority come from a pool
    of their own, so that messages never share one with what else is under way here.
    """
    if get_backend_name() != "nccl":
        return None
    options: Any = torch_dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = _group_timeout
    config: Any = getattr(options, "config", None)
    if hasattr(config, "max_ctas"):
        config.min_ctas, config.max_ctas = 1, MESSAGE_CTAS
    return options


def destroy_process_group(group: Group = None) -> None:
    """Destroy ``group``, or everything. Does nothing when there is no process group."""
    if torch_dist.is_initialized():
        if get_accelerator().defers_collectives:
            get_accelerator().synchronize()  # other ranks wait for what is still queued here
        if group is None:
            stop_all(if_idle=True)  # nothing is left to look at
        # The thread that still holds a tensor needs the interpreter, which torch 2.6 holds while it
        # waits for that thread to end: the process would hang.
        wait_until_at_rest()
        torch_dist.destroy_process_group(group)


def abort_groups() -> None:
    """End every operation under way in any group of this process; who waits for one gets an error,
    or garbage on a device. For another thread than the blocked one; no group can be used
    afterwards.
    """
    for group in list(_c10d._world.pg_map):
        backends = {group._get_backend(device) for device in group._device_types}
        for backend in backends:
            if backend.name() == "gloo":
                _abort_gloo(group)
            elif hasattr(backend, "abort"):
                backend.abort()


def _abort_gloo(group: ProcessGroup) -> None:
    """gloo's own abort wakes nobody; a receive that times out closes its group's connections."""
    for rank in get_all_ranks_from_group(group):
        if rank == torch_dist.get_rank():
            continue
        # With each peer: where the connection is closed already, by the peer, the receive fails at
        # once and closes no other.
        with suppress(RuntimeError):
            work = torch_dist.irecv(torch.empty(1, dtype=torch.uint8), rank, group, _ABORT_TAG)
            if work is not None:
                work.wait(timedelta(milliseconds=1))


def is_connection_error(error: BaseException) -> bool:
    """Whether an operation raised this because another rank is gone or does not answer."""
    if isinstance(error, torch_dist.DistError):
        return True
    return type(error) is RuntimeError and any(mark in str(error) for mark in _CONNECTION_ERRORS)


def enable_symm_mem_for_group(group_name: str) -> None:
    """Allow torch's symmetric memory in the named group."""
    # startup: an experimental module that few programs need.
    symmetric_memory: Any = importlib.import_module("torch.distributed._symmetric_memory")
    symmetric_memory.enable_symm_mem_for_group(group_name)


def has_all_gather_into_tensor() -> bool:
    """Whether `all_gather_into_tensor` exists: always."""
    return True


def has_reduce_scatter_tensor() -> bool:
    """Whether `reduce_scatter_tensor` exists: always."""
    return True


def has_all_reduce_coalesced() -> bool:
    """Whether `all_reduce_coalesced` exists: always."""
    return True


def has_coalescing_manager() -> bool:
    """Whether torch can issue several operations as one."""
    return hasattr(_c10d, "_coalescing_manager")

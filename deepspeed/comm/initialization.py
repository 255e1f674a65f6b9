"""Making the default process group, or adopting the one that is there."""

import os
from datetime import timedelta

import torch.distributed as torch_dist

from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.device_choice import select_device
from deepspeed.accelerator.real_accelerator import follow_accelerator
from deepspeed.comm import discovery, process_groups
from deepspeed.comm.ccl import CCLBackend
from deepspeed.comm.constants import CCL_BACKEND, TORCH_DISTRIBUTED_DEFAULT_PORT, default_pg_timeout
from deepspeed.comm.torch import TorchBackend
from deepspeed.comm.watch.logging_control import configure
from deepspeed.utils.logging import log_once, logger

__all__ = ["init_deepspeed_backend", "init_distributed", "set_backend"]

# The object that made or adopted the default process group; None before.
cdb: TorchBackend | None = None


def set_backend() -> None:
    """Adopt torch's default process group, if there is one."""
    global cdb
    if torch_dist.is_initialized():
        cdb = TorchBackend(torch_dist.get_backend(), default_pg_timeout, None)
        _follow_device()


def _follow_device() -> None:
    """Let collectives run when the device runs its work, if it defers that."""
    if get_accelerator().defers_collectives:
        # startup: for simulated devices only.
        from deepspeed.comm.sim import stream_collectives

        stream_collectives.install()


# A simulation may begin when the process group is there already.
follow_accelerator(_follow_device)


def init_deepspeed_backend(
    ds_backend: str,
    timeout: timedelta,
    init_method: str | None,
    rank: int = -1,
    world_size: int = -1,
    store: object = None,
) -> None:
    """Make the default process group; arguments as those of `init_distributed`, and `store`, a
    key-value store to meet in instead of a URL.
    """
    global cdb
    if ds_backend == CCL_BACKEND:
        cdb = CCLBackend(timeout, init_method, rank, world_size, store=store)
    else:
        cdb = TorchBackend(ds_backend, timeout, init_method, rank, world_size, store=store)
    _follow_device()
    process_groups.set_group_timeout(timeout)


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT,
    verbose: bool = True,
    timeout: timedelta = default_pg_timeout,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: object = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Make the default process group, or adopt torch's if there is one.

    The ranks come, first match, from the arguments; from RANK and WORLD_SIZE; from MPI, Slurm or
    the cloud scheduler that started the process. A process that none of them knows is a world of
    its own.

    Args:
        dist_backend: torch's backend; None means the accelerator's.
        auto_mpi_discovery: whether MPI, Slurm and cloud schedulers are asked.
        distributed_port: the port of rank 0 for discovered jobs that set no MASTER_PORT.
        verbose: log what is made and where the numbers come from.
        timeout: how long a collective may take, for this and all later groups.
        init_method: torch's rendezvous URL (``file://...``, ``tcp://...``); None means env://.
        dist_init_required: False forbids making a group: one must be there. None and True make one
            if needed.
        config: a configuration object, for its ``comms_logger`` section.
        rank, world_size: -1 means: from the environment.

    Raises:
        ValueError: variables of the environment are missing or inconsistent.
        RuntimeError: there is no group and ``dist_init_required`` is False.
    """
    if config is not None:
        configure(deepspeed_config=config)
    if torch_dist.is_initialized():
        _adopt(dist_backend)
        return
    if dist_init_required is False:
        raise RuntimeError(
            "dist_init_required=False, but there is no process group: call "
            "torch.distributed.init_process_group() or deepspeed.init_distributed() before, or "
            "leave dist_init_required unset"
        )
    if not torch_dist.is_available():
        raise RuntimeError("this torch was built without torch.distributed; install one with it")
    backend = dist_backend or get_accelerator().communication_backend_name()
    given = (rank, world_size)
    if given == (-1, -1) and not _ranks_in_environment() and auto_mpi_discovery:
        discovery.discover(distributed_port, verbose)
    if given == (-1, -1) and not _ranks_in_environment() and init_method is None:
        _init_alone(backend, timeout, verbose)
        return
    rank, world_size = _ranks(rank, world_size)
    if init_method is None or init_method.startswith("env://"):
        _require_meeting_point(given != (-1, -1))
    select_device(process_groups.get_local_rank())
    if verbose:
        logger.info("rank %d of %d joins the process group over %s", rank, world_size, backend)
    init_deepspeed_backend(backend, timeout, init_method, rank, world_size)


def ensure_distributed(
    dist_init_required: bool | None = None, distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT
) -> None:
    """Make or adopt the default process group; ValueError if `dist_init_required` forbids it."""
    if torch_dist.is_initialized():
        return
    if dist_init_required is False:
        raise ValueError(
            "dist_init_required=False, but torch.distributed is not initialized: call "
            "deepspeed.init_distributed() first"
        )
    init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)


def _ranks_in_environment() -> bool:
    return bool(os.environ.get("RANK") or os.environ.get("WORLD_SIZE"))


def _adopt(dist_backend: str | None) -> None:
    there = str(torch_dist.get_backend())
    if dist_backend is not None and dist_backend not in there:
        log_once(
            f"dist_backend={dist_backend!r} is ignored: the process group was made before, over "
            f"{there!r}"
        )
    set_backend()


def _init_alone(backend: str, timeout: timedelta, verbose: bool) -> None:
    """Make a world of one process. It meets nobody, so it opens no port."""
    if verbose:
        logger.info("no launcher started this process: it trains alone over %s", backend)
    # Client libraries read LOCAL_RANK to name their device, also when nobody launched them.
    os.environ.setdefault("LOCAL_RANK", "0")
    select_device(process_groups.get_local_rank())
    store = torch_dist.HashStore()
    init_deepspeed_backend(backend, timeout, None, rank=0, world_size=1, store=store)


def _ranks(rank: int, world_size: int) -> tuple[int, int]:
    given = {"RANK": rank, "WORLD_SIZE": world_size}
    missing = [name for name, value in given.items() if value < 0 and not os.environ.get(name)]
    if missing:
        # All that are missing are named at once, also those that would only be noticed later.
        names = discovery.missing_variables()
        missing = [name for name in names if name in missing or name.startswith("MASTER")]
        unset = ", ".join(missing)
        raise ValueError(f"environment variables {unset} are not set; {discovery.REMEDY}")
    rank = _from_environment("RANK") if rank < 0 else rank
    world_size = _from_environment("WORLD_SIZE") if world_size < 0 else world_size
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(
            f"RANK={rank} is not in 0..WORLD_SIZE-1 with WORLD_SIZE={world_size}; "
            f"{discovery.REMEDY}"
        )
    return rank, world_size


def _from_environment(name: str) -> int:
    text = os.environ[name]
    try:
        return int(text)
    except ValueError as error:
        raise ValueError(
            f"environment variable {name}={text!r} is not an integer; {discovery.REMEDY}"
        ) from error


def _require_meeting_point(ranks_are_arguments: bool) -> None:
    missing = [name for name in discovery.missing_variables() if name.startswith("MASTER")]
    if missing:
        given = "init_method" if ranks_are_arguments else "rank, world_size and init_method"
        hint = f"{discovery.REMEDY}, or pass {given}"
        raise ValueError(f"environment variables {', '.join(missing)} are not set; {hint}")

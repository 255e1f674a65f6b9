"""How a process learns its rank, the world size and where to meet the others: launchers' variables,
MPI, Slurm and the cloud schedulers become the five variables torch reads (RANK, WORLD_SIZE,
LOCAL_RANK, MASTER_ADDR, MASTER_PORT).
"""

import importlib.util
import os
import re
import socket
from typing import Any

from deepspeed.comm import constants
from deepspeed.utils.logging import logger

__all__ = [
    "in_aml",
    "in_aws_sm",
    "in_dlts",
    "mpi_discovery",
    "patch_aml_env_for_torch_nccl_backend",
    "patch_aws_sm_env_for_torch_nccl_backend",
]

REQUIRED_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
REMEDY = (
    "start the script with `deepspeed script.py` or `torchrun --nproc_per_node=N script.py`, "
    "or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT yourself"
)

# Size variables that an MPI starter leaves: Open MPI; MPICH, Intel MPI and MVAPICH2 (hydra).
_MPI_SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
_MPI_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK")
_MPI_LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK")
_MPI_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE")


def _first(names: tuple[str, ...]) -> str | None:
    return next((os.environ[name] for name in names if os.environ.get(name)), None)


def _report(how: str, verbose: bool) -> None:
    if verbose:
        found = {name: os.environ.get(name) for name in (*REQUIRED_VARIABLES, "LOCAL_RANK")}
        logger.info("%s gives %s", how, found)


def in_mpi() -> bool:
    """Whether an MPI starter made this process."""
    return _first(_MPI_SIZE_VARIABLES) is not None


def in_slurm() -> bool:
    """Whether Slurm made this process as one task of a step."""
    return bool(os.environ.get("SLURM_PROCID")) and bool(os.environ.get("SLURM_NTASKS"))


def in_aml() -> bool:
    """Whether this is an Azure Machine Learning job."""
    return "AZUREML_EXPERIMENT_ID" in os.environ


def in_aws_sm() -> bool:
    """Whether this is an AWS SageMaker training job."""
    return "SM_TRAINING_ENV" in os.environ


def in_dlts() -> bool:
    """Whether this is a DLTS job."""
    return "DLTS_JOB_ID" in os.environ


def missing_variables() -> list[str]:
    """The variables of the env:// rendezvous that are unset or empty."""
    return [name for name in REQUIRED_VARIABLES if not os.environ.get(name)]


def mpi_discovery(
    distributed_port: int = constants.TORCH_DISTRIBUTED_DEFAULT_PORT, verbose: bool = True
) -> None:
    """Set torch's five variables from MPI.

    The numbers come from the starter's environment. The master's address is ``MASTER_ADDR`` if set,
    the loopback when all processes share one machine, and otherwise asked of rank 0 through mpi4py.

    Raises:
        RuntimeError: MPI did not start this process, or several machines are used without mpi4py or
            ``MASTER_ADDR``.
    """
    rank, size = _first(_MPI_RANK_VARIABLES), _first(_MPI_SIZE_VARIABLES)
    local_rank, local_size = _first(_MPI_LOCAL_RANKS), _first(_MPI_LOCAL_SIZES)
    communicator: Any = None
    if importlib.util.find_spec("mpi4py") is not None:
        # optional: mpi4py is an extra, and importing it starts MPI.
        from mpi4py import MPI

        communicator = MPI.COMM_WORLD
        rank, size = str(communicator.Get_rank()), str(communicator.Get_size())
    if rank is None or size is None:
        raise RuntimeError(
            f"MPI discovery found neither mpi4py nor any of {_MPI_SIZE_VARIABLES}; {REMEDY}"
        )
    address = os.environ.get("MASTER_ADDR")
    if communicator is not None:
        hosts = communicator.allgather(socket.gethostname())
        if local_rank is None:
            local_rank = str(hosts[: int(rank)].count(hosts[int(rank)]))
        if address is None:
            address = communicator.bcast(_own_address() if rank == "0" else None, root=0)
    elif address is None and (local_size == size or size == "1"):
        address = "127.0.0.1"
    if address is None:
        raise RuntimeError(
            f"MPI started {size} processes on several machines and MASTER_ADDR is not set: "
            "install mpi4py, or set MASTER_ADDR to the address of the machine of rank 0"
        )
    os.environ.update(RANK=rank, WORLD_SIZE=size, LOCAL_RANK=local_rank or "0", MASTER_ADDR=address)
    os.environ.setdefault("MASTER_PORT", str(distributed_port))
    _report("MPI", verbose)


def _own_address() -> str:
    # The address of the interface that leads outside: a name in /etc/hosts often maps to the
    # loopback, which other machines cannot reach. Connecting a datagram socket sends nothing.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1, never routed to a host
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostbyname(socket.gethostname())


def first_slurm_host(node_list: str) -> str:
    """The first host of Slurm's compact notation: ``gpu[07-09,12],cpu1`` gives ``gpu07``."""
    # The first comma outside of brackets ends the first entry; each bracket's first number is its
    # first host.
    matched = re.match(r"(?:\[[^\]]*\]|[^,\[])+", node_list.strip())
    if matched is None:
        raise ValueError(f"SLURM_JOB_NODELIST={node_list!r} names no host; set MASTER_ADDR")
    return re.sub(r"\[([^,\]\-]+)[^\]]*\]", r"\1", matched.group(0))


def slurm_discovery(
    distributed_port: int = constants.TORCH_DISTRIBUTED_DEFAULT_PORT, verbose: bool = True
) -> None:
    """Set torch's five variables from Slurm's; ``MASTER_ADDR`` and ``MASTER_PORT`` are kept when
    set.

    Raises:
        ValueError: Slurm names no hosts and ``MASTER_ADDR`` is not set.
    """
    node_list = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", "")
    address = os.environ.get("MASTER_ADDR") or first_slurm_host(node_list)
    os.environ.update(
        RANK=os.environ["SLURM_PROCID"],
        WORLD_SIZE=os.environ["SLURM_NTASKS"],
        LOCAL_RANK=os.environ.get("SLURM_LOCALID", "0"),
        MASTER_ADDR=address,
    )
    os.environ.setdefault("MASTER_PORT", str(distributed_port))
    _report("Slurm", verbose)


def patch_aml_env_for_torch_nccl_backend(master_port: int = 6105, verbose: bool = True) -> None:
    """Set torch's five variables inside an Azure Machine Learning job started through MPI."""
    os.environ["RANK"] = os.environ["OMPI_COMM_WORLD_RANK"]
    os.environ["WORLD_SIZE"] = os.environ["OMPI_COMM_WORLD_SIZE"]
    os.environ["LOCAL_RANK"] = os.environ["OMPI_COMM_WORLD_LOCAL_RANK"]
    single_node = os.environ["OMPI_COMM_WORLD_LOCAL_SIZE"] == os.environ["WORLD_SIZE"]
    if single_node:
        os.environ["MASTER_ADDR"] = os.environ.get("AZ_BATCHAI_MPI_MASTER_NODE", "127.0.0.1")
        os.environ["MASTER_PORT"] = constants.DEFAULT_AML_MASTER_PORT
    else:
        address, _, port = os.environ["AZ_BATCH_MASTER_NODE"].partition(":")
        os.environ["MASTER_ADDR"] = address
        os.environ.setdefault("MASTER_PORT", port or str(master_port))
    # Containers' bridges carry no traffic between machines; NCCL must not choose them.
    os.environ.setdefault("NCCL_SOCKET_IFNAME", constants.DEFAULT_AML_NCCL_SOCKET_IFNAME)
    _report("Azure Machine Learning", verbose)


def patch_aws_sm_env_for_torch_nccl_backend(verbose: bool = True) -> None:
    """Set torch's rank variables inside an AWS SageMaker job started through MPI."""
    os.environ["RANK"] = os.environ["OMPI_COMM_WORLD_RANK"]
    os.environ["LOCAL_RANK"] = os.environ["OMPI_COMM_WORLD_LOCAL_RANK"]
    os.environ["WORLD_SIZE"] = os.environ["OMPI_COMM_WORLD_SIZE"]
    _report("AWS SageMaker", verbose)


def discover(distributed_port: int, verbose: bool) -> None:
    """Set torch's five variables from whatever scheduler started this process, if one did."""
    if in_aml() and in_mpi():
        patch_aml_env_for_torch_nccl_backend(verbose=verbose)
    elif in_aws_sm() and in_mpi():
        patch_aws_sm_env_for_torch_nccl_backend(verbose=verbose)
    elif in_mpi():
        mpi_discovery(distributed_port=distributed_port, verbose=verbose)
    elif in_slurm():
        slurm_discovery(distributed_port=distributed_port, verbose=verbose)

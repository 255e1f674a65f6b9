"""What one launcher process starts: commands, environments and cores of its ranks; its place."""

import json
import os
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path

from deepspeed.launcher.constants import LOCAL_MASTER_ADDR, TORCH_DISTRIBUTED_DEFAULT_PORT
from deepspeed.launcher.resources import parse_core_list, split_cores
from deepspeed.utils.logging import logger


@dataclass(frozen=True)
class Place:
    """Where a launcher's processes stand in a job of several launchers."""

    node_rank: int  # rank of this node
    num_nodes: int  # number of nodes
    first_rank: int  # global rank of this launcher's first process
    world_size: int  # number of processes of the job
    # Where the launchers of the job meet, as `coordinator.CoordinatorAddress.encode` wrote it.
    coordinator: str
    member: int  # this launcher's number there
    # Of this launcher's first process; above 0 where each process has a launcher of its own.
    local_rank: int
    local_size: int  # number of the job's processes on this node
    # Whether this launcher writes the job's failures, instead of the command that started it.
    reports: bool = False


def place_of_node(world: dict[str, list[int]], node_rank: int, coordinator: str) -> Place:
    """Return the place of the launcher that starts all processes of one node."""
    sizes = [len(slots) for slots in world.values()]
    if not 0 <= node_rank < len(sizes):
        text = f"the job has {len(sizes)} nodes, {', '.join(world)}; give their position, from 0"
        raise ValueError(f"--node_rank={node_rank}: {text}")
    before, count = sum(sizes[:node_rank]), len(sizes)
    return Place(node_rank, count, before, sum(sizes), coordinator, node_rank, 0, sizes[node_rank])


def place_of_rank(world: dict[str, list[int]], rank: int, coordinator: str) -> Place:
    """Return the place of a launcher of one process; ranks fill one node after the other."""
    sizes, before = [len(slots) for slots in world.values()], 0
    for node, size in enumerate(sizes):
        if 0 <= rank - before < size:
            count = len(sizes)
            return Place(node, count, rank, sum(sizes), coordinator, rank, rank - before, size)
        before += size
    raise ValueError(f"rank {rank} is not in 0..{before - 1}, the slots of {', '.join(world)}")


@dataclass(frozen=True)
class Elastic:
    """Between how many nodes a job may run."""

    min_nodes: int
    max_nodes: int


def elastic_of(min_nodes: int, max_nodes: int, known_nodes: int) -> Elastic:
    """Return the limits that the flags mean; -1 is for a flag that was left out."""
    for name, value in (("min_elastic_nodes", min_nodes), ("max_elastic_nodes", max_nodes)):
        if value != -1 and value < 1:
            raise ValueError(f"--{name}={value}: give a positive number")
    least = 1 if min_nodes == -1 else min_nodes
    most = max(known_nodes, least) if max_nodes == -1 else max_nodes
    if least > most:
        text = f"is above --max_elastic_nodes={most}; exchange them or raise the latter"
        raise ValueError(f"--min_elastic_nodes={least} {text}")
    return Elastic(least, most)


@dataclass(frozen=True)
class LaunchPlan:
    """What to start on this node."""

    command: list[str]  # the program and its arguments, without --local_rank
    num_ranks: int  # number of processes
    pass_local_rank: bool = True  # add `--local_rank=<n>` behind the program (upstream's habit)
    local_rank_index: int = 1  # position in `command` at which that argument goes
    master_addr: str = LOCAL_MASTER_ADDR  # address of the store that the processes meet at
    # Its port; 0 takes a free one, None takes 29500 or a free one when that is in use.
    master_port: int | None = None
    # Variables for every process, over the launcher's own.
    environment: dict[str, str] = field(default_factory=dict)
    # One core list per rank to bind it to; empty for no binding.
    cores: list[list[int]] = field(default_factory=list)
    # Folder of one log file per rank, instead of prefixed lines on the launcher's output.
    log_dir: str | None = None
    # Id under which a file with the launcher's process id is kept while it runs; None for no file.
    save_pid: int | None = None
    # Where these processes stand in a job of several launchers; None when they are the whole job.
    place: Place | None = None
    # Between how many nodes the job may run; None for one launch without restarts.
    elastic: Elastic | None = None

    @property
    def first_rank(self) -> int:
        """Global rank of the first process."""
        return self.place.first_rank if self.place else 0

    def log_start(self, rank: int, pid: int) -> None:
        where = f" on {socket.gethostname()}" if self.place else ""
        logger.info("rank %d is process %d%s", rank, pid, where)

    def rank_command(self, local_rank: int) -> list[str]:
        """Return the command of one process."""
        if not self.pass_local_rank:
            return self.command
        head, tail = self.command[: self.local_rank_index], self.command[self.local_rank_index :]
        return [*head, f"--local_rank={local_rank}", *tail]

    def rank_environment(self, local_rank: int) -> dict[str, str]:
        """Return the variables of one process that the agent does not set itself."""
        bound = self.cores[local_rank] if self.cores else None
        local_size = self.place.local_size if self.place else self.num_ranks
        threads = len(bound) if bound else max(1, num_available_cores() // local_size)
        found = {
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
            "LOCAL_SIZE": str(local_size),
        }
        if not self.elastic:  # else `worker_exec` sets it
            found["CROSS_RANK"] = str(self.place.node_rank if self.place else 0)
            found["CROSS_SIZE"] = str(self.place.num_nodes if self.place else 1)
        if self.place:
            found |= self._job_environment(self.place, local_rank)
        return found | self.environment

    def write_for_workers(self, path: Path, control: Path) -> None:
        """Write what `worker_exec` reads, with where it says its id."""
        ranks = range(self.num_ranks)
        plan = {
            "launcher_pid": os.getpid(),
            "control": str(control),
            "cores": self.cores,
            "commands": [self.rank_command(local_rank) for local_rank in ranks],
            "environments": [self.rank_environment(local_rank) for local_rank in ranks],
        }
        path.write_text(json.dumps(plan), encoding="utf-8")

    def _job_environment(self, place: Place, index: int) -> dict[str, str]:
        """Return one process's place in the job, over the agent's, which knows its node only."""
        rank, world_size = str(place.first_rank + index), str(place.world_size)
        return {
            "RANK": rank,
            "ROLE_RANK": rank,
            "WORLD_SIZE": world_size,
            "ROLE_WORLD_SIZE": world_size,
            "LOCAL_RANK": str(place.local_rank + index),
            "LOCAL_WORLD_SIZE": str(place.local_size),
            "GROUP_RANK": str(place.node_rank),
            "GROUP_WORLD_SIZE": str(place.num_nodes),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
            # The agent's store serves its node; rank 0 opens the one that all nodes meet at.
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }


def num_available_cores() -> int:
    """Return how many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_script_kind(module: bool, no_python: bool) -> None:
    """Refuse a script that is to be a module of Python, and run without it."""
    if module and no_python:
        raise ValueError(
            "Don't use both the '--no_python' flag and the '--module' flag at the same time."
        )


def build_command(
    script: str, script_args: list[str], module: bool, no_python: bool
) -> tuple[list[str], int]:
    """Return the command that runs a user's script, and where in it --local_rank goes."""
    check_script_kind(module, no_python)
    # Unbuffered: a line is shown when it is printed, and not lost when the process is killed.
    python = [] if no_python else [sys.executable, "-u", *(["-m"] if module else [])]
    head = [*python, script]
    return [*head, *script_args], len(head)


def bound_cores(
    bind_cores_to_rank: bool, bind_core_list: str | None, num_ranks: int
) -> list[list[int]]:
    """Return each rank's cores, or an empty list when no binding was asked for."""
    if not bind_cores_to_rank:
        if bind_core_list:
            text = "has no effect alone; add --bind_cores_to_rank"
            raise ValueError(f"--bind_core_list={bind_core_list} {text}")
        return []
    if not hasattr(os, "sched_setaffinity"):
        text = "is not supported on this operating system; leave it out"
        raise ValueError(f"--bind_cores_to_rank {text}")
    allowed = sorted(os.sched_getaffinity(0))
    cores = parse_core_list(bind_core_list) if bind_core_list else allowed
    foreign = sorted(set(cores) - set(allowed))
    if foreign:
        text = f"cores {foreign} are not among this machine's {allowed}"
        raise ValueError(f"--bind_core_list={bind_core_list}: {text}")
    return split_cores(cores, num_ranks)


def free_port() -> int:
    """Return a TCP port that was free a moment ago."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def usable_port(port: int | None) -> int:
    """Return the port that rank 0 opens: the named one; 29500 or a free one for None; 0 is any."""
    if port == 0:
        return free_port()
    wanted = TORCH_DISTRIBUTED_DEFAULT_PORT if port is None else port
    try:
        # Without SO_REUSEADDR a port whose last connections still linger would count as in use; the
        # store sets it too.
        socket.create_server(("", wanted), reuse_port=False).close()
    except OSError as error:
        if port is None:
            return free_port()
        raise ValueError(f"{port_in_use(port)}: {error.strerror}") from error
    return wanted


def port_in_use(port: int) -> str:
    """Return what is said of a named port that another program has."""
    remedy = "name another one, or leave the flag out to have a free one chosen"
    return f"--master_port={port}: the port is in use; {remedy}"


def address_towards(host: str, port: int = 9) -> str | None:
    """Return this machine's address as `host` sees it, which need not know its name; None where the
    name is ssh's own or has no route.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            # A datagram socket sends nothing here; connecting only chooses a route.
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None

"""The `deepspeed` command, from the command line to supervised processes on one or more machines.

Owns upstream's flags and the choice of hosts and slots from them. A launch on this machine runs in
this process: no second interpreter starts up first.
"""

from deepspeed.launcher.signals import die_at_once

if __name__ == "__main__":
    die_at_once()

import argparse
import base64
import json
import os
import re
import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from deepspeed._lazy import lazy_attributes
from deepspeed.launcher.constants import (
    DLTS_HOSTFILE,
    EXPORT_ENVS,
    IMPI_LAUNCHER,
    LOCAL_MASTER_ADDR,
    MPICH_LAUNCHER,
    MVAPICH_LAUNCHER,
    OPENMPI_LAUNCHER,
    PDSH_LAUNCHER,
    PID_FILE_BASEPATH,
    SLURM_LAUNCHER,
    SSH_LAUNCHER,
    TORCH_DISTRIBUTED_DEFAULT_PORT,
)
from deepspeed.launcher.launch import Flags, add_flags, add_log_flags, answer, run
from deepspeed.launcher.plan import (
    Elastic,
    LaunchPlan,
    bound_cores,
    build_command,
    check_script_kind,
    elastic_of,
)
from deepspeed.launcher.resources import (
    check_filters,
    device_environment,
    fetch_hostfile,
    parse_num_nodes,
    parse_resource_filter,
    visible_slots,
)
from deepspeed.utils.logging import logger

# Upstream's path of these names; its further ones say what to use instead.
_CONSTANTS = ("DEEPSPEED_ENVIRONMENT_NAME", "DEEPSPEED_ENVIRONMENT_PATHS")
_RESOURCES = ("_parse_hostfile", "parse_inclusion_exclusion", "parse_node_config")
__getattr__ = lazy_attributes(
    __name__,
    dict.fromkeys(_CONSTANTS, "deepspeed.launcher.constants")
    | dict.fromkeys((*_RESOURCES, "parse_node_config_list"), "deepspeed.launcher.resources"),
)

_ENGINE_FLAGS: tuple[tuple[str, Any], ...] = (
    ("launcher", PDSH_LAUNCHER),
    ("launcher_args", ""),
    ("ssh_port", None),
    ("venv_script", None),
)
"""Flags that only an engine for several nodes honours, with the values that ask for nothing."""
_ENGINES = ", ".join(
    (PDSH_LAUNCHER, SSH_LAUNCHER, OPENMPI_LAUNCHER, MPICH_LAUNCHER, IMPI_LAUNCHER)
    + (MVAPICH_LAUNCHER, SLURM_LAUNCHER)
)
_NO_HOSTFILE = ("", os.devnull)
"""What --hostfile is given for this machine alone, where a default hostfile may be."""
_RESOURCE_FLAGS: Flags = (
    (
        "-H --hostfile",
        DLTS_HOSTFILE,
        f"MPI-style file of `<host> slots=<n>` lines; empty or {os.devnull} for this machine alone",
    ),
    (
        "-i --include",
        "",
        "slots to use, as NAME[:SLOT[,SLOT ...]] joined by @, e.g. localhost:0,2; a slot is a "
        "device's number",
    ),
    ("-e --exclude", "", "slots not to use, in the same form; not with --include"),
    (
        "--num_gpus --num_accelerators",
        -1,
        "number of processes: the first N devices, or N processes on the CPU; -1 is all devices, "
        "or one process on the CPU",
    ),
    ("--bind_cores_to_rank", False, "bind each rank to cores of its own"),
    ("--bind_core_list", None, "cores to deal to the ranks, e.g. 1,3-5,7; default all available"),
)
_NODE_FLAGS: Flags = (
    ("--num_nodes", "-1", "number of nodes: the first N hosts of the hostfile; -1 is all"),
    ("--min_elastic_nodes", -1, "fewest nodes to go on with; 1 if left out"),
    ("--max_elastic_nodes", -1, "most nodes to take in; --min_elastic_nodes if left out"),
    (
        "--elastic_training",
        False,
        "restart the processes when one fails, or a node comes or goes; run this on each node, "
        "with --master_addr",
    ),
    (
        "--master_port",
        TORCH_DISTRIBUTED_DEFAULT_PORT,
        "port the processes meet at; a free one is taken if the default is in use",
    ),
    ("--master_addr", "", "address they meet at; empty is where the nodes reach the first one"),
    ("--node_rank", -1, "position of this node, from 0; with --no_ssh"),
    ("--launcher", PDSH_LAUNCHER, f"engine for several nodes: {_ENGINES}"),
    ("--launcher_args", "", "flags for the engine, as one quoted argument"),
    ("--no_ssh", False, "launch this node's part only; run it on each node"),
    ("--no_ssh_check", False, "do not try ssh to each host first"),
    ("--force_multi", False, "use the engine also for one host"),
    ("--ssh_port", int, "port of ssh on the nodes"),
    ("--venv_script", None, "script to source on the nodes; its `python` is used"),
)
_PROCESS_FLAGS: Flags = (
    ("--module", False, "run the script as `python -m`"),
    ("--no_python", False, "run the script without `python` before it"),
    ("--no_local_rank", False, "do not pass --local_rank=N to the script"),
    (
        "--save_pid",
        False,
        f"keep this command's process id in {PID_FILE_BASEPATH}/<process id>.ds while it runs",
    ),
)


class _StoreGiven(argparse.Action):
    """Stores a value and that it was given, which a default equal to it would hide."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, values)
        setattr(namespace, f"{self.dest}_given", True)


def parse_args(args: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line of `deepspeed`; `args` defaults to the process's own."""
    parser = argparse.ArgumentParser(
        prog="deepspeed",
        description=(
            "Start distributed training processes on one or several machines and answer for them: "
            "output prefixed by rank, the exit code and traceback of the rank that failed first, "
            "and no process left at the end."
        ),
        epilog="Ctrl-C ends all processes, a second one kills them. Plain torchrun works as well.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.set_defaults(master_port_given=False, hostfile_given=False)
    add_flags(parser.add_argument_group("processes and devices"), _RESOURCE_FLAGS, _StoreGiven)
    add_flags(parser.add_argument_group("nodes"), _NODE_FLAGS, _StoreGiven)
    group = parser.add_argument_group("how the script is run")
    add_flags(group, _PROCESS_FLAGS)
    text = "write each rank's output to a file in this folder"
    group.add_argument("--enable_each_rank_log", metavar="DIR", help=text)
    text = "refused: not part of this project"
    group.add_argument("--autotuning", default="", choices=["tune", "run"], help=text)
    add_log_flags(group, "level of the launcher's own log")
    parser.add_argument("user_script", help="script to launch, followed by its arguments")
    parser.add_argument("user_args", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser.parse_args(args)


def encode_world_info(world_info: dict[str, list[int]]) -> str:
    """Return `{host: slots}` as URL-safe base64 of JSON, the form in which `launch` takes it."""
    return base64.urlsafe_b64encode(json.dumps(world_info).encode()).decode()


def check_exclusive(args: argparse.Namespace) -> None:
    """Refuse options that exclude each other; ValueError names them."""
    limited = args.num_gpus != -1 or args.num_nodes != "-1"
    if limited and (args.include or args.exclude):
        raise ValueError(
            "Cannot specify num_nodes/gpus with include/exclude; --include already says which and "
            "how many"
        )
    check_filters(args.include, args.exclude)
    check_script_kind(args.module, args.no_python)


def choose_resources(args: argparse.Namespace) -> dict[str, list[int]]:
    """Return the slots to start one process each for, by host: without a hostfile this machine's.

    On the CPU, --include and --num_gpus are taken at their word, and without them there is one
    process. --no_ssh --num_nodes N without a hostfile means N nodes like this one.
    """
    check_exclusive(args)
    num_nodes = parse_num_nodes(args.num_nodes, False)[0]
    for name, number, what in (
        ("num_gpus", args.num_gpus, "devices"),
        ("num_nodes", num_nodes, "hosts of the hostfile"),
    ):
        if number == 0 or number < -1:
            remedy = f"give a positive number, or -1 for all {what}"
            raise ValueError(f"--{name}={getattr(args, name)}: {remedy}")
    chosen = parse_resource_filter(_available(args, num_nodes), args.include, args.exclude)
    if num_nodes > len(chosen):
        raise ValueError(
            f"--num_nodes={args.num_nodes}: only {', '.join(chosen)} is there; name more hosts in "
            "--hostfile, or ask for fewer"
        )
    chosen = dict(list(chosen.items())[: num_nodes if num_nodes != -1 else None])
    if not chosen:
        raise ValueError(f"--exclude={args.exclude}: no slot is left; exclude fewer")
    for host, slots in chosen.items():
        if args.num_gpus > len(slots):
            text = f"only {len(slots)} slots are there on {host}; ask for at most as many"
            raise ValueError(f"--num_gpus={args.num_gpus}: {text}")
    end = args.num_gpus if args.num_gpus != -1 else None
    return {host: slots[:end] for host, slots in chosen.items()}


def _available(args: argparse.Namespace, num_nodes: int) -> dict[str, list[int]]:
    pool = fetch_hostfile(args.hostfile)
    if pool is not None:
        return {host: list(range(count)) for host, count in pool.items()}
    if args.hostfile_given and args.hostfile not in _NO_HOSTFILE:
        remedy = "correct the path or leave the flag out"
        raise ValueError(f"--hostfile={args.hostfile}: there is no such file; {remedy}")
    if args.no_ssh and num_nodes > 1:
        return {f"node-{node_rank}": _local_slots(args) for node_rank in range(num_nodes)}
    return {"localhost": _local_slots(args)}


def _local_slots(args: argparse.Namespace) -> list[int]:
    """Return this machine's devices, or on the CPU as many slots as the flags speak of."""
    devices = list(visible_slots())
    if devices:
        return devices
    named = [int(slot) for slot in re.findall(r"(?<=[:,])\d+", args.include or args.exclude)]
    return list(range(max(args.num_gpus, max(named, default=0) + 1)))


def is_local(host: str) -> bool:
    """Say whether a hostfile's name means this machine."""
    return host in ("localhost", LOCAL_MASTER_ADDR, socket.gethostname(), socket.getfqdn())


def main(args: list[str] | None = None) -> None:
    """Run the `deepspeed` command; exits with a failed rank's code, 2 for a user's mistake, 0.

    ValueError for options that exclude each other in `args`, which are a program's.
    """
    parsed = parse_args(args)
    if args is not None:
        check_exclusive(parsed)
    answer(parsed, lambda: launch(parsed))


def launch(args: argparse.Namespace) -> int:
    """Launch as the flags say, here, over an engine, or by hand; return the exit code."""
    if args.autotuning:
        remedy = "autotuning is not part of this project; leave the flag out"
        raise ValueError(f"--autotuning={args.autotuning}: {remedy}")
    elastic = read_elastic(args)
    active = choose_resources(args)
    if elastic is not None:
        return _launch_elastic(args, active, elastic)
    hosts = list(active)
    if len(hosts) == 1 and not args.force_multi and is_local(hosts[0]):
        plan = make_plan(args, active[hosts[0]])
        logger.info("starting %d processes: %s", plan.num_ranks, " ".join(plan.command))
        return run(plan)
    # startup: needed for several nodes only
    from deepspeed.launcher.nodes import run_by_hand, run_nodes

    world_info = encode_world_info(active)
    number = args.node_rank
    if args.no_ssh:
        _refuse_engine_flags(args, "--no_ssh uses no engine; leave the flag out")
        if not 0 <= number < len(hosts):
            text = f"--no_ssh needs this node's position among {', '.join(hosts)}, from 0"
            raise ValueError(f"--node_rank={number}: {text}")
        return run_by_hand(args, make_plan(args, active[hosts[number]]), active, world_info)
    if number != -1:
        remedy = "leave the flag out, or add --no_ssh"
        raise ValueError(f"--node_rank={number}: the engine numbers the nodes; {remedy}")
    return run_nodes(args, active, world_info, EXPORT_ENVS)


def read_elastic(args: argparse.Namespace) -> Elastic | None:
    """Return the limits of an elastic job, None where none is asked for; spends `MIN:MAX` nodes."""
    limits = (args.min_elastic_nodes, args.max_elastic_nodes)
    if not args.elastic_training:
        for name, value in zip(("min_elastic_nodes", "max_elastic_nodes"), limits, strict=True):
            if value != -1:
                remedy = "has no effect alone; add --elastic_training"
                raise ValueError(f"--{name}={value} {remedy}")
        return None
    fewest, most = parse_num_nodes(args.num_nodes, True)
    args.num_nodes = "-1"
    chosen = [flag if flag != -1 else end for flag, end in zip(limits, (fewest, most), strict=True)]
    return elastic_of(chosen[0], chosen[1], 1)


def _launch_elastic(
    args: argparse.Namespace, active: dict[str, list[int]], elastic: Elastic
) -> int:
    """Run this node's part of an elastic job. Nodes come and go, so each is started by itself."""
    if len(active) > 1:
        raise ValueError(
            f"--elastic_training with the hosts {', '.join(active)}: nodes of an elastic job come "
            "and go; run this command on each of them, without a hostfile, and with --master_addr"
        )
    if elastic.max_nodes > 1 and not args.master_addr:
        text = "needs --master_addr, the address of a node that stays"
        raise ValueError(f"--max_elastic_nodes={elastic.max_nodes} {text}")
    (slots,) = active.values()
    plan = replace(make_plan(args, slots), elastic=elastic)
    words = " ".join(plan.command)
    logger.info("joining an elastic job with %d processes: %s", plan.num_ranks, words)
    return run(plan)


def _refuse_engine_flags(args: argparse.Namespace, remedy: str) -> None:
    for name, neutral in _ENGINE_FLAGS:
        if getattr(args, name) != neutral:
            raise ValueError(f"--{name}={getattr(args, name)}: {remedy}")


def make_plan(args: argparse.Namespace, slots: list[int]) -> LaunchPlan:
    """Turn parsed flags into what `launch.run` starts on this machine."""
    if not args.no_ssh:
        remedy = "leave the flag out, or add --force_multi"
        _refuse_engine_flags(args, f"a launch on this machine alone uses no engine; {remedy}")
        if args.node_rank > 0:
            text = "this machine is the only node; leave the flag out"
            raise ValueError(f"--node_rank={args.node_rank}: {text}")
    command, local_rank_index = build_command(
        args.user_script, args.user_args, args.module, args.no_python
    )
    return LaunchPlan(
        command=command,
        num_ranks=len(slots),
        pass_local_rank=not args.no_local_rank,
        local_rank_index=local_rank_index,
        master_addr=args.master_addr or LOCAL_MASTER_ADDR,
        master_port=args.master_port if args.master_port_given else None,
        environment=device_environment(slots),
        cores=bound_cores(args.bind_cores_to_rank, args.bind_core_list, len(slots)),
        log_dir=args.enable_each_rank_log,
        save_pid=os.getpid() if args.save_pid else None,
    )


if __name__ == "__main__":
    main()

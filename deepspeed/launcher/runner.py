"""The `deepspeed` command: from the command line to a running, supervised set of processes on this machine.

Owns: upstream's flags, the choice of slots from them, and the refusal of what this release cannot do. Does not own:
the hostfile and filter language (`resources`) nor the processes (`launch`). The launch runs in this process: no
second interpreter starts up first.
"""

import argparse
import base64
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

from deepspeed.launcher.constants import (
    DEEPSPEED_ENVIRONMENT_NAME,
    DEEPSPEED_ENVIRONMENT_PATHS,
    DLTS_HOSTFILE,
    IMPI_LAUNCHER,
    LOCAL_MASTER_ADDR,
    MPICH_LAUNCHER,
    MVAPICH_LAUNCHER,
    OPENMPI_LAUNCHER,
    PDSH_LAUNCHER,
    PID_FILE_BASEPATH,
    SLURM_LAUNCHER,
    TORCH_DISTRIBUTED_DEFAULT_PORT,
)
from deepspeed.launcher.devices import device_environment, visible_slots
from deepspeed.launcher.launch import LaunchPlan, bound_cores, build_command, run
from deepspeed.launcher.resources import (
    fetch_hostfile,
    parse_inclusion_exclusion,
    parse_node_config,
    parse_node_config_list,
    parse_num_nodes,
    parse_resource_filter,
)
from deepspeed.utils.logging import get_log_level_from_string, logger

__all__ = [
    "DEEPSPEED_ENVIRONMENT_NAME",
    "DEEPSPEED_ENVIRONMENT_PATHS",
    "DLTS_HOSTFILE",
    "IMPI_LAUNCHER",
    "MPICH_LAUNCHER",
    "MVAPICH_LAUNCHER",
    "OPENMPI_LAUNCHER",
    "PDSH_LAUNCHER",
    "SLURM_LAUNCHER",
    "TORCH_DISTRIBUTED_DEFAULT_PORT",
    "encode_world_info",
    "fetch_hostfile",
    "main",
    "parse_args",
    "parse_inclusion_exclusion",
    "parse_node_config",
    "parse_node_config_list",
    "parse_num_nodes",
    "parse_resource_filter",
]

_LATER = "comes in a later release"
_NODE_FLAGS_REMEDY = f"launching over several nodes {_LATER}; until then run `torchrun` on each node"
_REFUSED: tuple[tuple[str, Any, str], ...] = (
    ("min_elastic_nodes", -1, f"elastic training {_LATER}; leave the flag out"),
    ("max_elastic_nodes", -1, f"elastic training {_LATER}; leave the flag out"),
    ("elastic_training", False, f"elastic training {_LATER}; leave the flag out"),
    ("autotuning", "", "autotuning is not part of this project; leave the flag out"),
    ("launcher_args", "", _NODE_FLAGS_REMEDY),
    ("force_multi", False, _NODE_FLAGS_REMEDY),
    ("ssh_port", None, _NODE_FLAGS_REMEDY),
    ("venv_script", None, f"{_NODE_FLAGS_REMEDY}, or activate the environment before this command"),
)
"""Flags that this release refuses: name, the value that asks for nothing, what to do instead."""


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
        description="Start distributed training processes on this machine and answer for them: output prefixed by "
        "rank, the exit code and traceback of the rank that failed first, and no process left at the end.",
        epilog="Ctrl-C ends all processes, a second one kills them. Plain torchrun works as well.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.set_defaults(master_port_given=False, hostfile_given=False)
    _add_resource_flags(parser)
    _add_node_flags(parser)
    _add_process_flags(parser)
    parser.add_argument("user_script", help="script to launch, followed by its arguments")
    parser.add_argument("user_args", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser.parse_args(args)


def _add_resource_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("processes and devices")
    group.add_argument(
        "-H",
        "--hostfile",
        default=DLTS_HOSTFILE,
        action=_StoreGiven,
        help="MPI-style file of `<host> slots=<n>` lines",
    )
    group.add_argument(
        "-i",
        "--include",
        default="",
        help="slots to use, as NAME[:SLOT[,SLOT ...]] joined by @, e.g. localhost:0,2; a slot is a device's number",
    )
    group.add_argument("-e", "--exclude", default="", help="slots not to use, in the same form; not with --include")
    group.add_argument(
        "--num_gpus",
        "--num_accelerators",
        type=int,
        default=-1,
        help="number of processes: the first N devices, or N processes on the CPU; -1 is all devices, or one process on the CPU",
    )
    group.add_argument("--bind_cores_to_rank", action="store_true", help="bind each rank to cores of its own")
    group.add_argument("--bind_core_list", default=None, help="cores to deal to the ranks, e.g. 1,3-5,7; default all available")


def _add_node_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("nodes (this release launches on one)")
    group.add_argument("--num_nodes", default="-1", help="number of nodes; 1, or -1 for as many as the hostfile leaves")
    group.add_argument("--min_elastic_nodes", type=int, default=-1, help="refused in this release")
    group.add_argument("--max_elastic_nodes", type=int, default=-1, help="refused in this release")
    group.add_argument("--elastic_training", action="store_true", help="refused in this release")
    group.add_argument(
        "--master_port",
        type=int,
        default=TORCH_DISTRIBUTED_DEFAULT_PORT,
        action=_StoreGiven,
        help="port the processes meet at; a free one is taken if the default is in use",
    )
    group.add_argument("--master_addr", default="", help=f"address they meet at; empty is {LOCAL_MASTER_ADDR}")
    group.add_argument("--node_rank", type=int, default=-1, help="rank of this node; 0 on one node")
    group.add_argument("--launcher", default=PDSH_LAUNCHER, help="backend for several nodes; no other in this release")
    group.add_argument("--launcher_args", default="", help="refused in this release")
    group.add_argument("--no_ssh", action="store_true", help="launch without ssh, as this release always does")
    group.add_argument("--no_ssh_check", action="store_true", help="do not try ssh first, as this release never does")
    group.add_argument("--force_multi", action="store_true", help="refused in this release")
    group.add_argument("--ssh_port", type=int, default=None, help="refused in this release")
    group.add_argument("--venv_script", default=None, help="refused in this release")


def _add_process_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how the script is run")
    group.add_argument("--module", action="store_true", help="run the script as `python -m`")
    group.add_argument("--no_python", action="store_true", help="run the script without `python` before it")
    group.add_argument("--no_local_rank", action="store_true", help="do not pass --local_rank=N to the script")
    group.add_argument(
        "--save_pid",
        action="store_true",
        help=f"keep this command's process id in {PID_FILE_BASEPATH}/<process id>.ds while it runs",
    )
    group.add_argument(
        "--enable_each_rank_log", default=None, metavar="DIR", help="write each rank's output to a file in this folder"
    )
    group.add_argument("--autotuning", default="", choices=["tune", "run"], help="refused: not part of this project")
    group.add_argument(
        "--log_level",
        default="info",
        choices=["debug", "info", "warning", "error", "critical"],
        help="level of the launcher's own log",
    )
    group.add_argument("-q", "--quiet", action="store_true", help="same as --log_level error")


def encode_world_info(world_info: dict[str, list[int]]) -> str:
    """Return `{host: slots}` as URL-safe base64 of JSON, the form in which `launch` takes it."""
    return base64.urlsafe_b64encode(json.dumps(world_info).encode()).decode()


def refuse_unsupported(args: argparse.Namespace) -> None:
    """Refuse what this release cannot do.

    Raises:
        ValueError: a flag asks for several nodes, elastic training or autotuning; the text names it and its value.
    """
    for name, neutral, remedy in _REFUSED:
        if getattr(args, name) != neutral:
            raise ValueError(f"--{name}={getattr(args, name)}: {remedy}")
    if args.launcher.lower() != PDSH_LAUNCHER:
        raise ValueError(f"--launcher={args.launcher}: {_NODE_FLAGS_REMEDY}")
    if args.node_rank > 0:
        raise ValueError(f"--node_rank={args.node_rank}: {_NODE_FLAGS_REMEDY}")
    if parse_num_nodes(args.num_nodes, False)[0] not in (-1, 1):
        raise ValueError(f"--num_nodes={args.num_nodes}: {_NODE_FLAGS_REMEDY}")


def choose_slots(args: argparse.Namespace) -> list[int]:
    """Return the local slots to start one process each for.

    Without a hostfile they come from this machine's devices; on the CPU, --include and --num_gpus are taken at their
    word, and without them there is one process, as for a plain `python` run.

    Raises:
        ValueError: flags contradict each other, or name hosts or slots that are not there.
    """
    limited = args.num_gpus != -1 or args.num_nodes != "-1"
    if limited and (args.include or args.exclude):
        raise ValueError("Cannot specify num_nodes/gpus with include/exclude; --include already says which and how many")
    if args.num_gpus == 0 or args.num_gpus < -1:
        raise ValueError(f"--num_gpus={args.num_gpus}: give a positive number, or -1 for all devices")
    pool = fetch_hostfile(args.hostfile)
    if pool is None and args.hostfile_given:
        raise ValueError(f"--hostfile={args.hostfile}: there is no such file; correct the path or leave the flag out")
    available = {host: list(range(count)) for host, count in pool.items()} if pool else {"localhost": _local_slots(args)}
    chosen = parse_resource_filter(available, args.include, args.exclude)
    if args.num_nodes != "-1":
        chosen = dict(list(chosen.items())[:1])
    if not chosen:
        raise ValueError(f"--exclude={args.exclude}: no slot is left; exclude fewer")
    foreign = [host for host in chosen if not is_local(host)]
    if foreign or len(chosen) > 1:
        raise ValueError(f"--hostfile={args.hostfile} with hosts {', '.join(chosen)}: {_NODE_FLAGS_REMEDY}")
    (slots,) = chosen.values()
    if args.num_gpus > len(slots):
        raise ValueError(f"--num_gpus={args.num_gpus}: only {len(slots)} slots are there; ask for at most as many")
    return slots[: args.num_gpus] if args.num_gpus != -1 else slots


def _local_slots(args: argparse.Namespace) -> list[int]:
    """Return this machine's slots: its devices, or on the CPU just as many as the flags speak of."""
    devices = list(visible_slots())
    if devices:
        return devices
    named = [int(slot) for slot in re.findall(r"(?<=[:,])\d+", args.include or args.exclude)]
    return list(range(max(args.num_gpus, max(named, default=0) + 1)))


def is_local(host: str) -> bool:
    """Say whether a hostfile's name means this machine."""
    return host in ("localhost", LOCAL_MASTER_ADDR, socket.gethostname(), socket.getfqdn())


def main(args: list[str] | None = None) -> None:
    """Run the `deepspeed` command; exits with the code of the first rank that failed, or 0.

    User mistakes end with one line on stderr and exit code 2, not with this program's traceback.
    """
    parsed = parse_args(args)
    logger.setLevel(get_log_level_from_string("error" if parsed.quiet else parsed.log_level))
    try:
        plan = make_plan(parsed)
        logger.info("starting %d processes: %s", plan.num_ranks, " ".join(plan.command))
        code = run(plan)
    except (ValueError, RuntimeError) as error:
        sys.stderr.write(f"deepspeed: error: {error}\n")
        code = 2
    except KeyboardInterrupt:
        # Before the processes are there; afterwards `run` answers for it.
        code = 128 + int(signal.SIGINT)
    sys.exit(code)


def make_plan(args: argparse.Namespace) -> LaunchPlan:
    """Turn parsed flags into what `launch.run` starts.

    Raises:
        ValueError: the flags ask for something this release, this machine or their combination does not allow.
        RuntimeError: --num_nodes has a malformed range.
    """
    refuse_unsupported(args)
    slots = choose_slots(args)
    command, local_rank_index = build_command(args.user_script, args.user_args, args.module, args.no_python)
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

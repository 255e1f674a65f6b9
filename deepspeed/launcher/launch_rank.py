"""One process of a job whose engine (MPI, Slurm) starts every process itself, by `python -m`.

The process inherits the engine's variables and open descriptors, so that the user's script can be
an MPI process. torch is not imported without need: there is one of these per process.
"""

from deepspeed.launcher.signals import die_at_once

if __name__ == "__main__":
    die_at_once()

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from deepspeed.launcher import launch
from deepspeed.launcher.agent import WORKER
from deepspeed.launcher.failures import Exit
from deepspeed.launcher.logs import RankLogs
from deepspeed.launcher.plan import LaunchPlan, place_of_rank
from deepspeed.launcher.resources import device_environment
from deepspeed.launcher.signals import Interrupted, raising_signals

TERMINATE_SECONDS = 30.0


def run_directly(plan: LaunchPlan, folder: Path, logs: RankLogs) -> dict[int, Exit]:
    """Run the plan's one process; see `agent.run_with_agent`, in whose place this stands."""
    plan_file = folder / "plan.json"
    plan.write_for_workers(plan_file, logs.control_path)
    with open(logs.stdout_path(0), "wb") as out, open(logs.stderr_path(0), "wb") as err:
        # Descriptors of the engine (MPICH's PMI_FD) go on to the process; Python's own are not
        # inheritable.
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(WORKER), str(plan_file), "0"],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            close_fds=False,
            start_new_session=True,
        )
    with raising_signals():
        try:
            code = process.wait()
        except Interrupted as error:
            _end(process, error.signum)
            raise
    return {0: Exit(process.pid, code)} if code else {}


def _end(process: "subprocess.Popen[bytes]", signum: int) -> None:
    """End the process and its group, at last for good; another signal cuts the grace short."""
    try:
        os.killpg(process.pid, signum)
        process.wait(TERMINATE_SECONDS)
    except (Interrupted, subprocess.TimeoutExpired, ProcessLookupError):
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def end_daemon(name: str | None) -> None:
    """End the engine's daemon on this node, if it is called `name` and started this process.

    Behind a cut network Open MPI's would wait for a quarter of an hour: unsent words of it keep the
    connection from being found dead.
    """
    import psutil  # startup: needed only when a job is lost

    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(os.getppid())
        if parent.name() == name:
            parent.terminate()


def make_rank_plan(args: argparse.Namespace) -> LaunchPlan:
    """Turn one process's parsed flags and the engine's variables into a plan."""
    if args.coordinator is None:
        raise ValueError(
            "--coordinator is missing, where the processes of a job meet; start the job through "
            "the `deepspeed` command"
        )
    world = launch.decode_world_info(args.world_info)
    variables = (args.rank_variable, args.local_rank_variable)
    missing = [name for name in variables if not os.environ.get(name, "").isdigit()]
    if missing:
        names, remedy = ", ".join(missing), "start the job through the `deepspeed` command"
        raise ValueError(f"the engine has not set {names}; {remedy}")
    place = place_of_rank(world, int(os.environ[args.rank_variable]), args.coordinator)
    local_rank = int(os.environ[args.local_rank_variable])
    if local_rank != place.local_rank:
        raise ValueError(
            f"rank {place.first_rank} is local rank {local_rank} on {socket.gethostname()}, and "
            f"should be {place.local_rank}: ranks must fill the hosts one after the other; take "
            "out of --launcher_args what places them otherwise"
        )
    slots = list(world.values())[place.node_rank]
    # The first devices are what a local rank finds without help; looking for others takes torch,
    # once per process.
    environment = {} if slots == list(range(len(slots))) else device_environment(slots)
    plan = launch.node_plan(args, len(slots), environment, place)
    cores = [plan.cores[local_rank]] if plan.cores else []
    # Upstream passes no --local_rank under these engines, and scripts for them do not expect it.
    return replace(plan, num_ranks=1, cores=cores, pass_local_rank=False)


def main() -> None:
    """Start this process as the command line and the engine say, and exit with the job's code."""
    parser = launch.make_parser()
    add = parser.add_argument
    add("--rank_variable", required=True, help="variable that holds the rank")
    add("--local_rank_variable", required=True, help="variable that holds the local rank")
    add("--daemon", help="name of the engine's daemon that has to be ended with a lost job")
    args = parser.parse_args()
    begin = partial(launch.run, start=run_directly, on_lost=lambda: end_daemon(args.daemon))
    rank = int(os.environ.get(args.rank_variable, "0"))
    told = partial(launch.run_told, args.coordinator, rank, lambda: begin(make_rank_plan(args)))
    launch.answer(args, told)


if __name__ == "__main__":
    main()

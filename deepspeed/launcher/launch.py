"""Running one launcher's processes and answering for their end, alone or as a part of a job.

Owns the order of things from the pipes to the exit code, and that no process survives a failed
launch. `runner` calls it in its own process, engines by `python -m deepspeed.launcher.launch`.
"""

from deepspeed.launcher.signals import die_at_once

if __name__ == "__main__":
    die_at_once()

import argparse
import base64
import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from deepspeed.launcher.agent import run_with_agent
from deepspeed.launcher.constants import LOCAL_MASTER_ADDR, PID_FILE_BASEPATH
from deepspeed.launcher.failures import (
    Exit,
    Failure,
    describe_exit,
    failed_before,
    make_failure,
    write_failures,
)
from deepspeed.launcher.job.client import CoordinatorClient
from deepspeed.launcher.job.coordinator import CoordinatorAddress, Verdict
from deepspeed.launcher.logs import RankLogs
from deepspeed.launcher.plan import (
    LaunchPlan,
    Place,
    bound_cores,
    build_command,
    elastic_of,
    place_of_node,
    usable_port,
)
from deepspeed.launcher.process_tree import children_ended, terminate_process_tree
from deepspeed.launcher.resources import device_environment
from deepspeed.launcher.signals import (
    Interrupted,
    dying_at_once,
    noting_signals,
    raising_signals,
    take_noted,
)
from deepspeed.utils.logging import get_log_level_from_string, logger

__all__ = ["LaunchPlan", "decode_world_info", "main", "parse_args", "run", "terminate_process_tree"]

Flags = tuple[tuple[str, object, str], ...]
"""Of each flag its names, the default, and its text."""
Start = Callable[[LaunchPlan, Path, RankLogs], dict[int, Exit]]
"""Runs a plan's processes, as `agent.run_with_agent` describes it."""


@dataclass(frozen=True)
class Outcome:
    """How one launcher's processes ended: well, with a failure, or by a signal to the launcher."""

    failure: Failure | None = None
    interruption: Interrupted | None = None


def run(
    plan: LaunchPlan, start: Start | None = None, on_lost: Callable[[], None] = lambda: None
) -> int:
    """Start the processes and wait for them, and for those of the other launchers of the job.

    Returns 0, or the exit code of the rank that failed first (128 + n for signal n), whose
    traceback has then been written to stderr, last, by the command that the user started; or 128 +
    n when signal n ended this process. `on_lost` is called when the other launchers are out of
    reach and the processes have ended. Raises RuntimeError if the plan's port is in use,
    ConnectionError if the other launchers cannot be reached.
    """
    with noting_signals(), pid_file(plan.save_pid), children_ended() as success:
        if plan.place:
            code = _run_member(plan, plan.place, start, on_lost)
        else:
            code = _run_alone(plan, start)
        success[0] = code == 0
        return code


def _run_alone(plan: LaunchPlan, start: Start | None) -> int:
    outcome = _run_ranks(plan, start)
    if outcome.failure is not None:
        write_failures([("", outcome.failure)])
        return outcome.failure.code
    return 128 + outcome.interruption.signum if outcome.interruption is not None else 0


class _Stopper:
    """Lets another thread interrupt the main thread, but only while that runs processes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = False

    def __enter__(self) -> "_Stopper":
        with self._lock:
            self._running = True
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._running = False

    def stop(self, signum: int | None) -> None:
        """Interrupt the main thread; None is for a job that is lost."""
        with self._lock:
            if self._running:
                os.kill(os.getpid(), signum if signum is not None else signal.SIGTERM)


def _run_member(
    plan: LaunchPlan, place: Place, start: Start | None, on_lost: Callable[[], None]
) -> int:
    """Run this launcher's processes once all launchers have come, and end them with the job."""
    port = usable_port(plan.master_port) if place.first_rank == 0 else 0
    stopper, address = _Stopper(), CoordinatorAddress.decode(place.coordinator)
    client = CoordinatorClient(address, place.member, port, stopper.stop)
    try:
        with contextlib.ExitStack() as stack:
            with raising_signals():
                stack.enter_context(client)
            client.report_end(_run_between(plan, start, client, stopper))
            with raising_signals():
                verdict = client.wait()
    except Interrupted as error:
        # Before all had come, or after this launcher's part was done: its connection says the rest.
        return 128 + error.signum
    if place.reports or client.lost:
        write_verdict(verdict)
    if client.lost:
        on_lost()
    return verdict.code


def _run_between(
    plan: LaunchPlan, start: Start | None, client: CoordinatorClient, stopper: _Stopper
) -> Failure | None:
    """Run the processes between the job's go and its stop; return how they failed, if they did."""
    with raising_signals():
        master = client.join()
    if master is None:
        return None
    address, port = master
    # Settings of the user come after and win.
    environment = {**client.interface_environment(), **plan.environment}
    plan = replace(plan, master_addr=address, master_port=port, environment=environment)
    with stopper:
        outcome = _run_ranks(plan, start, lambda: client.stopped_at)
    if client.stopped_at is not None:
        # A stop that arrived when the processes had just ended by themselves.
        take_noted()
    interruption = outcome.interruption
    if interruption is not None and client.stopped_at is None:
        return Failure(
            f"the launcher on {socket.gethostname()} (process {os.getpid()})",
            describe_exit(-interruption.signum),
            128 + interruption.signum,
            # Its processes have been ended since, and those of other nodes have noticed.
            age=time.monotonic() - interruption.at,
        )
    return outcome.failure


def write_verdict(verdict: Verdict) -> None:
    """Write how a job of several launchers failed; nothing if it did not."""
    if verdict.failures:
        # The one who would read it may be gone: the job's command, or the connection that started
        # this launcher.
        with contextlib.suppress(OSError):
            write_failures(verdict.failures)


def _run_ranks(
    plan: LaunchPlan, start: Start | None, stopped_at: Callable[[], float | None] = lambda: None
) -> Outcome:
    """Run the processes, their output piped through this one, until `stopped_at`."""
    ranks = [plan.first_rank + index for index in range(plan.num_ranks)]
    folder = Path(tempfile.mkdtemp(prefix="deepspeed_"))
    try:
        logs = RankLogs(folder, ranks, plan.log_dir, plan.log_start)
        logs.start()
        try:
            exits = (start or run_with_agent)(plan, folder, logs)
        except Interrupted as error:
            logs.stop()
            moment = stopped_at()
            if moment is None:
                return Outcome(None, error)
            return Outcome(failed_before(moment, logs.history, logs.first_rank), error)
        finally:
            logs.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Outcome(make_failure(exits, logs.history, logs.first_rank) if exits else None)


@contextlib.contextmanager
def pid_file(main_pid: int | None) -> Iterator[None]:
    """Keep this process's id in a file while it runs; None is for no file."""
    if main_pid is None:
        yield
        return
    path = Path(PID_FILE_BASEPATH) / f"{main_pid}.ds"
    path.write_text(f"{os.getpid()}\n", encoding="ascii")
    logger.info("launcher process id %d is kept in %s", os.getpid(), path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def parse_args(args: list[str] | None = None) -> argparse.Namespace:
    """Parse this node's command line; `args` defaults to the process's own."""
    return make_parser().parse_args(args)


FLAGS: Flags = (
    ("--node_rank", 0, "rank of this node"),
    ("--master_addr", LOCAL_MASTER_ADDR, "address the processes meet at"),
    ("--master_port", int, "port they meet at"),
    ("--world_info", "None", "base64 of the JSON object {host: slots}"),
    ("--coordinator", None, "where the nodes of a job meet; the `deepspeed` command fills it in"),
    ("--module", False, "run the script as `python -m`"),
    ("--no_python", False, "run the script without `python` before it"),
    ("--enable_elastic_training", False, "restart the processes when one fails or a node comes"),
    ("--min_elastic_nodes", -1, "fewest nodes to run with"),
    ("--max_elastic_nodes", -1, "most nodes to run with"),
    ("--no_local_rank", False, "do not pass --local_rank to the script"),
    ("--save_pid", 0, "id of the file that keeps the launcher's process id"),
    ("--enable_each_rank_log", "None", "folder of one log file per rank"),
    ("--bind_cores_to_rank", False, "bind each rank to cores of its own"),
    ("--bind_core_list", None, "cores to bind to, e.g. 1,3-5,7"),
)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of one launcher's command line."""
    parser = argparse.ArgumentParser(
        description="Start the training processes of one node. `deepspeed` is the users' command.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_flags(parser, FLAGS)
    add_log_flags(parser)
    parser.add_argument("training_script", help="the script, followed by its arguments")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    return parser


def add_flags(
    parser: argparse._ActionsContainer, flags: Flags, store: str | type[argparse.Action] = "store"
) -> None:
    """Add flags, whose values have the default's type; False is a switch, `int` none yet."""
    for names, default, text in flags:
        if default is False:
            parser.add_argument(*names.split(), action="store_true", help=text)
            continue
        kind = int if default is int or isinstance(default, int) else str
        default = None if default is int else default
        parser.add_argument(*names.split(), action=store, type=kind, default=default, help=text)


def add_log_flags(parser: argparse._ActionsContainer, text: str | None = None) -> None:
    """Add the flags of the launcher's own log, which `answer` heeds."""
    levels = ["debug", "info", "warning", "error", "critical"]
    parser.add_argument("--log_level", default="info", choices=levels, help=text)
    parser.add_argument("-q", "--quiet", action="store_true", help="same as --log_level error")


def decode_world_info(world_info: str) -> dict[str, list[int]]:
    """Decode what `runner.encode_world_info` made."""
    try:
        decoded = json.loads(base64.urlsafe_b64decode(world_info))
    except ValueError as error:
        text = "not the base64 of a JSON object {host: slots}"
        raise ValueError(f"--world_info={world_info}: {text}") from error
    if not isinstance(decoded, dict):
        text = f"decodes to {decoded!r}, not to {{host: slots}}"
        raise ValueError(f"--world_info={world_info}: {text}")
    return decoded


def main() -> None:
    """Start this node's processes as the command line says, and exit with their code."""
    args = parse_args()
    where = (args.coordinator, args.node_rank)
    answer(args, lambda: run_told(*where, lambda: run(make_node_plan(args))))


def run_told(coordinator: str | None, member: int, launch: Callable[[], int]) -> int:
    """Run a launch, and tell the job, which would wait for it, when it cannot begin."""
    try:
        return launch()
    except (ValueError, RuntimeError) as error:
        if coordinator is not None:
            subject = f"the launcher on {socket.gethostname()}"
            _tell(coordinator, member, Failure(subject, f"an error: {error}", 2))
        raise


def answer(args: argparse.Namespace, launch: Callable[[], int]) -> NoReturn:
    """Exit with the launch's code; a mistake of the user is one line on stderr and code 2."""
    logger.setLevel(get_log_level_from_string("error" if args.quiet else args.log_level))
    try:
        with dying_at_once():
            code = launch()
    except (ValueError, RuntimeError, ConnectionError) as error:
        sys.stderr.write(f"deepspeed: error: {error}\n")
        code = 2
    sys.exit(code)


def _tell(coordinator: str, member: int, failure: Failure) -> None:
    # Without a coordinator that answers there is nobody to tell.
    with contextlib.suppress(OSError, ValueError):
        address = CoordinatorAddress.decode(coordinator)
        with CoordinatorClient(address, member, 0, lambda signum: None) as client:
            client.report_end(failure)


def make_node_plan(args: argparse.Namespace) -> LaunchPlan:
    """Turn one node's parsed flags into a plan."""
    world, place, elastic = decode_world_info(args.world_info), None, None
    if args.enable_elastic_training:
        elastic = elastic_of(args.min_elastic_nodes, args.max_elastic_nodes, len(world))
    if args.coordinator is not None and elastic:
        text = "elastic nodes meet without --coordinator; leave one of them out"
        raise ValueError(f"--enable_elastic_training: {text}")
    if args.coordinator is not None:
        place = place_of_node(world, args.node_rank, args.coordinator)
    elif elastic is None and (len(world) != 1 or args.node_rank != 0):
        raise ValueError(
            f"--node_rank={args.node_rank} of the {len(world)} hosts in --world_info needs "
            "--coordinator, where the nodes of a job meet; start the job through the `deepspeed` "
            "command"
        )
    slots = list(world.values())[args.node_rank]
    return replace(node_plan(args, len(slots), device_environment(slots), place), elastic=elastic)


def node_plan(
    args: argparse.Namespace, num_ranks: int, environment: dict[str, str], place: Place | None
) -> LaunchPlan:
    """Return the plan of one node, from the flags that `launch` and `launch_rank` share."""
    command, index = build_command(
        args.training_script, args.training_script_args, args.module, args.no_python
    )
    return LaunchPlan(
        command=command,
        num_ranks=num_ranks,
        pass_local_rank=not args.no_local_rank,
        local_rank_index=index,
        master_addr=args.master_addr,
        master_port=args.master_port,
        environment=environment,
        cores=bound_cores(args.bind_cores_to_rank, args.bind_core_list, num_ranks),
        log_dir=None if args.enable_each_rank_log == "None" else args.enable_each_rank_log,
        save_pid=args.save_pid or None,
        place=place,
    )


if __name__ == "__main__":
    main()

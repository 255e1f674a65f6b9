"""Running one node's processes on torch.distributed.elastic and answering for their end.

Owns: the environment and command of each process, the agent's set-up, which failure is reported, and that no process
survives a failed launch. Does not own: the choice of devices (`runner`, `resources`) nor log reading (`logs`).
Called by: `deepspeed.launcher.runner.main` in its own process, or as `python -m deepspeed.launcher.launch`.
"""

import argparse
import base64
import contextlib
import ctypes
import json
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepspeed.launcher.constants import LOCAL_MASTER_ADDR, PID_FILE_BASEPATH, TORCH_DISTRIBUTED_DEFAULT_PORT
from deepspeed.launcher.devices import device_environment
from deepspeed.launcher.resources import parse_core_list, split_cores
from deepspeed.utils.logging import get_log_level_from_string, logger

if TYPE_CHECKING:
    from deepspeed.launcher.logs import RankHistory, RankLogs

PR_SET_CHILD_SUBREAPER = 36
PORT_ATTEMPTS = 5
TRACEBACK_WINDOW_SECONDS = 10.0
KILL_WAIT_SECONDS = 5.0


@dataclass(frozen=True)
class LaunchPlan:
    """What to start on this node.

    Attributes:
        command: the program and its arguments, without --local_rank.
        num_ranks: number of processes.
        pass_local_rank: add `--local_rank=<n>` behind the program (upstream's habit).
        local_rank_index: position in `command` at which that argument goes.
        master_addr: address of the store that the processes meet at.
        master_port: its port; 0 takes a free one, None takes 29500 or a free one when that is in use.
        environment: variables for every process, over the launcher's own.
        cores: one core list per rank to bind it to; empty for no binding.
        log_dir: folder of one log file per rank, instead of prefixed lines on the launcher's output.
        save_pid: id under which a file with the launcher's process id is kept while it runs; None for no file.
    """

    command: list[str]
    num_ranks: int
    pass_local_rank: bool = True
    local_rank_index: int = 1
    master_addr: str = LOCAL_MASTER_ADDR
    master_port: int | None = None
    environment: dict[str, str] = field(default_factory=dict)
    cores: list[list[int]] = field(default_factory=list)
    log_dir: str | None = None
    save_pid: int | None = None

    def rank_command(self, local_rank: int) -> list[str]:
        """Return the command of one process."""
        if not self.pass_local_rank:
            return self.command
        head, tail = self.command[: self.local_rank_index], self.command[self.local_rank_index :]
        return [*head, f"--local_rank={local_rank}", *tail]

    def rank_environment(self, local_rank: int) -> dict[str, str]:
        """Return the variables of one process that the agent does not set itself."""
        bound = self.cores[local_rank] if self.cores else None
        threads = len(bound) if bound else max(1, num_available_cores() // self.num_ranks)
        return {
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
            "LOCAL_SIZE": str(self.num_ranks),
            "CROSS_RANK": "0",
            "CROSS_SIZE": "1",
            **self.environment,
        }


def num_available_cores() -> int:
    """Return how many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def build_command(script: str, script_args: list[str], module: bool, no_python: bool) -> tuple[list[str], int]:
    """Return the command that runs a user's script, and where in it --local_rank goes (right behind the script).

    Raises:
        ValueError: both `module` and `no_python` are set.
    """
    if module and no_python:
        raise ValueError("Don't use both the '--no_python' flag and the '--module' flag at the same time.")
    if no_python:
        head = [script]
    else:
        # Unbuffered, so that a line is shown when it is printed and not lost when the process is killed.
        head = [sys.executable, "-u", *(["-m"] if module else []), script]
    return [*head, *script_args], len(head)


def bound_cores(bind_cores_to_rank: bool, bind_core_list: str | None, num_ranks: int) -> list[list[int]]:
    """Return each rank's cores, or an empty list when no binding was asked for.

    Raises:
        ValueError: the list does not parse, is given without --bind_cores_to_rank, or has too few or foreign cores.
    """
    if not bind_cores_to_rank:
        if bind_core_list:
            raise ValueError(f"--bind_core_list={bind_core_list} has no effect alone; add --bind_cores_to_rank")
        return []
    if not hasattr(os, "sched_setaffinity"):
        raise ValueError("--bind_cores_to_rank is not supported on this operating system; leave it out")
    allowed = sorted(os.sched_getaffinity(0))
    cores = parse_core_list(bind_core_list) if bind_core_list else allowed
    foreign = sorted(set(cores) - set(allowed))
    if foreign:
        raise ValueError(f"--bind_core_list={bind_core_list}: cores {foreign} are not among this machine's {allowed}")
    return split_cores(cores, num_ranks)


def run(plan: LaunchPlan) -> int:
    """Start the processes and wait for them.

    Returns:
        0, or the exit code of the rank that failed first (128 + n for signal n), or 128 + n when this process was
        ended by signal n. Its traceback has then been written to stderr, last.

    Raises:
        RuntimeError: the port that the plan names is in use.
    """
    with _pid_file(plan.save_pid), _children_ended() as success:
        explicit = plan.master_port is not None
        port = plan.master_port if plan.master_port is not None else TORCH_DISTRIBUTED_DEFAULT_PORT
        if port == 0:
            port = free_port()  # every rank must be told the same number, so it is chosen here and not by the first who binds
        for attempt in range(PORT_ATTEMPTS):
            try:
                code = _run_on_port(plan, port)
            except RuntimeError as error:
                if "EADDRINUSE" not in str(error) and "address already in use" not in str(error).lower():
                    raise
                if explicit:
                    raise RuntimeError(
                        f"--master_port={port}: the port is in use; name another one, or leave the flag out "
                        "to have a free one chosen"
                    ) from error
                if attempt + 1 == PORT_ATTEMPTS:
                    raise
                logger.info("port %d is in use: taking a free one", port)
                port = free_port()
            else:
                success[0] = code == 0
                return code
    raise AssertionError(f"{PORT_ATTEMPTS} attempts ended without a result or an error")


def free_port() -> int:
    """Return a TCP port that was free a moment ago."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _run_on_port(plan: LaunchPlan, port: int) -> int:
    # startup: the agent is needed here only, and programs import this package for a constant
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from deepspeed.launcher.logs import RankLogs
    from deepspeed.launcher.signals import SecondInterrupt

    folder = Path(tempfile.mkdtemp(prefix="deepspeed_"))
    try:
        logs = RankLogs(folder, list(range(plan.num_ranks)), plan.log_dir, _log_start)
        logs.start()
        try:
            with SecondInterrupt(lambda: _kill_ranks(logs.history)):
                _run_agent(plan, port, folder, logs)
        except ChildFailedError as error:
            logs.stop()
            return _report_failure(error.failures, logs.history)
        except SignalException as error:
            return 128 + int(error.sigval)
        except KeyboardInterrupt:
            return 128 + int(signal.SIGINT)
        finally:
            logs.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def _run_agent(plan: LaunchPlan, port: int, folder: Path, logs: "RankLogs") -> None:
    """Run torch's agent until every process ended well; raises what it raises otherwise."""
    # startup: see _run_on_port
    from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    class PipedLogs(LogsSpecs):
        """Sends each process's output into the pipes of `logs`."""

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            error_files = {local_rank: str(folder / f"error{local_rank}.json") for local_rank in envs}
            for local_rank, environment in envs.items():
                environment["TORCHELASTIC_ERROR_FILE"] = error_files[local_rank]
            return LogsDest(
                stdouts={local_rank: str(logs.stdout_path(local_rank)) for local_rank in envs},
                stderrs={local_rank: str(logs.stderr_path(local_rank)) for local_rank in envs},
                error_files=error_files,
            )

        @property
        def root_log_dir(self) -> str:
            return str(folder)

    plan_file = folder / "plan.json"
    plan_file.write_text(json.dumps(_worker_plan(plan, logs)), encoding="utf-8")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=plan.num_ranks,
        run_id=f"deepspeed-{os.getpid()}",
        rdzv_backend="static",
        rdzv_endpoint=f"{plan.master_addr}:{port}",
        rdzv_configs={"rank": 0},
        max_restarts=0,
        start_method="spawn",
        logs_specs=PipedLogs(),
        local_addr=plan.master_addr,
    )
    _quiet_agent_logs()
    worker = Path(__file__).with_name("worker_exec.py")
    # -I -S: the user's PYTHON* variables and site packages concern the script, not these few lines before it.
    elastic_launch(config, sys.executable)("-I", "-S", str(worker), str(plan_file), "${local_rank}")


def _kill_ranks(history: "list[RankHistory]") -> None:
    """Kill the processes of every rank that still runs; each rank leads a process group of its own."""
    for seen in history:
        if seen.pid is not None and seen.exited_at is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(seen.pid, signal.SIGKILL)


def _worker_plan(plan: LaunchPlan, logs: "RankLogs") -> dict[str, Any]:
    ranks = range(plan.num_ranks)
    return {
        "launcher_pid": os.getpid(),
        "control": str(logs.control_path),
        "cores": plan.cores,
        "commands": [plan.rank_command(local_rank) for local_rank in ranks],
        "environments": [plan.rank_environment(local_rank) for local_rank in ranks],
    }


def _log_start(local_rank: int, pid: int) -> None:
    logger.info("rank %d is process %d", local_rank, pid)


def _quiet_agent_logs() -> None:
    """Keep the agent's own words for debugging: this module reports in its place."""
    if logger.isEnabledFor(logging.DEBUG):
        return
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.distributed.launcher")):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _report_failure(failures: dict[int, Any], history: "list[RankHistory]") -> int:
    """Write what happened, the first failing rank's traceback last, and return the code to exit with."""
    first = first_failure({rank: failure.exitcode for rank, failure in failures.items()}, history)
    code = failures[first].exitcode
    lines = []
    for rank, failure in sorted(failures.items()):
        if rank != first:
            lines.append(f"rank {rank} (process {failure.pid}) then ended with {describe_exit(failure.exitcode)}")
    lines.append(f"rank {first} (process {failures[first].pid}) failed first, with {describe_exit(code)}")
    tail = [line.decode(errors="replace") for line in history[first].last_traceback()]
    lines.append(f"what rank {first} last wrote to stderr:" if tail else f"rank {first} wrote nothing to stderr")
    sys.stdout.flush()
    sys.stderr.write("".join(f"[deepspeed] {line}\n" for line in lines) + "".join(f"{line}\n" for line in tail))
    sys.stderr.flush()
    if code == -signal.SIGTERM and history[first].traceback_at is not None:
        # It raised, its peers noticed and ended, and the agent then ended it while it was still cleaning up.
        return 1
    return 128 - code if code < 0 else int(code)


def first_failure(exit_codes: dict[int, int], history: "list[RankHistory]") -> int:
    """Return the rank whose failure caused the others: the one that raised, or else ended, first.

    Args:
        exit_codes: codes of the failed ranks by rank; negative for a signal.
        history: what was seen of every rank, by rank.
    """
    ends = [end for rank in exit_codes if (end := history[rank].exited_at) is not None]
    first_end = min(ends, default=0.0)

    def moment(rank: int) -> tuple[bool, float]:
        seen = history[rank]
        raised, ended = seen.traceback_at, seen.exited_at
        # An old traceback was caught and logged; one from just before the first end is a cause.
        if raised is not None and raised > first_end - TRACEBACK_WINDOW_SECONDS:
            return False, min(raised, ended if ended is not None else raised)
        # Without a time of its end (no pidfd), a rank that the agent ended cannot be the first.
        return ended is None and exit_codes[rank] == -signal.SIGTERM, ended if ended is not None else first_end

    return min(sorted(exit_codes), key=moment)


def describe_exit(exit_code: int) -> str:
    """Return `exit code 3`, or `signal SIGKILL (9)` for a negative code."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"signal {signal.Signals(-exit_code).name} ({-exit_code})"
    except ValueError:
        return f"signal {-exit_code}"


@contextlib.contextmanager
def _pid_file(main_pid: int | None) -> Iterator[None]:
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


@contextlib.contextmanager
def _children_ended() -> Iterator[list[bool]]:
    """Kill every descendant that is left at the end, unless the caller sets the yielded flag.

    The agent ends the processes it started; those that *they* started (loader workers, compilers) are orphans by then
    and would come to init. A subreaper (Linux) gets them instead, so that they can be found.
    """
    success = [False]
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield success
    finally:
        if not success[0]:
            _kill_descendants(os.getpid())


def _kill_descendants(pid: int) -> None:
    # startup: psutil is needed only after a failure
    import psutil

    children = psutil.Process(pid).children(recursive=True)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(children, timeout=KILL_WAIT_SECONDS)


def terminate_process_tree(pid: int) -> None:
    """End a process and all its descendants: SIGTERM to all, SIGKILL to those left after a few seconds."""
    import psutil  # startup: see _kill_descendants

    try:
        process = psutil.Process(pid)
        tree = [*process.children(recursive=True), process]
    except psutil.NoSuchProcess:
        return
    for member in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.terminate()
    _, alive = psutil.wait_procs(tree, timeout=KILL_WAIT_SECONDS)
    for member in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(alive, timeout=KILL_WAIT_SECONDS)


def parse_args(args: list[str] | None = None) -> argparse.Namespace:
    """Parse this node's command line; `args` defaults to the process's own."""
    parser = argparse.ArgumentParser(
        description="Start the training processes of one node. `deepspeed` is the command for users.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--node_rank", type=int, default=0, help="rank of this node; only 0 in this release")
    parser.add_argument("--master_addr", default=LOCAL_MASTER_ADDR, help="address the processes meet at")
    parser.add_argument("--master_port", type=int, default=None, help="port they meet at")
    parser.add_argument("--world_info", default="None", help="base64 of the JSON object {host: slots}")
    parser.add_argument("--module", action="store_true", help="run the script as `python -m`")
    parser.add_argument("--no_python", action="store_true", help="run the script without `python` before it")
    parser.add_argument("--enable_elastic_training", action="store_true", help="not in this release")
    parser.add_argument("--min_elastic_nodes", type=int, default=-1, help="not in this release")
    parser.add_argument("--max_elastic_nodes", type=int, default=-1, help="not in this release")
    parser.add_argument("--no_local_rank", action="store_true", help="do not pass --local_rank to the script")
    parser.add_argument("--save_pid", type=int, default=0, help="id of the file that keeps the launcher's process id")
    parser.add_argument("--enable_each_rank_log", default="None", help="folder of one log file per rank")
    parser.add_argument("--bind_cores_to_rank", action="store_true", help="bind each rank to cores of its own")
    parser.add_argument("--bind_core_list", default=None, help="cores to bind to, e.g. 1,3-5,7")
    parser.add_argument("--log_level", default="info", choices=["debug", "info", "warning", "error", "critical"])
    parser.add_argument("-q", "--quiet", action="store_true", help="same as --log_level error")
    parser.add_argument("training_script", help="the script, followed by its arguments")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    return parser.parse_args(args)


def decode_world_info(world_info: str) -> dict[str, list[int]]:
    """Decode what `runner.encode_world_info` made.

    Raises:
        ValueError: it is no base64 of a JSON object.
    """
    try:
        decoded = json.loads(base64.urlsafe_b64decode(world_info))
    except ValueError as error:
        raise ValueError(f"--world_info={world_info}: not the base64 of a JSON object {{host: slots}}") from error
    if not isinstance(decoded, dict):
        raise ValueError(f"--world_info={world_info}: decodes to {decoded!r}, not to {{host: slots}}")
    return decoded


def main() -> None:
    """Start this node's processes as the command line says, and exit with their code."""
    args = parse_args()
    logger.setLevel(get_log_level_from_string("error" if args.quiet else args.log_level))
    world = decode_world_info(args.world_info)
    if len(world) != 1 or args.node_rank != 0:
        raise ValueError(f"--world_info names {len(world)} hosts: launching over several nodes comes in a later release")
    for flag, unset in (("enable_elastic_training", False), ("min_elastic_nodes", -1), ("max_elastic_nodes", -1)):
        if getattr(args, flag) != unset:
            raise ValueError(f"--{flag}: elastic training comes in a later release; leave the flag out")
    (slots,) = world.values()
    command, index = build_command(args.training_script, args.training_script_args, args.module, args.no_python)
    plan = LaunchPlan(
        command=command,
        num_ranks=len(slots),
        pass_local_rank=not args.no_local_rank,
        local_rank_index=index,
        master_addr=args.master_addr,
        master_port=args.master_port,
        environment=device_environment(slots),
        cores=bound_cores(args.bind_cores_to_rank, args.bind_core_list, len(slots)),
        log_dir=None if args.enable_each_rank_log == "None" else args.enable_each_rank_log,
        save_pid=args.save_pid or None,
    )
    sys.exit(run(plan))


if __name__ == "__main__":
    main()

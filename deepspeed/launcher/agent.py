"""One node's processes under torch's elastic agent: its set-up, and its findings in our terms."""

import contextlib
import logging
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from deepspeed.launcher import constants
from deepspeed.launcher.failures import Exit
from deepspeed.launcher.logs import RankHistory, RankLogs
from deepspeed.launcher.plan import Elastic, LaunchPlan, free_port, port_in_use
from deepspeed.launcher.signals import AgentWatch, Interrupted, ending_signals, raising_signals
from deepspeed.utils.logging import logger

PORT_ATTEMPTS = 5
WORKER = Path(__file__).with_name("worker_exec.py")


def run_with_agent(plan: LaunchPlan, folder: Path, logs: RankLogs) -> dict[int, Exit]:
    """Run the processes until all ended well or one did not; return the failed by local rank."""
    # startup: the agent is needed here only, and programs import this package for a constant
    import torch.distributed.launcher.api  # noqa: F401 with all that the agent needs
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError

    def interruption(number: int) -> BaseException:
        # As the agent's own handler, which it installs with its processes.
        return SignalException(f"signal {number}", signal.Signals(number))

    watch = AgentWatch(lambda: kill_ranks(logs.history))
    try:
        with watch, raising_signals(interruption):
            _run_on_some_port(plan, folder, logs)
    except ChildFailedError as error:
        # The agent's own keys are global ranks.
        failures = error.failures.values()
        return {one.local_rank: Exit(one.pid, one.exitcode) for one in failures}
    except RendezvousClosedError as error:
        raise RuntimeError(
            f"--master_addr={plan.master_addr}: another node has ended the job: its processes "
            "ended well, or it gave up; its output says which"
        ) from error
    except RendezvousError as error:
        raise RuntimeError(
            f"--master_addr={plan.master_addr}: the nodes' rendezvous there cannot be reached, "
            f"or its node is gone ({error}); start its node first, and this one again"
        ) from error
    except SignalException as error:
        raise Interrupted(int(error.sigval), watch.first_at) from error
    return {}


def _run_on_some_port(plan: LaunchPlan, folder: Path, logs: RankLogs) -> None:
    """Run the agent on the plan's port, or on a free one where it names none."""
    # In a larger job the agent's store is for this node alone; the plan's port is rank 0's to open.
    address = plan.master_addr if plan.place is None else constants.LOCAL_MASTER_ADDR
    wanted = plan.master_port if plan.place is None else 0
    port = constants.TORCH_DISTRIBUTED_DEFAULT_PORT if wanted is None else wanted
    if port == 0:
        # Every rank must be told the same number, so it is not the first one's to bind.
        port = free_port()
    for attempts_left in reversed(range(PORT_ATTEMPTS)):
        try:
            _run(plan, f"{address}:{port}", folder, logs)
        except RuntimeError as error:
            said = str(error).lower()
            if "eaddrinuse" not in said and "address already in use" not in said:
                raise
            if wanted:
                raise RuntimeError(port_in_use(port)) from error
            if not attempts_left:
                raise
            logger.info("port %d is in use: taking a free one", port)
            port = free_port()
        else:
            return


def _run(plan: LaunchPlan, endpoint: str, folder: Path, logs: RankLogs) -> None:
    """Run torch's agent until every process ended well; raises what it raises otherwise."""
    # startup: see run_with_agent
    from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    class PipedLogs(LogsSpecs):
        """Sends each process's output into the pipes of `logs`."""

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            files = {local_rank: str(folder / f"error{local_rank}.json") for local_rank in envs}
            for local_rank, environment in envs.items():
                environment["TORCHELASTIC_ERROR_FILE"] = files[local_rank]
            return LogsDest(
                stdouts={local_rank: str(logs.stdout_path(local_rank)) for local_rank in envs},
                stderrs={local_rank: str(logs.stderr_path(local_rank)) for local_rank in envs},
                error_files=files,
            )

        @property
        def root_log_dir(self) -> str:
            return str(folder)

    plan_file = folder / "plan.json"
    plan.write_for_workers(plan_file, logs.control_path)
    if plan.elastic:
        settings = _rendezvous_of_nodes(plan, plan.elastic, folder, logs)
    else:
        settings = _rendezvous_of_one(endpoint)
    if hasattr(LaunchConfig, "signals_to_handle"):
        # What `nohup` has told this process to ignore stays ignored.
        names = [*(number.name for number in ending_signals()), signal.SIGQUIT.name]
        settings["signals_to_handle"] = ",".join(names)
    elif signal.SIGHUP not in ending_signals():
        _ignore_hangups()
    config = LaunchConfig(
        nproc_per_node=plan.num_ranks, start_method="spawn", logs_specs=PipedLogs(), **settings
    )
    _quiet_agent_logs()
    # -I -S: the user's PYTHON* variables and site packages concern the script, not these few lines
    # before it.
    elastic_launch(config, sys.executable)("-I", "-S", str(WORKER), str(plan_file), "${local_rank}")


def _ignore_hangups() -> None:
    """Let the agent of a torch that takes no wishes (before 2.13) ignore SIGHUP, which it otherwise
    handles from the start of its ranks on.
    """
    # startup: see run_with_agent
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext

    original = SubprocessContext._start

    def start(context: SubprocessContext) -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        original(context)

    SubprocessContext._start = start  # type: ignore[method-assign]  # handlers are set just before


def _rendezvous_of_nodes(
    plan: LaunchPlan, elastic: Elastic, folder: Path, logs: RankLogs
) -> dict[str, Any]:
    """Register the rendezvous and the agent of elastic jobs with torch; return their settings."""
    # startup: see run_with_agent
    from deepspeed.launcher.job import rendezvous

    def end_cut_off() -> None:
        # The main thread waits for the rendezvous in native code, where no signal and no
        # exception reaches it.
        kill_ranks(logs.history)
        shutil.rmtree(folder, ignore_errors=True)
        sys.stderr.write(
            f"deepspeed: error: --master_addr={plan.master_addr}: the nodes' rendezvous there "
            f"has not answered for {constants.node_timeout():g} seconds; this node is ended, start "
            "it again when it can be reached\n"
        )
        sys.stderr.flush()
        os._exit(2)

    rendezvous.register()
    settings = rendezvous.rendezvous_settings(elastic, plan.master_addr, plan.master_port)
    settings["rdzv_configs"][rendezvous.ON_CUT] = end_cut_off
    return settings


def _rendezvous_of_one(endpoint: str) -> dict[str, Any]:
    """Return the settings of a launch of this node alone, without restarts."""
    return {
        "min_nodes": 1,
        "max_nodes": 1,
        "max_restarts": 0,
        "rdzv_backend": "static",
        "rdzv_endpoint": endpoint,
        "rdzv_configs": {"rank": 0},
        "run_id": f"deepspeed-{os.getpid()}",
        "local_addr": endpoint.rpartition(":")[0],
    }


def kill_ranks(history: list[RankHistory]) -> None:
    """Kill every rank that still runs; each leads a process group of its own."""
    for seen in history:
        if seen.pid is not None and seen.exited_at is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(seen.pid, signal.SIGKILL)


def _quiet_agent_logs() -> None:
    """Keep the agent's own words for debugging: this package reports in its place."""
    if logger.isEnabledFor(logging.DEBUG):
        return
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.distributed.launcher")):
            logging.getLogger(name).setLevel(logging.CRITICAL)
